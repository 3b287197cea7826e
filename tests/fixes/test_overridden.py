"""Code that stands in the way of a fix though the faulty lines are there: it is drift, and stays as it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.fixes.engines import ASYNC, FAULTY, FAULTY_LINE, RESUMED, RIGHT, Engine, install

CLASS = {RESUMED: "InputBatch", ASYNC: "HPUModelRunner"}
METHOD = {RESUMED: "add_request", ASYNC: "_create_decode_input_data"}
# What follows the class, whose last lines are its own.
AGAIN = {
    "method in a branch": "    if True:\n        def {method}(self, *args): ...\n",
    "asynchronous method": "    async def {method}(self, *args): ...\n",
    "class for a method": "    class {method}: ...\n",
    "value": "    {method} = None\n",
    "typed value": "    {method}: object = None\n",
    "one of several values": "    [other, {method}] = 1, 2\n",
    "value in a test": "    if ({method} := other): ...\n",
    "loop": "    for {method} in (): ...\n",
    "import": "    import os as {method}\n",
    "import in a try": "    try:\n        from os import {method}\n    except ImportError: ...\n",
    "gone": "    del {method}\n",
    "of an instance": "    def patch(self):\n        self.{method} = None\n",
    "by name, of an instance": "    def patch(self, name):\n        setattr(self, name, None)\n",
    "of the class": "{class_}.{method} = None\n",
    "of the class, by name": "setattr({class_}, '{method}', None)\n",
    "gone from the class": "del {class_}.{method}\n",
    "of the class, in a function": "def patch():\n    {class_}.{method} = None\n",
    "other class": "{class_} = dict\n",
    "class in a branch": "if True:\n    class {class_}: ...\n",
    "imported class": "from os import path as {class_}\n",
    "function for a class": "def {class_}(): ...\n",
    "class gone": "del {class_}\n",
    "class of a function": "def patch():\n    global {class_}\n    {class_} = dict\n",
    "class of a with": "with open('x') as {class_}: ...\n",
    "class of an except": "try: ...\nexcept OSError as {class_}: ...\n",
}
OTHERS = {
    "another class's": "class Other:\n    def {method}(self): ...\n"
    "    def set(self):\n        self.{method} = 1\n",
    "another name": "    {method}_2 = None\n{class_}.other = 1\nsetattr({class_}, 'other', 1)\n",
    "a function's own": "def make():\n    {class_} = {method} = 1\n    return {class_}\n",
    "read": "OTHER = {class_}.{method}\n",
}


def refuses(root: Path, name: str, code: str, reason: str = "") -> None:
    """Check, apply and diff agree that the code, which Python takes, is drift."""
    ast.parse(code)
    engine = install(root, name, code)
    first = engine.files()
    for report in (engine.fix.check(root), engine.fix.apply(root)):
        assert report.status == "drifted"
        assert reason in report.reason
    with pytest.raises(Exception, match=r"hpu_\w+\.py: "):
        engine.fix.diff(root)
    assert engine.files() == first


@pytest.mark.parametrize("form", ["faulty", "right"])
@pytest.mark.parametrize("again", AGAIN)
def test_what_is_defined_again_is_drift(tmp_path: Path, name: str, again: str, form: str) -> None:
    code = {"faulty": FAULTY, "right": RIGHT}[form][name]
    refuses(tmp_path, name, code + AGAIN[again].format(class_=CLASS[name], method=METHOD[name]), "defines ")


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_defined_elsewhere_is_fine(tmp_path: Path, name: str, other: str) -> None:
    more = OTHERS[other].format(class_=CLASS[name], method=METHOD[name])
    engine = install(tmp_path, name, FAULTY[name] + more)
    assert engine.fix.check(tmp_path).status == "not applied"
    assert engine.fix.apply(tmp_path).status == "applied"


GUARD = FAULTY_LINE[RESUMED]
CALL = "            self._prepare_input_ids(scheduler_output)\n"
LAYOUTS = {
    "after a backslash": (RESUMED, GUARD, GUARD.replace("if ", "if \\\n           ")),
    "after two": (RESUMED, GUARD, GUARD.replace("if ", "if \\\n \\\n           ")),
    "after a string": (ASYNC, CALL, '            """a\n"""; self._prepare_input_ids(scheduler_output)\n'),
    "after a backslash and more": (ASYNC, CALL, CALL.replace("self.", "x = 1; \\\n   self.")),
    "after a call": (ASYNC, CALL, CALL.replace("self.", "print(\n1); self.")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_that_the_edit_doesnt_fit_is_drift_for_all(tmp_path: Path, layout: str) -> None:
    """What check promises is what apply does, and what diff prints can be read."""
    name, old, new = LAYOUTS[layout]
    assert FAULTY[name].count(old) == 1
    refuses(tmp_path, name, FAULTY[name].replace(old, new), "the edit doesn't fit")


COUNT = "        self.num_prompt_tokens[req_index] = num_prompt_tokens\n"
COUNTS = {
    "early return": (COUNT, COUNT + "        if request.num_computed_tokens > 0:\n            return\n"),
    "return that hangs on something": (COUNT, COUNT + "        if self.guided:\n            return\n"),
    "return in a loop": (COUNT, COUNT + "        for _ in self.guided:\n            return\n"),
    "raised": (COUNT, COUNT + "        if request.num_computed_tokens > 0:\n            raise ValueError\n"),
    "walrus": (GUARD, GUARD.replace("request.num_computed_tokens", "(n := request.num_computed_tokens)")),
    "walrus before": (COUNT, "        if (num_prompt_tokens := 3) < 0: ...\n" + COUNT),
    "list": (COUNT, COUNT.replace("= num_prompt_tokens", "= request.prompt_token_ids")),
    "by another name": (
        "        if guide :=",
        "        counts = self.num_prompt_tokens\n        counts[req_index] = end_idx\n        if guide :=",
    ),
    "by a call": ("        if guide :=", "        fill(self.num_prompt_tokens)\n        if guide :="),
    "by its method": ("        if guide :=", "        self.num_prompt_tokens.clear()\n        if guide :="),
    "as a whole": ("        if guide :=", "        self.num_prompt_tokens = [1]\n        if guide :="),
    "of another row": (
        "        if guide :=",
        "        self.num_prompt_tokens[0] = end_idx\n        if guide :=",
    ),
    "of another request": (COUNT, "        request = self.lookup(request)\n" + COUNT),
    "of another request in a loop": (COUNT, "        for request in self.guided: ...\n" + COUNT),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("form", ["faulty", "right"])
def test_prompt_that_is_counted_in_another_way_is_drift(tmp_path: Path, count: str, form: str) -> None:
    old, new = COUNTS[count]
    code = FAULTY[RESUMED].replace(old, new)
    assert code != FAULTY[RESUMED]
    if form == "right":
        code = code.replace(
            "        if request.num_computed_tokens == 0:\n            self.num_p",
            "        if request.num_computed_tokens < end_idx - 1:\n            self.num_p",
        )
    refuses(tmp_path, RESUMED, code)


TOTAL = "        total_num_scheduled_tokens = sum(num_tokens_per_req)\n"
DEVICE = "        token_ids_device = async"
BRANCH = "        if self.use_async_scheduling and"
HEAD = "if self.use_async_scheduling and scheduler_output is not None:\n"
ROWS = {
    "buffer zeroed": (CALL, "            self.input_ids_hpu.zero_()\n" + CALL),
    "buffer zeroed on the line": (CALL, CALL.replace("self.", "self.input_ids_hpu.zero_(); self.")),
    "buffer under another name": (CALL, "            rows = self.input_ids_hpu\n" + CALL),
    "total zeroed": (CALL, "            total_num_scheduled_tokens = 0\n" + CALL),
    "total zeroed before": (DEVICE, "        total_num_scheduled_tokens = 0\n" + DEVICE),
    "total zeroed in a test": (DEVICE, "        if (total_num_scheduled_tokens := 0): ...\n" + DEVICE),
    "total in a dead branch": (TOTAL, "        if False:\n    " + TOTAL),
    "total afterwards": (TOTAL, ""),
    "host rows emptied": (DEVICE, "        self.input_ids_cpu.fill_(0)\n" + DEVICE),
    "host rows set": (DEVICE, "        self.input_ids_cpu[0] = 0\n" + DEVICE),
    "host rows in part": (DEVICE, "        self.input_ids_cpu[:num_decodes].zero_()\n" + DEVICE),
    "host rows under another name": (DEVICE, "        rows = self.input_ids_cpu\n" + DEVICE),
    "host rows read and emptied": (".view(-1, 1)\n        else:", ".view(-1, 1).zero_()\n        else:"),
    "name taken": (DEVICE, "        host_input_ids = None\n" + DEVICE),
    "name read": ("        return token_ids_device", "        return token_ids_device, host_input_ids"),
    "name of an argument": ("scheduler_output=None):", "scheduler_output=None, host_input_ids=None):"),
    "branch in a loop": (BRANCH, "        for _ in (0,):\n " + BRANCH),
    "branch twice": (
        "        # A step that only keeps others company has nothing scheduled.\n",
        "        if self.use_async_scheduling and scheduler_output is not None: ...\n",
    ),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["faulty", "seed before", "seed after"])
def test_rows_that_are_touched_otherwise_are_drift(tmp_path: Path, rows: str, form: str) -> None:
    """Even where a known seed stands before or after what spoils it."""
    old, new = ROWS[rows]
    seed = RIGHT[ASYNC][
        RIGHT[ASYNC].index("            self.input_ids_hpu[:total") : RIGHT[ASYNC].index(CALL)
    ]
    code = FAULTY[ASYNC].replace(old, new)
    assert code != FAULTY[ASYNC]
    if rows == "total afterwards":
        code = code.replace("        return token_ids_device", TOTAL + "        return token_ids_device")
    if form == "seed before":
        branch = code.rindex(HEAD) + len(HEAD)
        code = code[:branch] + seed + code[branch:]
    if form == "seed after":
        line = code.rindex("\n", 0, code.index("self._prepare_input_ids(")) + 1
        code = code[:line] + seed + code[line:]
    refuses(tmp_path, ASYNC, code)


def test_applied_fix_is_judged_by_the_same_rules(engine: Engine) -> None:
    assert engine.fix.apply(engine.root).changed
    spoilt = {
        RESUMED: (b"        if guide :=", b"        self.num_prompt_tokens.clear()\n        if guide :="),
        ASYNC: (CALL.encode(), b"            self.input_ids_hpu.zero_()\n" + CALL.encode()),
    }
    engine.file.write_bytes(engine.read().replace(*spoilt[engine.fix.name]))
    assert engine.fix.check(engine.root).status == "drifted"

"""The forms of a file: formatted, encoded and drifted in other ways."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixes.engines import ASYNC, FAULTY, FAULTY_LINE, NAMES, RESUMED, install


def spread(code: str) -> str:
    """Break the lines as another formatter would."""
    return code.replace(
        "if request.num_computed_tokens == 0:", "if (\n            request.num_computed_tokens\n == 0\n):"
    ).replace(
        "self._prepare_input_ids(scheduler_output)\n            if num_tokens == 1:",
        "self._prepare_input_ids(\n                scheduler_output,\n            )\n\n"
        "            if (num_tokens == 1):  # one",
    )


def commented(code: str) -> str:
    return code.replace(":\n            self", ":  # why\n            # how\n            self").replace(
        "== 0:", "==  0 :"
    )


def unparsed(code: str) -> str:
    return ast.unparse(ast.parse(code))


FORMS: dict[str, Callable[[str], bytes]] = {
    "spread": lambda code: spread(code).encode(),
    "comments": lambda code: commented(code).encode(),
    "unparsed": lambda code: unparsed(code).encode(),
    "carriage returns": lambda code: code.replace("\n", "\r\n").encode(),
    "mixed line ends": lambda code: code.replace("\n", "\r\n", 9).encode(),
    "byte-order mark": lambda code: b"\xef\xbb\xbf" + code.encode(),
    "byte-order mark and carriage returns": lambda code: (
        b"\xef\xbb\xbf" + code.replace("\n", "\r\n").encode()
    ),
    "tabs": lambda code: code.replace("    ", "\t").encode(),
    "latin-1": lambda code: ("# -*- coding: latin-1 -*-\n" + code).encode("latin-1"),
    "cp1252": lambda code: (
        "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n" + code + "# \u20ac"
    ).encode("cp1252"),
    "no last line end": lambda code: code.rstrip("\n").encode(),
    "form feeds and odd spaces": lambda code: code.replace("\n\n", "\n\x0c\n# \u2028 \x85 \n").encode(),
    "doubtful escapes": lambda code: code.replace('"""', '"""\\d ', 1).encode(),
    "wide characters before": lambda code: code.replace('"""', '"""\U0001f600 \u4e2d ', 1).encode(),
    "wide characters on the line": lambda code: code.replace("== 0:", "== 0:  # \u4e2d\u6587").encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_faulty_in_any_form(tmp_path: Path, name: str, form: str) -> None:
    engine = install(tmp_path, name, FORMS[form](FAULTY[name]))
    first = engine.files()

    assert engine.fix.check(tmp_path).status == "not applied"
    assert engine.fix.apply(tmp_path).status == "applied"
    assert engine.fix.check(tmp_path).status == "applied"
    engine.run()
    assert engine.fix.revert(tmp_path).changed
    assert engine.files() == first


@pytest.mark.parametrize("form", ["carriage returns", "byte-order mark and carriage returns", "tabs"])
def test_new_lines_look_like_the_others(tmp_path: Path, name: str, form: str) -> None:
    engine = install(tmp_path, name, FORMS[form](FAULTY[name]))
    engine.fix.apply(tmp_path)
    line = next(line for line in engine.read().splitlines(keepends=True) if engine.fix.mark.encode() in line)

    assert line.endswith(b"\r\n") == (form != "tabs")
    assert line.startswith(b"\t") == (form == "tabs")


# What replaces the faulty line; then a word of the reason.
RESUMED_RIGHT = {
    "names": "        known = num_prompt_tokens + len(request.output_token_ids)\n"
    "        is_resumed = request.num_computed_tokens < known - 1\n        if is_resumed:\n"
    "            self.num_p",
    "whole": "        if request.num_computed_tokens + 1 < end_idx or not request.num_computed_tokens:\n"
    "            self.num_p",
    "inverted": "        if not request.num_computed_tokens >= end_idx - 1:\n            self.num_p",
    "chosen": "        is_resumed = request.num_computed_tokens < end_idx - 1\n"
    "        self.num_prompt_tokens[req_index] = end_idx if is_resumed else "
    "num_prompt_tokens\n        if False:\n            self.num_p",
}
ASYNC_RIGHT = {
    "assigned": "            self.input_ids_hpu[:total_num_scheduled_tokens] = "
    "self.input_ids_cpu[:total_num_scheduled_tokens]\n",
    "by helper": "            async_h2d_copy(self.input_ids_cpu[:total_num_scheduled_tokens],\n"
    "                           dest_tensor=self.input_ids_hpu[:total_num_scheduled_tokens])\n",
    "by branch": "            if num_tokens == 1:\n"
    "                self.input_ids_hpu[:num_decodes].copy_(token_ids_device[:num_decodes].view(-1))\n"
    "            else:\n                self.input_ids_hpu[:total_num_scheduled_tokens].copy_(\n"
    "                    self.input_ids_cpu[:total_num_scheduled_tokens])\n",
}
RIGHT_FORMS = [(RESUMED, form, text) for form, text in RESUMED_RIGHT.items()] + [
    (ASYNC, form, text + FAULTY_LINE[ASYNC]) for form, text in ASYNC_RIGHT.items()
]


@pytest.mark.parametrize(("name", "form", "text"), RIGHT_FORMS)
def test_right_in_other_words_needs_nothing(tmp_path: Path, name: str, form: str, text: str) -> None:
    engine = install(tmp_path, name, FAULTY[name].replace(FAULTY_LINE[name], text))
    first = engine.files()

    assert engine.fix.check(tmp_path).status == "not needed"
    assert engine.fix.apply(tmp_path).status == "not needed"
    assert engine.files() == first


DRIFTS = {
    "no class": (RESUMED, "class InputBatch:", "class Batch:", "0 classes InputBatch"),
    "two classes": (RESUMED, "class Rows:", "class InputBatch:", "2 classes InputBatch"),
    "no method": (
        RESUMED,
        "def add_request(self, request, req_index=None)",
        "def add(self)",
        "0 methods add_request",
    ),
    "other limit": (
        RESUMED,
        "tokens == 0:\n            self.num_p",
        "tokens <= 1:\n            self.num_p",
        "neither",
    ),
    "other count": (
        RESUMED,
        "= num_prompt_tokens + len(request.output_token_ids)\n\n",
        "= num_prompt_tokens + 1\n\n",
        "neither",
    ),
    "never": (
        RESUMED,
        "= num_prompt_tokens + len(request.output_token_ids)\n\n",
        "= num_prompt_tokens\n\n",
        "neither",
    ),
    "always folded": (RESUMED, FAULTY_LINE[RESUMED], "        if True:\n            self.num_p", "neither"),
    "flag decides": (
        RESUMED,
        "request.num_computed_tokens == 0:\n            self.num_p",
        "request.is_resumed:\n            self.num_p",
        "unknown way",
    ),
    "in a loop": (
        RESUMED,
        FAULTY_LINE[RESUMED],
        "        for _ in (1,):\n            self.num_p",
        "unknown way",
    ),
    "overwritten": (
        RESUMED,
        "        if guide :=",
        "        self.num_prompt_tokens[req_index] += 1\n        if guide :=",
        "unknown way",
    ),
    "other prompt": (
        RESUMED,
        "num_prompt_tokens = len(request.prompt_token_ids)",
        "num_prompt_tokens = count(request)",
        "unknown way",
    ),
    "other guard": (
        RESUMED,
        "if request.num_computed_tokens == 0:\n            self.num_p",
        "if request.num_computed_tokens < 1:\n            self.num_p",
        "not one guard",
    ),
    "no runner": (ASYNC, "class HPUModelRunner:", "class Runner:", "0 classes HPUModelRunner"),
    "other condition": (
        ASYNC,
        "if self.use_async_scheduling and scheduler_output is not None:",
        "if self.use_async_scheduling:",
        "not one branch",
    ),
    "other total": (
        ASYNC,
        "total_num_scheduled_tokens = sum(num_tokens_per_req)",
        "total_num_scheduled_tokens = 0",
        "count its decode tokens",
    ),
    "other argument": (
        ASYNC,
        "self._prepare_input_ids(scheduler_output)",
        "self._prepare_input_ids(scheduler_output, True)",
        "doesn't call",
    ),
    "other read": (
        ASYNC,
        "= self.input_ids_hpu[:num_decodes].view(-1, 1)",
        "= self.input_ids_hpu[1:num_decodes].view(-1, 1)",
        "another place",
    ),
    "other layout": (
        ASYNC,
        "torch.split(self.input_ids_hpu[:total_num_scheduled_tokens],",
        "torch.split(self.input_ids_hpu[:padded_batch_size],",
        "another place",
    ),
    "no branches": (
        ASYNC,
        "            if num_tokens == 1:\n                token_ids_device",
        "            if num_tokens:\n                token_ids_device",
        "known way",
    ),
    "written before": (
        ASYNC,
        "            self._prepare",
        "            self.input_ids_hpu[:] = 0\n            self._prepare",
        "unknown way",
    ),
    "written far before": (
        ASYNC,
        "        token_ids_device = async",
        "        self.input_ids_hpu.zero_()\n        token_ids_device = async",
        "unknown way",
    ),
    "seeded short": (
        ASYNC,
        "            self._prepare",
        "            self.input_ids_hpu[:num_decodes] = self.input_ids_cpu[:num_decodes]\n"
        "            self._prepare",
        "unknown way",
    ),
    "helper seeds": (
        ASYNC,
        "        end = 0\n",
        "        end = 0\n        self.input_ids_hpu.copy_(self.input_ids_cpu)\n",
        "from the host",
    ),
    "no helper": (ASYNC, "def _prepare_input_ids", "def _other", "0 methods _prepare_input_ids"),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_drifted_code_is_left_alone(tmp_path: Path, drift: str) -> None:
    name, old, new, reason = DRIFTS[drift]
    assert FAULTY[name].count(old) == 1
    engine = install(tmp_path, name, FAULTY[name].replace(old, new))
    first = engine.files()

    for report in (engine.fix.check(tmp_path), engine.fix.apply(tmp_path)):
        assert report.status == "drifted"
        assert reason in report.reason
        assert str(engine.file) in report.reason
    assert engine.files() == first


BROKEN = {
    "syntax": b"class InputBatch(:\n",
    "zeros": b"class InputBatch:\n    a = '\0'\n",
    "not UTF-8": b"# \xff\xfe\nclass InputBatch: pass\n",
    "unknown encoding": b"# coding: klingon\nclass InputBatch: pass\n",
    "deep": b"a = " + b"(" * 9000 + b")" * 9000,
    "empty": b"",
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", NAMES)
def test_file_that_isnt_python_is_left_alone(tmp_path: Path, name: str, broken: str) -> None:
    engine = install(tmp_path, name, BROKEN[broken])

    for report in (engine.fix.check(tmp_path), engine.fix.apply(tmp_path)):
        assert report.status == "drifted"
    assert engine.read() == BROKEN[broken]

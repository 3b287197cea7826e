"""Small packages with the shapes that the fixes look for: our own code, in the form that releases have it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fixes.tensors import TORCH_LIKE

if TYPE_CHECKING:
    from fixlib import Fix

FIXES = Path(__file__).parents[2] / "fixes"
RESUMED, ASYNC = "resumed-prefill-logits", "async-inputs"
NAMES = [RESUMED, ASYNC]

INPUT_BATCH = '''\
"""The rows of a step."""  # caf\u00e9


class Rows:
    def add_request(self, request, req_index):
        if request.num_computed_tokens == 0:
            self.counts[req_index] = 0


class InputBatch:
    """Requests by row."""

    def __init__(self, rows):
        self.num_prompt_tokens = [0] * rows
        self.num_computed_tokens = [0] * rows
        self.tokens = [[] for _ in range(rows)]
        self.guided = set()

    def add_request(self, request, req_index=None):
        if req_index is None:
            req_index = len(self.guided)

        num_prompt_tokens = len(request.prompt_token_ids)
        self.num_prompt_tokens[req_index] = num_prompt_tokens
        self.tokens[req_index][:num_prompt_tokens] = request.prompt_token_ids
        end_idx = num_prompt_tokens + len(request.output_token_ids)
        self.tokens[req_index][num_prompt_tokens:end_idx] = request.output_token_ids
        # A request that was preempted   computes its outputs like a prompt.
        if request.num_computed_tokens == 0:
            self.num_prompt_tokens[req_index] = num_prompt_tokens + len(request.output_token_ids)

        if guide := request.guide:
            self.guided.add(guide)
        self.num_computed_tokens[req_index] = request.num_computed_tokens
        return req_index
'''

MODEL_RUNNER = '''\
"""Runs the steps."""  # caf\u00e9


class HPUModelRunner:
    """Builds the inputs of one step."""

    def __init__(self, batch, input_ids_cpu, input_ids_hpu, use_async_scheduling=True):
        self.batch = batch
        self.input_ids_cpu = input_ids_cpu
        self.input_ids_hpu = input_ids_hpu
        self.use_async_scheduling = use_async_scheduling

    def _create_decode_input_data(self, num_decodes, num_scheduled_tokens, scheduler_output=None):
        num_tokens_per_req = num_scheduled_tokens[:num_decodes]
        num_tokens = max(num_tokens_per_req)
        padded_batch_size = num_decodes + 1
        total_num_scheduled_tokens = sum(num_tokens_per_req)
        num_tokens_per_req = num_tokens_per_req + [0] * (padded_batch_size - num_decodes)

        token_ids = torch.zeros((padded_batch_size, num_tokens))
        if num_tokens == 1:
            token_ids[:num_decodes] = self.input_ids_cpu[:num_decodes].view(-1, 1)
        else:
            rows = torch.split(self.input_ids_cpu[:total_num_scheduled_tokens], num_tokens_per_req)
            token_ids[:] = pad_sequence(list(rows), batch_first=True, padding_value=0)
            token_ids = token_ids.view(-1, 1)

        token_ids_device = async_h2d_copy(token_ids)
        # A step that only keeps others company has nothing scheduled.
        if self.use_async_scheduling and scheduler_output is not None:
            self._prepare_input_ids(scheduler_output)
            if num_tokens == 1:
                token_ids_device[:num_decodes] = self.input_ids_hpu[:num_decodes].view(-1, 1)
            else:
                token_ids_split_tensors = torch.split(self.input_ids_hpu[:total_num_scheduled_tokens],
                                                      num_tokens_per_req[:num_decodes])
                token_ids_device[:num_decodes * num_tokens] = \\
                    pad_sequence(list(token_ids_split_tensors),   batch_first=True,
                                 padding_value=0)[:num_decodes].view(-1, 1)
        return token_ids_device

    def _prepare_input_ids(self, scheduler_output, return_index=False):
        """Put what the previous step sampled where this step reads it."""
        if self.batch.prev_sampled_token_ids is None:
            return
        end = 0
        for req_id in self.batch.req_ids:
            end += scheduler_output.num_scheduled_tokens[req_id]
            row = self.batch.prev_req_id_to_index.get(req_id)
            if row is not None:
                self.input_ids_hpu[end - 1] = self.batch.prev_sampled_token_ids[row]
'''

FAULTY = {RESUMED: INPUT_BATCH, ASYNC: MODEL_RUNNER}
# The first line that a fix changes, and what an upstream change could make of it.
FAULTY_LINE = {
    RESUMED: "        if request.num_computed_tokens == 0:\n            self.num_p",
    ASYNC: "            self._prepare_input_ids(scheduler_output)\n            if num_tokens == 1:\n",
}
UPSTREAM_LINE = {
    RESUMED: FAULTY_LINE[RESUMED].replace("== 0", "< request.num_tokens - 1"),
    ASYNC: "            self.input_ids_hpu[:total_num_scheduled_tokens].copy_(\n"
    "                self.input_ids_cpu[:total_num_scheduled_tokens], non_blocking=True)\n"
    + FAULTY_LINE[ASYNC],
}
RIGHT = {name: FAULTY[name].replace(FAULTY_LINE[name], UPSTREAM_LINE[name]) for name in NAMES}


@dataclass(frozen=True)
class Engine:
    """An installed engine, as far as one fix sees it."""

    root: Path
    file: Path
    fix: Fix

    def read(self) -> bytes:
        return self.file.read_bytes()

    def run(self) -> dict[str, Any]:
        """Execute the file, and give what it defines."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # some forms have doubtful escapes
            warnings.simplefilter("ignore", SyntaxWarning)
            return runpy.run_path(str(self.file), TORCH_LIKE)

    def files(self) -> dict[str, bytes]:
        """Every file of the tree, and what it holds."""
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}


def load(name: str, folder: Path = FIXES) -> Fix:
    """Load a fix as its own ``apply.py`` does."""
    spec = importlib.util.spec_from_file_location(f"fix {name}", folder / name / "apply.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    fix: Fix = module.FIX
    return fix


def install(root: Path, name: str, code: str | bytes | None = None, release: str | None = "0.30.0") -> Engine:
    """Make a site-packages folder with the engine in it: faulty, unless ``code`` is given."""
    fix = load(name)
    file = root / fix.facts.file
    file.parent.mkdir(parents=True, exist_ok=True)
    (root / fix.facts.package / "__init__.py").write_text('raise ImportError("no accelerator here")\n')
    code = FAULTY[name] if code is None else code
    file.write_bytes(code.encode() if isinstance(code, str) else code)
    if release is not None:
        record(root, release)
    return Engine(root, file, fix)


def record(root: Path, release: str, folder: str | None = None) -> Path:
    """Say that a release of the engine is installed in a folder."""
    info = root / (folder or f"vllm_gaudi-{release}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-gaudi\nVersion: {release}\n")
    return info


def copy_fixes(folder: Path) -> Path:
    """Copy the fixes as an operator does."""
    return Path(shutil.copytree(FIXES, folder / "fixes", ignore=shutil.ignore_patterns("__pycache__")))


def pyenv_pythons(version: str) -> list[str]:
    """The Pythons of this version that pyenv has installed."""
    roots = [Path(root) for root in (os.environ.get("PYENV_ROOT", ""), Path.home() / ".pyenv") if root]
    return [str(path) for root in roots for path in root.glob(f"versions/{version}.*/bin/python")]


def in_child(act: Callable[[], object]) -> tuple[int, bytes]:
    """Run something in a process of its own; its exit code, and what it gives if that is bytes."""
    return ended(started(act))


def started(act: Callable[[], object]) -> tuple[int, int]:
    """Start something in a process of its own, for ``ended`` to wait for."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests' threads are of no use to the child
        child = os.fork()
    if child == 0:
        code = 1
        try:
            found = act()
            os.write(write, found if isinstance(found, bytes) else b"")
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    return child, read


def ended(run: tuple[int, int]) -> tuple[int, bytes]:
    """Wait for a process; its exit code, and what it gave."""
    child, read = run
    with os.fdopen(read, "rb") as pipe:
        given = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), given


def is_root() -> bool:
    """Whether permissions don't bind this process."""
    return os.geteuid() == 0

"""Counts a resumed request's earlier outputs as prompt whenever they are computed again, hits or not."""

import ast
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.dont_write_bytecode = True  # the folder may be a mount that others share
if sys.version_info < (3, 9):  # noqa: UP036
    sys.stderr.write("apply.py needs Python 3.9 or later, and this is " + sys.version.split()[0] + "\n")
    sys.exit(64)  # Python's own 1 means something else here
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if not (Path(sys.path[0]) / "fixlib.py").is_file():
    sys.stderr.write("apply.py needs " + sys.path[0] + "/fixlib.py: copy the folder of all fixes whole\n")
    sys.exit(64)

from fixcli import main
from fixeval import UnknownError, check_only_items, run
from fixlib import Fix, comment
from fixsource import DriftedError, Edit, Source, same, walk

FOLDER = Path(__file__).resolve().parent
COUNT = "self.num_prompt_tokens"
KNOWN = "num_prompt_tokens + len(request.output_token_ids)"
# Computed tokens, prompt tokens, earlier outputs: fresh, resumed with and without hits, decoding, guessing.
CASES = [(c, p, o) for p in (1, 4) for o in (0, 1, 3) for c in range(p + o + 3)]


def inspect(source: Source) -> "Edit | None":
    """Judge ``InputBatch.add_request`` by the prompt length it gives each case, and edit its one guard."""
    method = source.method("InputBatch", "add_request")
    try:
        check_only_items(method.body, COUNT)
        counts = [_count(method, *case) for case in CASES]
    except UnknownError as error:
        raise DriftedError(
            f"InputBatch.add_request sets num_prompt_tokens in an unknown way: {error}"
        ) from error
    if counts == [p + o if c < p + o - 1 else p for c, p, o in CASES]:
        return None
    if counts != [p + o if c == 0 else p for c, p, o in CASES]:
        raise DriftedError(
            "InputBatch.add_request counts prompt tokens neither in the known faulty way nor in the right one"
        )
    guards = [node for node in walk(method.body) if isinstance(node, ast.If) and _folds(node)]
    if len(guards) != 1:
        raise DriftedError("InputBatch.add_request has not one guard over num_prompt_tokens")
    right = f"request.num_computed_tokens < {KNOWN} - 1"
    return source.replace(guards[0].test, right, above=[comment(FOLDER)])


def _folds(guard: ast.If) -> bool:
    faulty = same(guard.test, "request.num_computed_tokens == 0", "not request.num_computed_tokens")
    fold = same(guard.body[0], f"self.num_prompt_tokens[req_index] = {KNOWN}")
    return faulty and fold and len(guard.body) == 1 and not guard.orelse


def _count(method: ast.FunctionDef, computed: int, prompt: int, outputs: int) -> int:
    values = {
        "request.num_computed_tokens": computed,
        "request.num_prompt_tokens": prompt,
        "request.num_tokens": prompt + outputs,
        "request.prompt_token_ids": [0] * prompt,
        "request.output_token_ids": [0] * outputs,
    }
    return run(method.body, values, COUNT)


FIX = Fix(FOLDER, inspect)

if __name__ == "__main__":
    sys.exit(main(FIX))

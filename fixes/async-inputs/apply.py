"""Seeds a step's decode rows from the host's tokens, before the last step's sampled ones go over them."""

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
from fixlib import Fix, comment
from fixsource import DriftedError, Edit, Source, dotted, same, walk

FOLDER = Path(__file__).resolve().parent
METHOD = "HPUModelRunner._create_decode_input_data"
TOTAL = "total_num_scheduled_tokens"
ROWS = f"[:{TOTAL}]"
COUNT = f"{TOTAL} = sum(num_tokens_per_req)"
CARRY_OVER = "self._prepare_input_ids(scheduler_output)"
# Both branches read input_ids_hpu with one request after the other, as input_ids_cpu holds them, and
# CARRY_OVER puts a sampled token at the last place of its request. The host's buffer is written again while
# the copy may still run, hence the clone.
HOST_IDS = "host_input_ids"
SEED = (
    f"{HOST_IDS} = self.input_ids_cpu{ROWS}.clone()",
    f"self.input_ids_hpu{ROWS}.copy_({HOST_IDS}, non_blocking=True)",
)
HOST_ROWS = f"self.input_ids_cpu{ROWS}"
HOST_ONE = (
    "self.input_ids_cpu[:num_decodes]",
    *(
        f"{ids}[:num_decodes].{flat}"
        for ids in ("token_ids", "token_ids_device")
        for flat in ("view(-1)", "flatten()")
    ),
)
HOST_READ_ONE = "self.input_ids_cpu[:num_decodes].view(-1, 1)"
HOST_READ_SEVERAL = tuple(
    f"torch.split({HOST_ROWS}, {sizes})"
    for sizes in ("num_tokens_per_req", "num_tokens_per_req[:num_decodes]")
)
ASYNC = "self.use_async_scheduling and scheduler_output is not None"
READ_ONE = "token_ids_device[:num_decodes] = self.input_ids_hpu[:num_decodes].view(-1, 1)"
READ_SEVERAL = (
    f"token_ids_split_tensors = torch.split(self.input_ids_hpu{ROWS}, num_tokens_per_req)",
    f"token_ids_split_tensors = torch.split(self.input_ids_hpu{ROWS}, num_tokens_per_req[:num_decodes])",
)


def inspect(source: Source) -> "Edit | None":
    """Look at what ``_create_decode_input_data`` writes to ``input_ids_hpu`` before it reads it."""
    method = source.method(*METHOD.split("."))
    branches = [node for node in walk(method.body) if isinstance(node, ast.If) and same(node.test, ASYNC)]
    if len(branches) != 1 or branches[0] not in method.body:
        raise DriftedError(f"{METHOD} has not one branch `if {ASYNC}`")
    _check_count(method, branches[0])
    before, carry_over = _split(branches[0].body)
    seed = _seed(before)
    _check_rows(method, carry_over, seed)
    if seed:
        return None
    _check_helper(source)
    return source.insert(carry_over, above=[comment(FOLDER), *SEED])


def _check_count(method: ast.FunctionDef, branch: ast.If) -> None:
    counts = [statement for statement in method.body[: method.body.index(branch)] if same(statement, COUNT)]
    if len(counts) != 1 or len([node for node in walk(method.body) if _is_set(node, TOTAL)]) != 1:
        raise DriftedError(f"{METHOD} doesn't count its decode tokens in the known way")


def _is_set(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)


def _split(body: list[ast.stmt]) -> tuple[list[ast.stmt], ast.stmt]:
    """Give what comes before the carry-over, and the carry-over; the known reads must follow."""
    places = [number for number, statement in enumerate(body) if same(statement, CARRY_OVER)]
    if len(places) != 1 or len(body) <= places[0] + 1:
        raise DriftedError(f"{METHOD} doesn't call {CARRY_OVER} once before it reads the rows")
    read = body[places[0] + 1]
    if not (isinstance(read, ast.If) and same(read.test, "num_tokens == 1") and read.orelse):
        raise DriftedError(f"{METHOD} doesn't read the rows in the known way")
    if not (same(read.body[0], READ_ONE) and same(read.orelse[0], *READ_SEVERAL)):
        raise DriftedError(f"{METHOD} reads the rows from another place or layout")
    return body[: places[0]], body[places[0]]


def _seed(before: list[ast.stmt]) -> list[ast.stmt]:
    """Give the statements that copy the host's rows to the device, if they are of a known form."""
    for first, second in zip(before, before[1:]):
        if same(first, SEED[0]) and same(second, SEED[1]):
            return [first, second]
    return [one for one in before if same(one, *_writes(ROWS, HOST_ROWS)) or _seeds_by_branch(one)][:1]


def _seeds_by_branch(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.If) and same(statement.test, "num_tokens == 1")):
        return False
    one, several = statement.body, statement.orelse
    return (
        len(one) == len(several) == 1
        and same(one[0], *_writes("[:num_decodes]", *HOST_ONE))
        and same(several[0], *_writes(ROWS, HOST_ROWS))
    )


def _writes(rows: str, *sources: str) -> list[str]:
    """Give the forms of a statement that copies one of the sources into the rows of input_ids_hpu."""
    to = f"self.input_ids_hpu{rows}"
    return [
        form
        for source in (*sources, *(f"{one}.clone()" for one in sources))
        for form in (
            f"{to} = {source}",
            f"{to}.copy_({source})",
            f"{to}.copy_({source}, non_blocking=True)",
            f"async_h2d_copy({source}, {to})",
            f"async_h2d_copy({source}, dest_tensor={to})",
        )
    ]


def _check_rows(method: ast.FunctionDef, carry_over: ast.stmt, seed: list[ast.stmt]) -> None:
    """Nothing but the seed may touch the rows before the carry-over, but for known reads of the host's."""
    seeding = {id(node) for node in walk(seed)}
    nodes = [node for node in ast.walk(method) if id(node) not in seeding]
    if any(HOST_IDS in (getattr(node, "id", ""), getattr(node, "arg", "")) for node in nodes):
        raise DriftedError(f"{METHOD} has a variable {HOST_IDS} of its own")
    early = [node for node in nodes if _place(node) < _place(carry_over)]
    device = [node for node in early if dotted(node) == "self.input_ids_hpu"]
    host = [node for node in early if dotted(node) == "self.input_ids_cpu"]
    if device or len(host) != len([node for node in early if _reads_host(node)]):
        raise DriftedError(f"{METHOD} touches its input rows before the carry-over in an unknown way")


def _reads_host(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return same(node.value, HOST_READ_ONE)
    return isinstance(node, ast.expr) and same(node, *HOST_READ_SEVERAL)


def _check_helper(source: Source) -> None:
    helper = source.method("HPUModelRunner", "_prepare_input_ids")
    if any(dotted(node) == "self.input_ids_cpu" for node in walk(helper.body)):
        raise DriftedError("HPUModelRunner._prepare_input_ids takes rows from the host in an unknown way")


def _place(node: ast.AST) -> "tuple[int, int]":
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


FIX = Fix(FOLDER, inspect)

if __name__ == "__main__":
    sys.exit(main(FIX))

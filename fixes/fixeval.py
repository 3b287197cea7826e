"""Works out what a method makes of a value for given inputs, from its syntax tree and without running it.

It knows whole numbers, lengths, comparisons, plain assignments and branches. A value that comes from anything
else is unknown, and so is what depends on it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Callable

from fixsource import dotted

_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}
_CALLS: Mapping[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "int": int, "bool": bool}


class UnknownError(Exception):
    """The value hangs on code that isn't understood."""


class _ReturnedError(Exception):
    """The method has returned."""


def run(body: Sequence[ast.stmt], inputs: Mapping[str, Any], wanted: str) -> int:
    """Give what ``wanted`` (``self.counts``, at any index) is after ``body``; may raise UnknownError."""
    values = dict(inputs)
    with suppress(_ReturnedError):
        _run(body, values, wanted)
    found = values.get(wanted)
    if not isinstance(found, int):
        raise UnknownError(f"{wanted} isn't set to a number")
    return int(found)


def check_only_items(body: Sequence[ast.stmt], wanted: str) -> None:
    """Raise UnknownError if ``wanted`` is used but for its items, or if items of several places are set."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    items = [node for node in nodes if isinstance(node, ast.Subscript) and dotted(node.value) == wanted]
    if len(items) != sum(dotted(node) == wanted for node in nodes):
        raise UnknownError(f"{wanted} goes by another name, too")
    if len({ast.dump(item.slice) for item in items if not isinstance(item.ctx, ast.Load)}) > 1:
        raise UnknownError(f"{wanted} is set at several places")


def _run(body: Sequence[ast.stmt], values: dict[str, Any], wanted: str) -> None:
    for statement in body:
        if isinstance(statement, ast.Return):
            raise _ReturnedError
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            _assign(statement, values, wanted)
        elif isinstance(statement, ast.If):
            _branch(statement, values, wanted)
        elif wanted in _written([statement]) or _leaves(statement):
            raise UnknownError(f"line {statement.lineno}")
        else:
            _lose(_written([statement]), values)


def _assign(statement: ast.Assign, values: dict[str, Any], wanted: str) -> None:
    name = _target(statement.targets[0])
    if name == wanted:
        values[name] = evaluate(statement.value, values)
        return
    try:
        found = evaluate(statement.value, values)
    except UnknownError:
        found = None
    _lose(_written([statement]), values)
    if found is not None and isinstance(statement.targets[0], ast.Name):
        values[name] = found


def _branch(statement: ast.If, values: dict[str, Any], wanted: str) -> None:
    try:
        taken = evaluate(statement.test, values)
    except UnknownError:
        written = _written([statement])  # with what the test itself writes
        if wanted in written or _leaves(statement):
            raise
        _lose(written, values)
        return
    _run(statement.body if taken else statement.orelse, values, wanted)


def evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Give an expression's value; raises :class:`UnknownError`."""
    name = dotted(node)
    if name is not None and name in values:
        return values[name]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _operate(node.op, evaluate(node.left, values), evaluate(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _operate(node.op, evaluate(node.operand, values))
    if isinstance(node, ast.IfExp):
        return evaluate(node.body if evaluate(node.test, values) else node.orelse, values)
    if isinstance(node, ast.Compare):
        return _compare(node, values)
    if isinstance(node, ast.BoolOp):
        found = [bool(evaluate(one, values)) for one in node.values]
        return all(found) if isinstance(node.op, ast.And) else any(found)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _CALLS
        and not node.keywords
    ):
        return _attempt(
            _CALLS[dotted(node.func) or ""], [evaluate(argument, values) for argument in node.args]
        )
    raise UnknownError(f"line {node.lineno}")


def _compare(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    sides = [evaluate(side, values) for side in (node.left, *node.comparators)]
    return all(_operate(op, left, right) for op, left, right in zip(node.ops, sides, sides[1:]))


def _operate(op: ast.AST, *operands: Any) -> Any:
    if type(op) not in _OPERATORS:
        raise UnknownError(type(op).__name__)
    return _attempt(_OPERATORS[type(op)], operands)


def _attempt(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    try:
        return function(*operands)
    except (TypeError, ValueError) as error:
        raise UnknownError(str(error)) from error


def _target(node: ast.expr) -> str:
    return dotted(node.value if isinstance(node, ast.Subscript) else node) or ""


def _written(body: Sequence[ast.stmt]) -> list[str]:
    return [name for statement in body for name in _stores(statement)]


@lru_cache(maxsize=4096)
def _leaves(statement: ast.stmt) -> bool:
    returns = any(isinstance(node, ast.Return) for node in ast.walk(statement))
    return returns or isinstance(statement, ast.Raise)


@lru_cache(maxsize=4096)
def _stores(statement: ast.stmt) -> tuple[str, ...]:
    found = [
        node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    ]
    return tuple(_target(node) for node in found if isinstance(node, ast.expr))


def _lose(names: Sequence[str], values: dict[str, Any]) -> None:
    for name in names:
        for known in [one for one in values if one == name or one.startswith(f"{name}.")]:
            del values[known]

"""A Python file as bytes, as text, and as a syntax tree whose places lead back into the text.

Edits are whole lines, so that every byte outside of them stays as it was: encoding, byte-order mark, line
endings, tabs, comments and formatting included.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class DriftedError(Exception):
    """The code, the package or the release isn't one that a fix knows; the text says which and why."""


class Edit(NamedTuple):
    """Whole lines of a file: what they are, what they become, and where they start."""

    start: int
    old: str
    new: str


class Source:
    """One file's contents; raises DriftedError where this interpreter doesn't read them as Python."""

    def __init__(self, data: bytes) -> None:
        self.encoding, self.text = decode(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Python thinks of the engine's escapes is no news here
                self.tree = ast.parse(data)
        except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            raise DriftedError(f"this Python can't read the file: {error}") from error
        self._lines = _LINE.findall(self.text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def encode(self, text: str) -> bytes:
        """Give the bytes of ``text`` in the file's encoding."""
        return text.encode(self.encoding)

    def method(self, class_name: str, name: str) -> ast.FunctionDef:
        """Find the one method of that name in the one class of that name, if nothing else takes its place."""
        found = [one for one in self.tree.body if isinstance(one, ast.ClassDef) and one.name == class_name]
        if len(found) != 1:
            raise DriftedError(f"it has {len(found)} classes {class_name}, not one")
        methods = [one for one in found[0].body if isinstance(one, ast.FunctionDef) and one.name == name]
        if len(methods) != 1:
            raise DriftedError(f"{class_name} has {len(methods)} methods {name}, not one")
        changes = _changes(self.tree)
        if sum(_binds(node, class_name) for node in _scope(self.tree.body)) != 1 or any(
            isinstance(node, ast.Global) and class_name in node.names for node in changes
        ):
            raise DriftedError(f"it defines {class_name} again")
        if (
            sum(_binds(node, name) for node in _scope(found[0].body)) != 1
            or any(_sets(node, class_name, name) for node in changes)
            or any(_sets(node, own, name) for node in _changes(found[0]) for own in ("self", "cls"))
        ):
            raise DriftedError(f"it defines {class_name}.{name} again")
        return methods[0]

    def replace(self, node: ast.expr, new: str, above: Sequence[str]) -> Edit:
        """Put ``new`` in the place of an expression, and the lines ``above`` over its first line."""
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return self._edit(node.lineno, start, end, new, above)

    def insert(self, statement: ast.stmt, above: Sequence[str]) -> Edit:
        """Put the lines ``above`` over a statement, indented like it."""
        start = self._offset(statement.lineno, statement.col_offset)
        return self._edit(statement.lineno, start, start, "", above)

    def apply(self, edit: Edit) -> bytes:
        """Give the file's bytes after an edit of it."""
        after = edit.start + len(edit.old)
        return self.encode(self.text[: edit.start] + edit.new + self.text[after:])

    def _offset(self, line: int, column: int) -> int:
        # Columns of a syntax tree count the bytes of UTF-8, whatever the file's encoding.
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _edit(self, line: int, start: int, end: int, new: str, above: Sequence[str]) -> Edit:
        first = self._starts[line - 1]
        last = next(place for place in self._starts if place >= end and place > first)
        header = self._lines[line - 1]
        indent = header[: len(header) - len(header.lstrip(" \t\f"))]
        newline = header[len(header.rstrip("\r\n")) :] or "\n"
        added = "".join(indent + text + newline for text in above)
        kept = self.text[first:start] + new + self.text[end:last]
        return Edit(first, self.text[first:last], added + kept)


def decode(data: bytes) -> tuple[str, str]:
    """Give the encoding that a file declares and its text; raises DriftedError where there is no way back."""
    try:
        # detect_encoding names utf-8-sig where there is a byte-order mark, which decoding then drops.
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        text = data.decode(encoding)
    except (SyntaxError, ValueError, LookupError) as error:
        raise DriftedError(f"this Python can't read the file: {error}") from error
    if text.encode(encoding) != data:
        raise DriftedError(f"the file's {encoding} text doesn't encode to the same bytes again")
    return encoding, text


def _scope(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Give the nodes of the statements that bind names where they do: not those within other definitions."""
    for node in statements:
        yield node
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _scope(list(ast.iter_child_nodes(node)))


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a node gives a name a value, or takes it away."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.alias):
        return (node.asname or node.name.split(".")[0]) == name
    # Definitions, handlers of exceptions, and patterns, of which the oldest Python has none.
    return name in (getattr(node, "name", None), getattr(node, "rest", None))


@lru_cache(maxsize=8)
def _changes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Give the nodes that may change a class from afar."""
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Global, ast.Call))
        or (isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load))
    )


def _sets(node: ast.AST, owner: str, name: str) -> bool:
    """Whether a node sets or deletes an attribute of an owner."""
    if isinstance(node, ast.Attribute):
        return node.attr == name and dotted(node) == f"{owner}.{name}"
    if not (
        isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr") and len(node.args) > 1
    ):
        return False
    which = node.args[1]
    return dotted(node.args[0]) == owner and not (isinstance(which, ast.Constant) and which.value != name)


def same(node: ast.AST, *forms: str) -> bool:
    """Whether a node is the code of one of the forms, whatever its formatting."""
    expression, kind = isinstance(node, ast.expr), f"{type(node).__name__}("
    dumps = [_dump(form, expression) for form in forms]
    return any(dump.startswith(kind) for dump in dumps) and ast.dump(node) in dumps


def walk(statements: Sequence[ast.stmt]) -> list[ast.AST]:
    """Give every node of the statements."""
    return [node for statement in statements for node in ast.walk(statement)]


def dotted(node: ast.AST) -> str | None:
    """Name a variable or an attribute of one (``self.buffer``), or give None."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else None


@cache
def _dump(form: str, expression: bool) -> str:
    statement = ast.parse(form).body[0]
    return ast.dump(statement.value if expression and isinstance(statement, ast.Expr) else statement)

"""A sandbox for chat templates: code from a model file, run with no reach and a bounded amount of work.

Jinja's sandbox keeps a template from Python's internals, files and the messages given to it. What it leaves
open is endless loops and text that grows without end. Both are closed by one meter that every loop step,
call, filter, comparison and piece of output draws from: deterministic, unlike a time limit, so that whether
a template works does not depend on the load. Operations whose result can be far larger than their operands
are checked before they run.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes, pass_context, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from loadproof.tokenizer.errors import ChatTemplateError

MAX_SOURCE = 1 << 20  # characters of a template
MAX_SIZE = 1 << 26  # characters or items of one value
MAX_STEPS = 2_000_000  # loop steps, calls, ... of one rendering: a second or two of work
_SIZE_PER_STEP = 64  # characters or items handled for the price of one step
_STEPS_PER_CALL = 8
_MAX_INT_BITS = 4096
# Random, or able to grow text in ways that no chat template needs.
_DROPPED_FILTERS = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")
_SCALED_BY_INTEGERS = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill")
)
_WIDE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{")


class _Meter:
    """Steps left of one rendering."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS

    def charge(self, *values: object, steps: int = 1) -> None:
        """Take the steps, and more for large values; raises when none is left."""
        self.steps -= steps + sum(map(_size, values)) // _SIZE_PER_STEP
        if self.steps < 0:
            raise jinja2.TemplateRuntimeError(f"it did not end within {MAX_STEPS} steps")


_meter: ContextVar[_Meter] = ContextVar("loadproof_template_meter")


def _size(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 0


def _size_within(value: object) -> int:
    """Size of the value and of the values that it holds."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return _size(value) + sum(map(_size, held))


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise jinja2.TemplateRuntimeError(f"a value of more than {MAX_SIZE} characters or items")


def _bounded(value: Any) -> Any:
    """The value itself, or an error when it is too large to work on."""
    _check_size(_size(value))
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise jinja2.TemplateRuntimeError(f"an integer of more than {_MAX_INT_BITS} bits")
    return value


def _check_growth(name: str, subject: Any, arguments: Iterable[Any]) -> None:
    """Raise where the text function ``name`` would make something too large of ``subject``."""
    given = list(arguments)
    if name in _SCALED_BY_INTEGERS:
        scale = _size(subject) + 1
        for number in given:
            scale *= max(abs(number), 1) if isinstance(number, int) else 1
        _check_size(scale)
    elif name == "replace" and isinstance(subject, str) and len(given) >= 2:
        old, new = str(given[0]), str(given[1])
        _check_size(len(subject) + subject.count(old) * len(new))
    elif name == "join" and given and isinstance(given[0], (list, tuple)):
        _check_size(sum(map(_size, given[0])) + len(subject) * len(given[0]))
    elif name in ("format", "format_map", "%") and isinstance(subject, str):
        if _WIDE_FORMAT.search(subject):
            raise jinja2.TemplateRuntimeError("a format with a width of five digits or from an argument")
        fields = subject.count("{") + subject.count("%")
        _check_size(len(subject) + fields * sum(map(_size_within, given)))


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, drawing from the meter for what it is given."""
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if takes_context else args
        _meter.get().charge(*values, *kwargs.values())
        _check_growth(name, values[0], [*values[1:], *kwargs.values()])
        return _bounded(function(*args, **kwargs))

    return call


def _concat(parts: Iterable[Any]) -> str:
    """The ``~`` operator."""
    texts = [str(part) for part in parts]
    _meter.get().charge(*texts)
    _check_size(sum(map(len, texts)))
    return "".join(texts)


@pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """The ``join`` filter, adding up sizes before it makes the text."""
    read = make_attrgetter(environment, attribute) if attribute is not None else str
    texts: list[str] = []
    total = 0
    for item in value:
        texts.append(str(read(item)))
        total += len(texts[-1]) + len(str(d))
        _check_size(total)
    return str(d).join(texts)


def _each(items: Iterable[Any]) -> Iterator[Any]:
    """What a loop runs over, one step an item."""
    meter = _meter.get()
    for item in items:
        meter.charge()
        yield item


def _seen(value: Any) -> Any:
    """A value that is about to be searched, compared or copied."""
    _meter.get().charge(value)
    return value


@pass_context
def _output(_context: Context, value: Any) -> Any:
    _meter.get().charge(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the model saw it in training: no escapes for HTML, unlike Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 100 or _WIDE_FORMAT.search(layout):
        raise jinja2.TemplateRuntimeError("a date format that is too long")
    return datetime.datetime.now().strftime(layout)


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Routes loops, output and operators that Jinja compiles to plain Python through the meter."""

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._through("_each", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_as_constant(child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return self._through("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._through("_seen", node.expr)
        for operand in node.ops:
            operand.expr = self._through("_seen", operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:  # noqa: N802
        self.generic_visit(node)
        node.args = [self._through("_seen", argument) for argument in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._through("_seen", node.node)
        return node


def _as_constant(node: nodes.Expr) -> nodes.Expr:
    """Template text as an expression, which Jinja hands to ``finalize`` and so to the meter."""
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, behind the meter."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        # Unoptimised: nothing of the template is evaluated while it is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_output,
            extensions=[_Generation, loopcontrols],
        )
        self.filters |= {"tojson": _to_json, "join": _join}
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters |= {"_each": _each, "_seen": _seen, "_concat": _concat}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _meter.get().charge(left, right)
        if operator == "*" and isinstance(left, int) != isinstance(right, int):
            _check_size(_size(left) * _as_int(right) + _size(right) * _as_int(left))
        elif operator == "**" and not (abs(left) <= 1 << 64 and abs(right) <= 64):
            raise jinja2.TemplateRuntimeError("a power that is too large")
        elif operator == "+":
            _check_size(_size(left) + _size(right))
        _check_growth(operator, left, (right,))
        return _bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Jinja's names: a template's keyword arguments may be called self or context.
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped by the sandbox
        subject = getattr(method, "__self__", None)
        _meter.get().charge(subject, *args, *kwargs.values(), steps=_STEPS_PER_CALL)
        if isinstance(subject, str):
            _check_growth(method.__name__, subject, [*args, *kwargs.values()])
        if isinstance(__obj, LoopContext) and args:  # a recursive loop going down
            args = (_each(args[0]), *args[1:])
        return _bounded(super().call(__context, __obj, *args, **kwargs))


def _as_int(value: Any) -> int:
    return value if isinstance(value, int) else 0


@functools.cache
def _environment() -> _Environment:
    return _Environment()


class Template:
    """One chat template, compiled. Raises :class:`ChatTemplateError` for a source that is not a template."""

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"the chat template is longer than {MAX_SOURCE} characters")
        environment = _environment()
        try:
            tree = _Guard().visit(environment.parse(source))
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError, MemoryError, jinja2.TemplateError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text; raises :class:`ChatTemplateError` when it refuses, fails or never ends."""
        token = _meter.set(_Meter())
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses: {error.message}") from error
        except Exception as error:  # whatever template code can raise is the template's or the caller's fault
            raise ChatTemplateError(f"the chat template fails: {type(error).__name__}: {error}") from error
        finally:
            _meter.reset(token)

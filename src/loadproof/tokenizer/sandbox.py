"""A sandbox for chat templates: code from a model file, run with no reach and a bounded amount of work.

Jinja's sandbox keeps a template from Python's internals, files and the messages given to it, but not from
endless loops and text without end. Three rules do, and unlike a time limit they do not depend on the load:

- Only the filters, tests and methods listed here exist: those that chat templates use.
- Every value that is made has a bounded weight, in which a part that occurs twice counts twice, so that
  whatever walks a value ends. Iterators become lists at once, since they have no weight before they ran.
- Every operation is priced by the weight it may walk, before it runs, and paid from one meter.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from loadproof.tokenizer.errors import ChatTemplateError

MAX_SOURCE = 1 << 18  # characters of a template
MAX_WEIGHT = 1 << 23  # of one value: its characters, and _ITEM for each part
MAX_DEPTH = 64  # of lists and dicts in each other
MAX_STEPS = 200_000  # of one rendering, besides what its variables add
_ITEM = 64
_WEIGHT_FOR_STEP = 16  # of the variables, for one step more
_WEIGHT_PER_STEP = 256  # a step is worth up to five microseconds
_COMPARISONS_PER_STEP = 4096
_NODES_PER_STEP = 64  # of a loop's or macro's syntax tree
_MAX_INT_BITS = 60  # beyond, different integers hash alike and a dict of them takes quadratic time


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Filters and tests whose work does not depend on the weight of the operands, or just on the number of items.
_CONSTANT = _names(
    "boolean callable count default d defined false filter first float integer iterable last length mapping"
    " none number safe sameas sequence test true undefined"
)
_SHALLOW = _names("items list map reject rejectattr reverse select selectattr")
_ITEMWISE = _SHALLOW | _names("dictsort groupby join max min sort unique")
_FILTERS = (_CONSTANT | _ITEMWISE) | _names(
    "abs capitalize e escape format indent int lower replace string title tojson trim truncate upper"
)
_PLAIN = _names("endswith format join startswith")  # the other text methods may compare at each place
_FORMATS = _names("% divisibleby even format odd")  # the tests take a remainder
_METHODS: dict[Any, frozenset[str]] = {
    str: _names(
        "capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit islower"
        " isnumeric isspace isupper join lower lstrip partition removeprefix removesuffix replace rstrip"
        " split splitlines startswith strip title upper"
    ),
    (list, tuple): _names("count index"),
    dict: _names("get items keys values"),
    LoopContext: _names("changed cycle"),
}
_WIDE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{")
_HOLDERS = (list, tuple, dict, set, frozenset)
_LAZY = (Iterator, ItemsView, KeysView, ValuesView)


class _Meter:
    """Steps left of one rendering, and the weights of the lists and dicts met in it."""

    def __init__(self) -> None:
        # Nothing that a template reaches is ever changed; holding on to a value keeps its id its own.
        self._known: dict[int, tuple[int, int, object]] = {}
        self._left = self._budget = MAX_WEIGHT  # until it starts: weighing what it is given costs no steps

    def start(self, variables: Mapping[str, Any]) -> None:
        self._left = self._budget = MAX_STEPS + self.weigh(dict(variables)) // _WEIGHT_FOR_STEP

    def charge(self, steps: int) -> None:
        """Take the steps; raises when none is left."""
        self._left -= steps
        if self._left < 0:
            raise TemplateRuntimeError(f"it did not end within {self._budget} steps")

    def charge_walk(self, *values: object) -> None:
        """Charge for work that may walk all of the values."""
        self.charge(1 + sum(map(self.weigh, values)) // _WEIGHT_PER_STEP)

    def weigh(self, value: object) -> int:
        """The value's weight; raises when it or its depth is too large."""
        return self._measure(value)[0]

    def _measure(self, value: object) -> tuple[int, int]:
        if isinstance(value, (str, bytes, range)):
            return _check_weight(_ITEM + len(value) * (_ITEM if isinstance(value, range) else 1)), 0
        if not isinstance(value, _HOLDERS):
            return _ITEM, 0
        if id(value) not in self._known:
            self._known[id(value)] = (*self._measure_parts(value), value)
        return self._known[id(value)][:2]

    def _measure_parts(self, value: Iterable[Any]) -> tuple[int, int]:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        _check_weight(_count(parts) * _ITEM)
        self.charge(1 + _count(parts) // 4)
        weight, depth = _ITEM, 0
        for part in parts:
            part_weight, part_depth = self._measure(part)
            weight, depth = weight + part_weight, max(depth, part_depth)
        if depth >= MAX_DEPTH:
            raise TemplateRuntimeError(f"values nested more than {MAX_DEPTH} deep")
        return _check_weight(weight), depth + 1


_meter: ContextVar[_Meter] = ContextVar("loadproof_template_meter")


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, range, *_HOLDERS)) else 0


def _check_weight(weight: int) -> int:
    if weight > MAX_WEIGHT:
        raise TemplateRuntimeError(f"a value of more than {MAX_WEIGHT} characters, or with too many items")
    return weight


def _made(value: Any) -> Any:
    """A value just made, iterators as lists; raises when it is too large to work on."""
    if isinstance(value, _LAZY) and not isinstance(value, LoopContext):
        value = list(_each(value))
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise TemplateRuntimeError(f"an integer of more than {_MAX_INT_BITS} bits")
    weight = _meter.get().weigh(value)
    _meter.get().charge(weight // _WEIGHT_PER_STEP if isinstance(value, str) else 0)
    return value


@pass_context  # also keeps Jinja from using it on constants while it compiles
def _walked(_context: Context, value: Any) -> Any:
    """A value that is about to be searched, compared, hashed, copied or written."""
    _meter.get().charge_walk(value)
    return value


def _pay(steps: int) -> bool:
    _meter.get().charge(steps)
    return True


def _each(items: Iterable[Any]) -> Iterator[Any]:
    """What a loop runs over, one step an item."""
    meter = _meter.get()
    for item in items:
        meter.charge(1)
        yield item


def _charge_for(name: str, subject: Any, given: list[Any]) -> None:
    """Charge for the filter, test or method ``name`` of ``subject`` before it runs."""
    meter = _meter.get()
    if name in _CONSTANT and not given:
        return meter.charge(1)
    texts = [value for value in given if isinstance(value, str)]
    if name in _ITEMWISE:  # an attribute's name can have many dots
        meter.charge(_count(subject) * (32 + sum(map(len, texts))) // 32)
    if name not in _SHALLOW:
        meter.charge_walk(subject, *given)
    if name == "title":  # word by word in Python
        meter.charge(_count(subject) // 8)
    if name in ("dictsort", "groupby", "sort"):
        meter.charge(meter.weigh(subject) * _count(subject).bit_length() // _WEIGHT_PER_STEP)
    if name == "in":
        subject, texts = given[0], [subject] if isinstance(subject, str) else []
    if isinstance(subject, str) and texts and name not in _PLAIN:
        meter.charge(len(subject) * len(texts[0]) // _COMPARISONS_PER_STEP)
    _check_weight(_grown(name, subject, given))


def _grown(name: str, subject: Any, given: list[Any]) -> int:
    """An upper bound, but for escapes, of the result's weight where it can exceed that of the operands."""
    weigh = _meter.get().weigh
    if name in ("indent", "tojson"):
        return weigh(subject) * (1 + sum(abs(v) if isinstance(v, int) else len(str(v)) for v in given))
    if name == "join" or not isinstance(subject, str):
        return _count(subject) * sum(map(_count, given)) if name == "join" else 0
    if name == "replace" and len(given) >= 2:
        return len(subject) + subject.count(str(given[0])) * len(str(given[1]))
    if name == "split" and given and isinstance(given[0], str) and given[0]:
        return len(subject) + _ITEM * subject.count(given[0])
    if name in _FORMATS:
        if _WIDE_FORMAT.search(subject):
            raise TemplateRuntimeError("a format with a width of five digits or from an argument")
        return len(subject) + (subject.count("{") + subject.count("%")) * (9999 + sum(map(weigh, given)))
    return 0


def _metered(name: str, function: Any) -> Callable[..., Any]:
    """The filter or test, drawing from the meter for what it is given."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _charge_for(name, values[0], [*values[1:], *kwargs.values()])
        return _made(function(*args, **kwargs))

    return call


class _Namespace(Namespace):
    """A namespace that does not print its attributes, which can hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _to_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = None
) -> str:
    """JSON as the model saw it in training: no escapes for HTML, unlike Jinja's own filter."""
    options = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": bool(sort_keys)}
    return json.dumps(value, indent=indent, **options)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 100 or _WIDE_FORMAT.search(layout):
        raise TemplateRuntimeError("a date format that is too long")
    return datetime.datetime.now().strftime(layout)


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Routes loops, output, literals and operators that Jinja compiles to plain Python through the meter."""

    def _through(self, name: str, node: nodes.Node, *args: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)

    def visit_Macro(self, node: Any) -> Any:  # noqa: N802
        """A body that runs many times pays for its size, in which plain assignments and conditions count."""
        cost = sum(1 for _ in node.find_all(nodes.Node)) // _NODES_PER_STEP
        self.generic_visit(node)
        if cost:
            pay = self._through("_pay", nodes.Const(cost, lineno=node.lineno))
            node.body.insert(0, nodes.ExprStmt(pay, lineno=node.lineno))
            if getattr(node, "test", None) is not None:
                node.test = nodes.And(pay, node.test)
        return node

    visit_Block = visit_CallBlock = visit_Macro  # noqa: N815

    def visit_For(self, node: nodes.For) -> Any:  # noqa: N802
        node.iter = self._through("_each", node.iter)
        return self.visit_Macro(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)  # template text becomes an expression, which Jinja hands to ``finalize``
        node.nodes = [nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._through("_walked", part) for part in node.nodes]
        return self._through("_made", node)

    def visit_List(self, node: Any) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._through("_made", node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.key = self._through("_walked", node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if any(operand.op in ("in", "notin") for operand in node.ops):
            if len(node.ops) > 1:
                raise jinja2.TemplateSyntaxError("'in' inside a chain of comparisons", node.lineno)
            within = self._through("_in", node.expr, node.ops[0].expr)
            return within if node.ops[0].op == "in" else nodes.Not(within, lineno=node.lineno)
        node.expr = self._through("_walked", node.expr)
        for operand in node.ops:
            operand.expr = self._through("_walked", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        part = "node" if isinstance(node.arg, nodes.Slice) else "arg"
        setattr(node, part, self._through("_walked", getattr(node, part)))
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, behind the meter."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        # Unoptimised: nothing of the template is evaluated while it is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_walked,
            extensions=[_Generation, loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(name, self.filters[name]) for name in _FILTERS & self.filters.keys()}
        self.tests = {name: _metered(name, function) for name, function in self.tests.items()}
        self.filters |= {"_each": _each, "_made": _made, "_walked": _walked, "_pay": _pay}
        self.filters["_in"] = self.tests["in"]
        helpers = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals = {"dict": dict, "namespace": _Namespace, "range": self.globals["range"], **helpers}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        meter.charge_walk(left, right)
        counts = [value for value in (left, right) if isinstance(value, int)]
        if operator == "*" and len(counts) == 1:
            _check_weight((meter.weigh(left) + meter.weigh(right) - 2 * _ITEM) * counts[0])
        elif operator == "**" and not (abs(left) <= 1 << 64 and abs(right) <= 64):
            raise TemplateRuntimeError("a power that is too large")
        _check_weight(_grown(operator, left, [right]))
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Jinja's names: a template's keyword arguments may be called self or context.
        meter = _meter.get()
        meter.weigh([args, kwargs])  # a macro's varargs and kwargs; three steps at least
        subject = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # str.format comes wrapped
        if subject is not None:
            name = __obj.__name__
            if not any(isinstance(subject, kind) and name in _METHODS[kind] for kind in _METHODS):
                raise TemplateRuntimeError(f"no method {name!r} of {type(subject).__name__}")
            _charge_for(name, None if isinstance(subject, dict) else subject, [*args, *kwargs.values()])
        elif not isinstance(__obj, (Macro, LoopContext)):
            meter.charge_walk(*args, *kwargs.values())
        if isinstance(__obj, LoopContext) and args:  # a recursive loop going down
            args = (_each(args[0]), *args[1:])
        return _made(super().call(__context, __obj, *args, **kwargs))


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
        """The template's text; raises :class:`ChatTemplateError` when it refuses, fails or never ends.

        A template may take ``MAX_STEPS`` steps, about a second of work, and more for large variables.
        """
        token = _meter.set(_Meter())
        try:
            _meter.get().start(variables)
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses: {error.message}") from error
        except Exception as error:  # whatever template code can raise is the template's or the caller's fault
            raise ChatTemplateError(f"the chat template fails: {type(error).__name__}: {error}") from error
        finally:
            _meter.reset(token)

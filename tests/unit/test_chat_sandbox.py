"""Hostile templates: no reach, no endless work, no text without end; always a clear error."""

from __future__ import annotations

import re

import pytest

from loadproof.tokenizer import ChatTemplateError, sandbox
from loadproof.tokenizer.sandbox import MAX_SOURCE, Template

VARIABLES = {"messages": [{"role": "user", "content": "hi"}], "big": "a" * 1_000_000}


def outcome(source: str) -> str:
    with pytest.raises(ChatTemplateError) as raised:
        Template(source).render(VARIABLES)
    return str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{0.__class__.__mro__}'|format(messages).x.y }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ lipsum.__globals__ }}",
        "{{ ([1]|random) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_nothing_is_in_reach(source: str) -> None:
    assert outcome(source).startswith("the chat template")
    assert VARIABLES["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in range(99999) %}{{ big }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
        "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
        "{% for i in range(99999) %}{% if 'x' in big %}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{% set c = big[1:] %}{% endfor %}",
        "{% for i in range(99999) %}{% set c = big|upper %}{% endfor %}",
        "{% for i in range(99999) %}{% set c = big.upper() %}{% endfor %}",
        "{% for i in range(99999) %}{% set c = big + 'x' %}{% endfor %}",
        "{% for i in range(99999) %}{% set c = big ~ 'x' %}{% endfor %}",
        "{% for i in range(99999) %}{% if 'x' is in big %}{% endif %}{% endfor %}",
        "{% for x in [0] recursive %}{% set outer = loop %}{% if x == 0 %}"
        "{% for i in range(99) %}{{ outer(range(1, 99999)) }}{% endfor %}{% endif %}{% endfor %}",
    ],
)
def test_work_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 30_000)
    assert re.search(r"did not end within 9\d\d\d\d steps", outcome(source))  # the variables add to them


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * (10 ** 9) }}",
        "{{ (10 ** 9) * [1] }}",
        "{{ big * 60 + big * 60 }}",
        "{{ (big * 60) ~ (big * 60) }}",
        "{{ ([big] * 10000)|join('') }}",
        "{{ ([{'x': big}] * 10000)|join('', attribute='x') }}",
        "{{ ''.join([big] * 10000) }}",
        "{{ big.replace('a', big) }}",
        "{{ big|replace('a', big) }}",
        "{{ big|indent(10 ** 6, true) }}",
        "{{ 'x'|tojson(indent=10 ** 9) }}",
        "{{ ('a,' * 1000000).split(',') }}",
        "{{ ''.join(([big] * 1000)|select) }}",
        "{{ ('{0}' * 1000).format(big) }}",
        "{{ ('%(x)s' * 1000) % {'x': big} }}",
    ],
)
def test_values_are_bounded_before_they_are_made(source: str) -> None:
    assert "a value of more than 8388608 characters" in outcome(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ '%99999d' % 1 }}", "a format with a width"),
        ("{{ '%*d' % (99999, 1) }}", "a format with a width"),
        ("{{ '%999999d'|format(1) }}", "a format with a width"),
        ("{{ '{:999999}'.format(1) }}", "a format with a width"),
        ("{{ '{:{}}'.format(1, 999999) }}", "a format with a width"),
        ("{{ '%99999d' is even }}", "a format with a width"),
        ("{{ strftime_now('%999999Y') }}", "a date format that is too long"),
        ("{{ 2 ** (10 ** 9) }}", "a power that is too large"),
        ("{{ (2 ** 64) ** 64 * 2 }}", "an integer of more than 60 bits"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_other_growth_is_refused(source: str, message: str) -> None:
    assert message in outcome(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if x", "line 1: unexpected end of template"),
        ("a\n{{ 'x'|nonesuch }}", "line 2: No filter named 'nonesuch'"),
        ("{{ x.y.z }}", "refuses: 'x' is undefined"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "fails: TypeError"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "does not compile"),
        ("x" * (MAX_SOURCE + 1), "longer than 262144 characters"),
    ],
)
def test_faulty_templates_say_why(source: str, message: str) -> None:
    assert message in outcome(source)


SHARED = (
    "{% set n = namespace(x=('a',), y=('a',)) %}{% for i in range(40) %}"
    "{% set n.x = (n.x, n.x) %}{% set n.y = (n.y, n.y) %}{% endfor %}"
)


@pytest.mark.parametrize(
    "use",
    [
        "{{ n.x }}",
        "{{ n.x == n.y }}",
        "{{ n.x|tojson }}",
        "{{ n.x|string }}",
        "{{ '%s' % n.x }}",
        "{{ '{}'.format(n.x) }}",
        "{{ n.x ~ '' }}",
        "{{ {n.x: 1} }}",
        "{{ {}[n.x] }}",
        "{{ {}.get(n.x) }}",
        "{{ [n.x]|unique|list }}",
        "{{ [n.x, n.y]|max }}",
        "{{ [n.x].index(n.y) }}",
        "{{ n.x in [n.y] }}",
        "{{ n.x is eq(n.y) }}",
    ],
)
def test_parts_that_values_share_count_each_time(use: str) -> None:
    assert "a value of more than 8388608 characters" in outcome(SHARED + use)


@pytest.mark.parametrize(
    "step",
    [
        "{% set n.x = [n.x, n.x] %}",
        "{% set n.x = {'a': n.x, 'b': n.x} %}",
        "{% set n.x = {'a': n.x, 'b': n.x}.items() %}",
        "{% set n.x = [n.x, n.x]|select %}",
        "{% set n.x = dict(a=n.x, b=n.x) %}",
        "{% set n.x = n.x + n.x %}",
        "{% set n.x = n.x * 2 %}",
        "{% set done = pair(n.x, n.x) %}",
    ],
)
def test_doubling_a_value_ends(step: str) -> None:
    macro = "{% macro pair() %}{% set n.x = varargs %}{% endmacro %}"
    source = "{% set n = namespace(x=['a']) %}" + macro
    assert outcome(source + "{% for i in range(99) %}" + step + "{{ n.x }}{% endfor %}")


def test_values_are_nested_to_a_depth() -> None:
    source = "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x] %}{% endfor %}"
    assert "nested more than 64 deep" in outcome(source)


def test_a_namespace_that_holds_itself_prints() -> None:
    source = "{% set n = namespace() %}{% set n.x = [n, n] %}{{ n.x }}"
    assert Template(source).render({}) == "[<Namespace>, <Namespace>]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ big.translate({97: big}) }}", "no method 'translate' of str"),
        ("{{ 'a'.encode() }}", "no method 'encode' of str"),
        ("{{ 'a'.ljust(10 ** 10) }}", "no method 'ljust' of str"),
        ("{{ 'a'.zfill(10 ** 10) }}", "no method 'zfill' of str"),
        ("{{ big.rfind('b' + big) }}", "no method 'rfind' of str"),
        ("{{ '{x}'.format_map({'x': 1}) }}", "no method 'format_map' of str"),
        ("{{ (5).to_bytes(10 ** 9) }}", "no method 'to_bytes' of int"),
        ("{{ dict.fromkeys(range(9)) }}", "no method 'fromkeys' of type"),
        ("{{ ([['a']] * 9)|sum(start=[]) }}", "No filter named 'sum'"),
        ("{{ [1]|batch(10 ** 9, 0)|list }}", "No filter named 'batch'"),
        ("{{ big|striptags }}", "No filter named 'striptags'"),
        ("{{ 1 < 2 in [1] }}", "'in' inside a chain of comparisons"),
    ],
)
def test_what_templates_do_not_need_is_not_there(source: str, message: str) -> None:
    assert message in outcome(source)


@pytest.mark.parametrize(
    "work",
    [
        "{% set c = 'a' in range(99999) %}",
        "{% set c = big.find('b' * 99) %}",
        "{% set c = big.strip('a' * 999) %}",
        "{% set c = big.split('a') %}",
        "{% set c = ([big[:9999]] * 99)|sort %}",
        "{% set c = 'aaa'|list|map(attribute='0' + '.0' * 99999)|list %}",
        "{% set c = big|tojson %}",
        "{% set c = big|title %}",
        "{% set c = range(99999)|list %}",
        "{% set c = 1 %}" * 999,
        "{% set c = range(99999)|selectattr('x') %}",
    ],
)
def test_work_far_from_its_size_is_paid(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    assert outcome("{% for i in range(99999) %}" + work + "{% endfor %}").startswith(
        "the chat template refuses"
    )


@pytest.mark.parametrize("operator", ["+", "~"])
def test_doubling_ends(operator: str) -> None:
    body = f"{{% set n.x = n.x {operator} n.x %}}"
    source = "{% set n = namespace(x='ab') %}{% for i in range(60) %}" + body + "{% endfor %}"
    assert outcome(source).startswith("the chat template refuses")


def test_each_rendering_has_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    template = Template("{% for i in range(900) %}{% endfor %}done")
    assert [template.render(VARIABLES) for _ in range(3)] == ["done"] * 3


def test_a_long_chat_is_well_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim + '\\n' }}{% endfor %}"
    assert len(Template(source).render({"messages": messages})) == 2000 * (6 + 1000)

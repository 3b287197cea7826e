"""Hostile templates: no reach, no endless work, no text without end; always a clear error."""

from __future__ import annotations

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
    assert "did not end within 30000 steps" in outcome(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * (10 ** 9) }}",
        "{{ (10 ** 9) * [1] }}",
        "{{ big * 60 + big * 60 }}",
        "{{ (big * 60) ~ (big * 60) }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a'.zfill(10 ** 10) }}",
        "{{ '\t'.expandtabs(10 ** 10) }}",
        "{{ ([big] * 10000)|join('') }}",
        "{{ ([{'x': big}] * 10000)|join('', attribute='x') }}",
        "{{ ''.join([big] * 10000) }}",
        "{{ big.replace('a', big) }}",
        "{{ big|replace('a', big) }}",
        "{{ big|indent(10 ** 6, true) }}",
        "{{ 'x'|tojson(indent=10 ** 9) }}",
        "{{ [1]|batch(10 ** 9, 0)|list }}",
        "{{ ('{0}' * 1000).format(big) }}",
        "{{ ('%(x)s' * 1000) % {'x': big} }}",
    ],
)
def test_values_are_bounded_before_they_are_made(source: str) -> None:
    assert "a value of more than 67108864 characters or items" in outcome(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ '%99999d' % 1 }}", "a format with a width"),
        ("{{ '%*d' % (99999, 1) }}", "a format with a width"),
        ("{{ '%999999d'|format(1) }}", "a format with a width"),
        ("{{ '{:999999}'.format(1) }}", "a format with a width"),
        ("{{ '{:{}}'.format(1, 999999) }}", "a format with a width"),
        ("{{ '{x:999999}'.format_map({'x': 1}) }}", "a format with a width"),
        ("{{ strftime_now('%999999Y') }}", "a date format that is too long"),
        ("{{ 2 ** (10 ** 9) }}", "a power that is too large"),
        ("{{ (2 ** 64) ** 64 * 2 }}", "an integer of more than 4096 bits"),
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
        ("x" * (MAX_SOURCE + 1), "longer than 1048576 characters"),
    ],
)
def test_faulty_templates_say_why(source: str, message: str) -> None:
    assert message in outcome(source)


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

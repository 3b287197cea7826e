"""Messages are checked, and templates see what transformers would show them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadproof.tokenizer import ChatTemplateError
from loadproof.tokenizer.chat import ChatTemplates, check_messages

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = None, **options: Any) -> str:
    variables = options.pop("variables", {})
    defaults: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
    chosen: dict[str, Any] = {**defaults, **options}
    given = HI if messages is None else messages
    return ChatTemplates({"default": source}).render(given, variables=variables, **chosen)


def test_a_chat_with_and_without_a_generation_prompt() -> None:
    assert render(CHATML) == "<|user|>\nhi<end>\n<|assistant|>\n"
    assert render(CHATML, add_generation_prompt=False) == "<|user|>\nhi<end>\n"


def test_blocks_leave_no_space_behind() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_variables_reach_the_template_but_cannot_replace_the_messages() -> None:
    assert render("{{ bos_token }}{{ x }}", variables={"bos_token": "<s>", "x": 3}) == "<s>3"
    assert render("{{ messages|length }}", variables={"messages": []}) == "1"


def test_helpers_that_templates_expect() -> None:
    value = {"b": "<é> & 'x'", "a": [1, None, True]}
    variables = {"value": value}
    assert render("{{ value|tojson }}", variables=variables) == json.dumps(value, ensure_ascii=False)
    indented = json.dumps(value, ensure_ascii=False, indent=4)
    assert render("{{ value|tojson(indent=4) }}", variables=variables) == indented
    assert render("{{ strftime_now('%Y')|int > 2000 }}") == "True"
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}said {{ messages[0].content }}{% endgeneration %}") == "said hi"
    assert render(
        "{% for i in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    ) == ("1/3,2/3,3/3")
    assert render("{{ ['a', 1]|join('-') }}{{ 'x' ~ 1 ~ none }}{{ '%s:%d' % ('a', 2) }}") == "a-1x1Nonea:2"
    assert render("{{ messages|map(attribute='role')|join(',') }}") == "user"
    assert render("{{ messages|join(',', attribute='role') }}") == "user"
    assert render("{{ '{}-{x}'.format(1, x=2) }}{{ 'a,b'.split(',')[::-1] }}") == "1-2['b', 'a']"
    with pytest.raises(ChatTemplateError, match="the chat template refuses: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_tree_is_walked_by_a_recursive_loop() -> None:
    tree = [{"n": 1, "kids": [{"n": 2, "kids": []}]}]
    source = "{% for x in tree recursive %}{{ x.n }}({{ loop(x.kids) }}){% endfor %}"
    assert render(source, variables={"tree": tree}) == "1(2())"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts, "name": "n"}]) == [
        {"role": "user", "content": "a\nb", "name": "n"}
    ]


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "assistant", "content": "Once"}]
    render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "Once"}]


def test_tool_calls_need_no_content() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "assistant", "tool_calls": calls}]
    assert check_messages(messages) == [{"role": "assistant", "tool_calls": calls, "content": ""}]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Rome", "days": [1, 2]}', '{"city": "Rome", "days": [1, 2]}'),
        ({"city": "Rome"}, '{"city": "Rome"}'),
        ("", "{}"),
        ("[1]", '"[1]"'),
        ("Rome", '"Rome"'),
        ("{" * 100_000, '"' + "{" * 100_000 + '"'),
        ('{"a":' * 5000 + "1" + "}" * 5000, None),
        ('{"a":' * 33 + "1" + "}" * 33, None),
        ('{"a": "\\ud83d"}', None),
        (None, "null"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_of_tool_calls_are_written_once(arguments: Any, written: str | None) -> None:
    source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
    messages = [{"role": "assistant", "tool_calls": calls}]
    assert render(source, messages) == (json.dumps(arguments) if written is None else written)
    assert calls[0]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize("calls", [5, "x", [5], [{}], [{"function": 5}], [{"function": {}}]])
def test_tool_calls_of_other_forms_are_the_templates_affair(calls: Any) -> None:
    (message,) = check_messages([{"role": "assistant", "tool_calls": calls}])
    assert message["tool_calls"] == calls


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": []}])
def test_an_assistant_may_say_nothing(message: dict[str, Any]) -> None:
    (checked,) = check_messages([{"role": "assistant", **message}])
    assert checked["content"] == ""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is a list of messages, not str"),
        ({"role": "user"}, "messages is a list of messages, not dict"),
        (None, "messages is a list of messages, not NoneType"),
        ([], "messages is empty"),
        ([*HI, "x"], r"messages\[1\] is an object with role and content, not str"),
        ([{"content": "x"}], r"messages\[0\]\.role is a non-empty string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role is a non-empty string"),
        ([{"role": "user"}], r"messages\[0\]\.content is a string or a list of text parts"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is a string or a list"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: only text parts are supported, not 'str'"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\]: only text parts are supported, not 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is a string"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        check_messages(messages)


@pytest.mark.parametrize("content", ["Once upon", "Once ", "", "<end>", "[[final message ends here]]"])
def test_the_final_message_is_left_open(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    prompt = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == f"<|user|>\nhi<end>\n<|assistant|>\n{content}"


def test_a_final_message_that_the_template_drops_or_repeats_cannot_be_continued() -> None:
    for source in ("nothing", "{{ messages[-1].content * 2 }}"):
        with pytest.raises(ChatTemplateError, match="does not write the final message once"):
            render(source, add_generation_prompt=False, continue_final_message=True)


def test_a_prompt_is_opened_or_continued_not_both() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(CHATML, continue_final_message=True)

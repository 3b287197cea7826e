"""Chats to prompts: message checks and the model's chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadproof.tokenizer.errors import ChatTemplateError

if TYPE_CHECKING:  # Jinja is imported at the first chat: it costs as much as the rest of a tokenizer
    from loadproof.tokenizer.sandbox import Template

_MOST_DEPTH = 32  # of arguments as an object: templates take values of twice that, calls and messages in it
_END_MARK = "[[final message ends here]]"

Message = dict[str, Any]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages with their content as one string, as templates take it.

    A message is ``{"role": str, "content": str | [{"type": "text", "text": str}, ...]}``; text parts are
    joined by newlines. ``content`` may be absent or None, which stands for empty text, where an assistant
    speaks or beside ``tool_calls``; these calls' arguments may be JSON text or an object, and become one.
    Other keys are kept. Raises :class:`ChatTemplateError` naming the first message that is not so.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages is a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages is empty")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} is an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where}.role is a non-empty string")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and (calls or role == "assistant"):
        content = ""
    checked = {**message, "content": _text_of(content, f"{where}.content")}
    if isinstance(calls, (list, tuple)):
        checked["tool_calls"] = [_with_object(call) for call in calls]
    return checked


def _with_object(call: object) -> object:
    """A tool call with its arguments as an object where they are one's JSON, for templates write that."""
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(text, str):
        return call
    return {**call, "function": {**function, "arguments": _object_in(text)}}


def _object_in(text: str) -> object:
    if not text:
        return {}
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or _depth(value) > _MOST_DEPTH:
            return text
        json.dumps(value, ensure_ascii=False).encode()  # an escape may stand for half a character
    except (ValueError, RecursionError):
        return text
    return value


def _depth(value: object) -> int:
    depth, layer = 0, [value]
    while nested := [one for one in layer if isinstance(one, (dict, list))]:
        layer = [inner for one in nested for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ChatTemplateError(f"{where} is a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(f"{where}[{index}]: only text parts are supported, not {kind!r:.100}")
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}[{index}].text is a string")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatTemplates:
    """A model's chat templates by name, each compiled when first used.

    The one named ``default`` serves chats, ``tool_use`` those with tools where there is one.
    """

    def __init__(self, sources: Mapping[str, str] | None = None):
        self._sources = dict(sources or {})
        self._compiled: dict[str, Template] = {}

    def __bool__(self) -> bool:
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt; see :meth:`Tokenizer.apply_chat_template`."""
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other")
        checked = check_messages(messages)
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        mark = _mark_end(checked) if continue_final_message else None
        prompt = template.render(
            {
                "documents": None,
                **variables,
                "messages": checked,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return prompt if mark is None else _cut_at(prompt, mark)

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            from loadproof.tokenizer.sandbox import Template

            if name not in self._sources:
                has = f"; it has {sorted(self._sources)}" if self._sources else ""
                raise ChatTemplateError(f"the model has no chat template{has}: give the prompt as text")
            self._compiled[name] = Template(self._sources[name])
        return self._compiled[name]


def _mark_end(messages: list[Message]) -> str:
    """Append to the last message a mark that no message contains, so that its end can be found."""
    mark, written = _END_MARK, repr(messages)
    while mark in written:
        mark = f"[{mark}]"
    messages[-1]["content"] += mark
    return mark


def _cut_at(prompt: str, mark: str) -> str:
    if prompt.count(mark) != 1:
        raise ChatTemplateError(
            "the chat template does not write the final message once, so it can't be continued"
        )
    return prompt[: prompt.index(mark)]

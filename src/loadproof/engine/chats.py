"""What callers may give as chats and options of their template, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from loadproof.engine.prompts import PromptError

Conversation = Sequence[Mapping[str, Any]]


class TemplateOptions(TypedDict, total=False):
    """What a call may say of its chat template by name."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None


_TAKEN = frozenset({"self", "conversation", "messages"})


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several as a list; raises :class:`PromptError` for what is no list at all."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes, bytearray, memoryview)):
        raise PromptError(
            f"messages is a list of messages, or a list of such lists, not {type(messages).__name__}"
        )
    if messages and not isinstance(messages[0], Mapping):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def template_options(arguments: Mapping[str, Any], variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of a chat template from a call's own ``arguments`` and its ``chat_template_kwargs``.

    Raises :class:`PromptError` for arguments that there aren't, and where both set the same, or the
    variables what the call itself does.
    """
    unknown = sorted(arguments.keys() - TemplateOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(TemplateOptions.__annotations__)
        raise PromptError(
            f"no such options of a chat: {', '.join(unknown)}; there are {known}, and the template's own "
            "variables go into chat_template_kwargs"
        )
    variables = {} if variables is None else variables
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise PromptError(f"chat_template_kwargs is an object with names as keys, not {variables!r:.200}")
    repeated = sorted((arguments.keys() | _TAKEN) & variables.keys())
    if repeated:
        raise PromptError(f"chat_template_kwargs sets what another argument does: {', '.join(repeated)}")
    check_tools(arguments.get("tools", variables.get("tools")))
    return {**arguments, **variables}


def check_tools(tools: object) -> None:
    """Raise :class:`PromptError` unless ``tools`` is None or a list of objects."""
    if tools is None:
        return
    if not isinstance(tools, (list, tuple)):
        raise PromptError(f"tools is a list of objects, not {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise PromptError(f"tools[{index}] is an object, not {type(tool).__name__}")

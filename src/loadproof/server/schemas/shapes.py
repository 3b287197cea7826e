"""Fields that take values of several shapes: the shape is told first, so that an error is about that one."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Discriminator

SHAPE_MARK = "#"
"""What names of shapes begin with, so that they aren't taken for names of fields."""

SHAPE_ERROR = "wrong_shape"
"""The kind of error whose message is what the value must be."""

TEXT, IDS, TEXTS, ID_LISTS, LIST, OBJECT = "#text", "#ids", "#texts", "#id lists", "#list", "#object"


def text_or_list(value: object) -> str | None:
    """Whether a value is text or a list."""
    if isinstance(value, str):
        return TEXT
    return LIST if isinstance(value, list) else None


def text_or_object(value: object) -> str | None:
    """Whether a value is text or an object."""
    if isinstance(value, str):
        return TEXT
    return OBJECT if isinstance(value, dict) else None


def prompt_shape(value: object) -> str | None:
    """Which of the four shapes of prompts a value has, by its first entry."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return TEXTS if isinstance(value[0], str) else ID_LISTS
    return {TEXT: TEXT, LIST: IDS}.get(text_or_list(value) or "")


def shaped(shape_of: Callable[[object], str | None], wanted: str) -> Discriminator:
    """Choose by shape; a value that has none of them is told what is wanted instead."""
    return Discriminator(shape_of, custom_error_type=SHAPE_ERROR, custom_error_message=wanted)

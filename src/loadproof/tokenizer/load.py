"""A tokenizer from a Hugging Face model directory: ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from loadproof.tokenizer.chat import ChatTemplates
from loadproof.tokenizer.errors import TokenizerError
from loadproof.tokenizer.library import library_errors
from loadproof.tokenizer.tokenizer import SpecialTokens, Tokenizer

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 64 << 20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Read the tokenizer of a model directory.

    ``config`` and ``generation_config`` are the model's own files, for the tokens that end an answer. The
    chat template is ``chat_template.jinja`` (and ``additional_chat_templates/``), ``chat_template.json`` or
    a part of ``tokenizer_config.json``, the first that is there. Raises :class:`TokenizerError` naming the
    file that is missing or malformed.
    """
    backend = _read_backend(directory / "tokenizer.json")
    settings = _read_json(directory / "tokenizer_config.json")
    names = _named_tokens(settings)
    with library_errors("the tokens of tokenizer_config.json cannot be added"):
        _add_missing(backend, settings, names)
    _update_post_processor(backend, settings, names)
    bos_id, eos_id = (_id_of(backend, names.get(name)) for name in ("bos_token", "eos_token"))
    ends = {eos_id, *_ids((generation_config or {}).get("eos_token_id", (config or {}).get("eos_token_id")))}
    special = SpecialTokens(bos_id, eos_id, frozenset(end for end in ends if end is not None), names)
    return Tokenizer(backend, special, ChatTemplates(_chat_templates(directory, settings)))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        hint = " (tokenizer.model alone is not read)" if path.with_name("tokenizer.model").exists() else ""
        raise TokenizerError(f"{path} is missing{hint}")
    _check_size(path, _MAX_TOKENIZER_BYTES)
    with library_errors(f"{path} is not a tokenizer"):
        return tokenizers.Tokenizer.from_file(str(path))


def _check_size(path: Path, limit: int) -> None:
    size = path.stat().st_size
    if size > limit:
        raise TokenizerError(f"{path} has {size} bytes; at most {limit} are read")


def _read_text(path: Path) -> str:
    _check_size(path, _MAX_CONFIG_BYTES)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content:
            names[name] = content
    return names


def _add_missing(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Add the tokens that only ``tokenizer_config.json`` knows, and mark the named ones as special."""
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping) or not all(
        _is_added_token(key, entry) for key, entry in listed.items()
    ):
        raise TokenizerError("tokenizer_config.json: added_tokens_decoder maps ids to tokens")
    for token_id, entry in sorted((int(key), entry) for key, entry in listed.items()):
        content = entry["content"]
        if backend.token_to_id(content) is None:
            flags = {
                flag: bool(entry.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized")
            }
            backend.add_tokens([AddedToken(content, special=bool(entry.get("special")), **flags)])
        if backend.token_to_id(content) != token_id:
            found = backend.token_to_id(content)
            raise TokenizerError(f"tokenizer_config.json gives {content!r} the id {token_id}, not {found}")
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    unmarked = [name for name in names.values() if name not in special and _id_of(backend, name) is not None]
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in unmarked])


def _is_added_token(key: object, entry: object) -> bool:
    is_id = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
    return is_id and isinstance(entry, Mapping) and isinstance(entry.get("content"), str)


def _update_post_processor(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """``add_bos_token`` and ``add_eos_token``, where given, overrule ``tokenizer.json`` (transformers 5)."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings and backend.post_processor:
        return
    set_post_processor(
        backend,
        names.get("bos_token") if settings.get("add_bos_token") else None,
        names.get("eos_token") if settings.get("add_eos_token") else None,
    )


def set_post_processor(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Have :meth:`Tokenizer.encode` put these tokens around a text."""
    # Pieces are named apart from the tokens' text, which may hold characters that have a meaning here.
    pieces, around = ["$A"], []
    for name, token in (("bos", bos), ("eos", eos)):
        if token is None:
            continue
        token_id = backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"the token {token!r} is to be added to texts but is not in the vocabulary")
        around.append({"id": name, "ids": [token_id], "tokens": [token]})
        pieces = [name, *pieces] if name == "bos" else [*pieces, name]
    with library_errors("tokens cannot be put around a text"):
        backend.post_processor = TemplateProcessing(single=pieces, pair=None, special_tokens=around)


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids(value: Any) -> Iterable[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TokenizerError(f"eos_token_id is a token id or a list of them, not {value!r:.100}")
    return ids


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    named = {path.stem: _read_text(path) for path in more}
    alone = directory / "chat_template.jinja"
    if alone.is_file():
        return {**named, "default": _read_text(alone)}
    wrapped = _read_json(directory / "chat_template.json").get("chat_template")
    return {**named, **templates_of(wrapped if wrapped is not None else settings.get("chat_template"))}


def templates_of(value: Any) -> dict[str, str]:
    """Chat templates by name, of one template or of a list of ``{"name": ..., "template": ...}``."""
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates = {}
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise TokenizerError("chat_template is a template or a list of named templates")
        name, template = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError("chat_template is a template or a list of named templates")
        templates[name] = template
    return templates

"""Typed reading of ``config.json``, which comes with the model and is trusted in nothing.

Every read names its key, checks the type and bounds the value, so that a wrong or hostile config fails
here with the key in the message, before anything is sized by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_LAYERS = 1 << 10
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 26

# Settings that change what a model computes, with the values that switch each off. An architecture that
# does not read one of these must find it off: nothing is accepted and ignored.
_OFF: dict[str, tuple[object, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "no_rope_layers": ((), []),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "compression_config": (),
    "residual_multiplier": (1,),
    "rope_local_base_freq": (),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}


class ConfigError(ValueError):
    """A ``config.json`` that lacks something, holds a wrong value, or asks for what is not supported."""


class UnknownArchitectureError(ConfigError):
    """A model of an architecture that has no file here."""


class Required:
    """The type of :data:`REQUIRED`, which stands for a default that there is not."""


REQUIRED = Required()


class Config:
    """A view of one parsed ``config.json`` through typed getters.

    Each getter returns ``default`` for a key that is absent or null, and raises :class:`ConfigError` if
    there is no default, or if the value has another type or lies out of bounds. The keys read are noted,
    for :meth:`refuse_unread`.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where} is not a JSON object but a {_kind(raw)}")
        self._raw = raw
        self._where = where
        self._read: set[str] = set()

    def _get(self, key: str, default: object) -> Any:
        self._read.add(key)
        value = self._raw.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConfigError(f"{self._where} has no {key}")
        return default

    def error(self, key: str, problem: str) -> ConfigError:
        """An error about ``key``, to be raised by the caller."""
        return ConfigError(f"{self._where}: {key} {problem}")

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return self._get(key, None) is not None

    def integer(self, key: str, default: int | Required = REQUIRED, *, low: int = 1, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"is a {_kind(value)}, not a whole number")
        if not low <= value <= high:
            raise self.error(key, f"is {_short(value)}, not within {low} to {high}")
        return value

    def positive(self, key: str, default: float | Required = REQUIRED) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"is a {_kind(value)}, not a number")
        if not 0 < value < 1e30:
            raise self.error(key, f"is {_short(value)}, not a finite number above 0")
        return float(value)

    def optional_positive(self, key: str) -> float | None:
        """A finite number above 0, or ``None`` where it is absent."""
        return self.positive(key) if self.has(key) else None

    def flag(self, key: str, default: bool | Required = REQUIRED) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is a {_kind(value)}, not true or false")
        return value

    def text(self, key: str, default: str | Required = REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is a {_kind(value)}, not a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where the key is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "is not a list of strings")
        return value

    def section(self, key: str) -> Config:
        """The JSON object under ``key``; an empty one where it is absent."""
        return Config(self._get(key, {}), f"{self._where}: {key}")

    def keys(self) -> set[str]:
        """Keys that are there and not null."""
        return {key for key, value in self._raw.items() if value is not None}

    def acknowledge(self, key: str) -> None:
        """Note that ``key`` is supported, though this model's other settings make it void."""
        self._read.add(key)

    def refuse_unread(self, architecture: str) -> None:
        """Raise :class:`ConfigError` for a setting that matters and that ``architecture`` did not read."""
        for key in sorted(self.keys() - self._read):
            if key in _OFF and self._raw[key] not in _OFF[key]:
                raise self.error(key, f"is {_short(self._raw[key])}, which {architecture} does not support")


def _kind(value: object) -> str:
    names = {dict: "JSON object", list: "list", str: "string", bool: "truth value", type(None): "null"}
    if isinstance(value, float) and not math.isfinite(value):
        return "number that is not finite"
    return names.get(type(value), "number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

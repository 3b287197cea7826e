"""Options that several commands share, in groups, with vLLM's names.

An option that was not given is None and leaves the setting to its one default, in
:class:`~loadproof.config.EngineConfig` or :class:`~loadproof.engine.sampling_params.SamplingParams`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from loadproof.config import LOGPROBS_MODES, POLICIES, ConfigError, EngineConfig, parse_bytes

_T = TypeVar("_T")
CONFIG_PATH = "loadproof.config_file"
"""Under which the context of a command has the path of its config file."""


class Size(click.ParamType):  # type: ignore[type-arg]  # only newer versions of click have type arguments
    """Bytes, in units such as 500MB or 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes."""
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def _bias(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[int, float] | None:
    try:
        found = {} if value is None else json.loads(value)
        return {int(token_id): float(bias) for token_id, bias in found.items()} or None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise click.BadParameter(f'an object such as {{"42": -100}}, not {value:.100}') from error


class GroupedOption(click.Option):
    """An option that help shows under its group's heading."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows :class:`GroupedOption` by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section of options a group, the command's own first."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "group", "Options"), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


_ENGINE: list[tuple[str, dict[str, Any]]] = [
    ("--served-model-name", {"help": "Name shown to clients."}),
    (
        "--max-model-len",
        {
            "type": int,
            "help": "Most tokens of a request; default: what model and cache allow, up to 262144.",
        },
    ),
    ("--max-num-seqs", {"type": int, "help": "Most sequences running at once."}),
    ("--max-num-batched-tokens", {"type": int, "help": "Token budget of a step."}),
    ("--max-num-prefill-tokens", {"type": int, "help": "Most prompt tokens of a step while others decode."}),
    (
        "--scheduling-policy",
        {"type": click.Choice(POLICIES), "help": "Who goes first: by arrival, or by priority."},
    ),
    (
        "--enable-prefix-caching/--no-enable-prefix-caching",
        {"default": None, "help": "Reuse prefixes that were computed before; default: on."},
    ),
    (
        "--prompt-logprobs-cache/--no-prompt-logprobs-cache",
        {
            "default": None,
            "help": "Keep hidden states, so that scored prompts use cached prefixes; default: on.",
        },
    ),
    (
        "--async-scheduling/--no-async-scheduling",
        {"default": None, "help": "Plan a step while the one before it runs; default: on."},
    ),
    (
        "--check-integrity",
        {"is_flag": True, "default": None, "help": "Check all bookkeeping after every step."},
    ),
    (
        "--block-size",
        {"type": int, "help": "Tokens in a cache block: 16, 32, 64, 128, 256 or a multiple of 512."},
    ),
    ("--num-blocks-override", {"type": int, "help": "Blocks of the key-value cache."}),
    (
        "--kv-cache-memory",
        {
            "type": Size(),
            "help": "Size of the key-value cache, such as 500MB or 4GiB.",
        },
    ),
    ("--num-threads", {"type": int, "help": "Threads that compute."}),
    ("--logprobs-mode", {"type": click.Choice(LOGPROBS_MODES), "help": "What log-probabilities are of."}),
    ("--max-logprobs", {"type": int, "help": "Most log-probabilities a request may ask for; -1: no limit."}),
]
_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("--temperature", {"type": float, "help": "0 takes the best token; default: the model's, else 0."}),
    ("--top-p", {"type": float, "help": "Keep the best tokens up to this sum of probability."}),
    ("--top-k", {"type": int, "help": "Keep so many best tokens; 0 keeps all."}),
    ("--min-p", {"type": float, "help": "Drop tokens below this share of the best one's probability."}),
    ("--max-tokens", {"type": int, "help": "Most tokens to generate; default: the model's, else 256."}),
    ("--min-tokens", {"type": int, "help": "Don't end before so many tokens."}),
    ("--stop", {"multiple": True, "help": "End at this string; may be repeated."}),
    ("--stop-token-ids", {"type": int, "multiple": True, "help": "End at this token; may be repeated."}),
    ("--ignore-eos", {"is_flag": True, "default": None, "help": "Go on past end-of-sequence tokens."}),
    ("--seed", {"type": int, "help": "Key of the random numbers; drawn and reported where not given."}),
    ("--n", {"type": int, "help": "Completions of each prompt."}),
    ("--presence-penalty", {"type": float, "help": "Against tokens that the output holds."}),
    ("--frequency-penalty", {"type": float, "help": "Against tokens, for each time the output holds them."}),
    ("--repetition-penalty", {"type": float, "help": "Against tokens in prompt or output; 1 is off."}),
    (
        "--logit-bias",
        {"callback": _bias, "metavar": "JSON", "help": 'Added to logits, as {"TOKEN ID": NUMBER}.'},
    ),
]


def _names(options: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [flag.partition("/")[0].removeprefix("--").replace("-", "_") for flag, _ in options]


_ENGINE_NAMES = _names(_ENGINE)
_SAMPLING_NAMES = _names(_SAMPLING)


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the engine's settings to a command."""
    return grouped(function, "Engine", _ENGINE)


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling parameters to a command."""
    return grouped(function, "Sampling", _SAMPLING)


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The engine settings that were given, checked so that a wrong one is a usage error."""
    settings = _given(values, _ENGINE_NAMES)
    usage_checked(lambda: EngineConfig.of("model", settings))
    return settings


def sampling_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were given."""
    return _given(values, _SAMPLING_NAMES)


def usage_checked(make: Callable[[], _T]) -> _T:
    """What ``make`` returns; a ValueError in it is a usage error, and may be of the config file."""
    try:
        return make()
    except ValueError as error:
        raise click.UsageError(f"{_source(str(error))}{error}") from error


def _source(message: str) -> str:
    """The config file, if the setting that a message begins with has its value from there."""
    ctx = click.get_current_context(silent=True)
    if ctx is None or CONFIG_PATH not in ctx.meta:
        return ""
    names = {param.name for param in ctx.command.params}
    named = [word for word in re.findall(r"[a-z_]+", message) if word in names]
    in_file = named and ctx.get_parameter_source(named[0]) == ParameterSource.DEFAULT_MAP
    return f"{ctx.meta[CONFIG_PATH]}: " if in_file else ""


def _given(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if values[name] not in (None, ())}


def grouped(
    function: Callable[..., Any], group: str, options: list[tuple[str, dict[str, Any]]]
) -> Callable[..., Any]:
    """Add options, each a flag and what click is told about it, to a command."""
    for flag, attributes in reversed(options):
        function = click.option(flag, cls=GroupedOption, group=group, **attributes)(function)
    return function

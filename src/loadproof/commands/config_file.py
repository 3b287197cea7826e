"""``--config FILE``: options of a command in YAML or TOML, each as if it stood on the command line."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from loadproof.commands.options import CONFIG_PATH, Size

_MAX_BYTES = 1 << 20
_SECRET = frozenset({"api_key"})  # what errors must not show
_Setting = bool | str | list[str]


class _Loader(yaml.SafeLoader):
    """Plain data, each key once, without references: a few lines of those make gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="references (*name) are not allowed", problem_mark=self._mark()
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} stands there twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def _mark(self) -> yaml.Mark:
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return mark


def config_option(function: Any) -> Any:
    """Add ``--config`` to a command; what the command line says wins over the file."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="YAML or TOML file with any of these options, and model, by name; the command line wins.",
    )(function)


def _load(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    params = {one.name: one for one in ctx.command.params if one.name and one is not param}
    settings: dict[str, _Setting] = {}
    for key, value in read_config(path).items():
        try:
            name, setting = _setting(params, key, value)
            if name in settings:
                raise click.BadParameter("stands there twice")
            _check(ctx, params[name], setting)
        except click.BadParameter as error:
            raise click.UsageError(f"{path}: {key}: {error.message}", ctx) from error
        settings[name] = setting
    ctx.default_map = settings
    ctx.meta[CONFIG_PATH] = path


def read_config(path: Path) -> Mapping[str, object]:
    """The file's keys and values; raises a usage error that names it for one that can't be read."""
    readers: dict[str, Callable[[str], object]] = {
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
        ".toml": tomllib.loads,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise click.UsageError(f"{path}: a config file ends in {', '.join(readers)}")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise click.UsageError(f"{path}: larger than {_MAX_BYTES} bytes")
        found = reader(data.decode("utf-8"))
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{path}: {_in_a_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise click.UsageError(f"{path}: a config file holds one option a line, as NAME: VALUE")
    return found


def _read_yaml(text: str) -> object:
    return yaml.load(text, _Loader) or {}  # noqa: S506 - a SafeLoader, and stricter


def _in_a_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _setting(params: Mapping[str, click.Parameter], key: str, value: object) -> tuple[str, _Setting]:
    """The parameter that a key names, and its value as the command line would have it."""
    name = key.replace("-", "_")
    if name in params:
        return name, _words(params[name], value)
    flag = f"--{name.replace('_', '-')}"
    for param in params.values():
        if flag in param.secondary_opts and param.name:  # "no-access-log: true"
            return param.name, not _truth(value)
    near = difflib.get_close_matches(name, params, 1)
    hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
    raise click.BadParameter(f"there is no such option{hint}")


def _words(param: click.Parameter, value: object) -> _Setting:
    if isinstance(param, click.Option) and param.is_flag:
        return _truth(value)
    if isinstance(param, click.Option) and param.multiple:
        return [_word(param, one) for one in (value if isinstance(value, list) else [value])]
    return _word(param, value)


def _word(param: click.Parameter, value: object) -> str:
    """A single value as text, once it is of the type that the parameter wants."""
    kinds: tuple[type, ...]
    wanted, kinds = "text", (str,)
    if isinstance(param.type, Size):
        wanted, kinds = "a size", (str, int)
    elif param.type is click.INT:
        wanted, kinds = "an integer", (int,)
    elif param.type is click.FLOAT:
        wanted, kinds = "a number", (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        hint = " (put it in quotes)" if wanted == "text" and isinstance(value, bool | int | float) else ""
        shown = "" if param.name in _SECRET else f", not {value!r:.100}"
        raise click.BadParameter(f"must be {wanted}{shown}{hint}")
    return str(value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise click.BadParameter(f"must be true or false, not {value!r:.100}")
    return value


def _check(ctx: click.Context, param: click.Parameter, setting: _Setting) -> None:
    """Find what the parameter's own type refuses while it is known that the file says it."""
    param.type_cast_value(ctx, setting)

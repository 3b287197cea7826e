"""``loadproof serve``: a model behind an OpenAI-compatible HTTP interface."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loadproof.commands.config_file import config_option
from loadproof.commands.options import (
    GroupedCommand,
    GroupedOption,
    Size,
    engine_options,
    engine_settings,
    grouped,
    usage_checked,
)
from loadproof.config import EngineConfig
from loadproof.server.settings import (
    LOG_FORMATS,
    LOG_LEVELS,
    METRICS_PREFIXES,
    TEMPLATE_ARGUMENTS,
    ServerConfig,
)

if TYPE_CHECKING:
    from loadproof.llm import LLM

_log = logging.getLogger("loadproof.server")

_KEY_VARIABLE = "LOADPROOF_API_KEY"
_DEFAULT = ServerConfig()
_SERVER: list[tuple[str, dict[str, Any]]] = [
    ("--host", {"help": f"Address to listen on; default: {_DEFAULT.host}, this machine alone."}),
    ("--port", {"type": int, "help": f"Port to listen on; 0 takes a free one; default: {_DEFAULT.port}."}),
    ("--strict", {"is_flag": True, "default": None, "help": "Refuse fields that are not known."}),
    (
        "--max-queue",
        {
            "type": int,
            "help": f"Most sequences that wait; more are answered 429; default: {_DEFAULT.max_queue}.",
        },
    ),
    (
        "--max-stream-backlog",
        {
            "type": int,
            "help": "Most pieces of a stream that wait for its reader; "
            f"default: {_DEFAULT.max_stream_backlog}.",
        },
    ),
    ("--request-timeout", {"type": float, "help": "Most seconds that a request may take; default: none."}),
    (
        "--read-timeout",
        {
            "type": float,
            "help": f"Seconds in which a whole request must have come; default: {_DEFAULT.read_timeout:g}.",
        },
    ),
    (
        "--health-timeout",
        {
            "type": float,
            "help": "Seconds in which the engine must answer to be healthy; "
            f"default: {_DEFAULT.health_timeout:g}.",
        },
    ),
    (
        "--shutdown-timeout",
        {
            "type": float,
            "help": "Seconds that requests have to finish after SIGTERM; "
            f"default: {_DEFAULT.shutdown_timeout:g}.",
        },
    ),
    (
        "--max-body-size",
        {
            "type": Size(),
            "help": f"Most bytes of a request's body; default: {_DEFAULT.max_body_size >> 20}MiB.",
        },
    ),
    (
        "--max-header-size",
        {"type": Size(), "help": f"Most bytes of its headers; default: {_DEFAULT.max_header_size >> 10}KiB."},
    ),
    (
        "--allow-template-argument",
        {
            "multiple": True,
            "metavar": "NAME",
            "help": f"Let chat_template_kwargs set NAME, beside {', '.join(TEMPLATE_ARGUMENTS)}; repeatable.",
        },
    ),
]
_SECURITY: list[tuple[str, dict[str, Any]]] = [
    (
        "--api-key",
        {
            "multiple": True,
            "metavar": "KEY",
            "envvar": _KEY_VARIABLE,
            "help": "Let in only who has it; repeatable. Other users of this machine see what stands on a "
            "command line, but neither the config file nor the variable LOADPROOF_API_KEY, which may hold "
            "several with spaces between.",
        },
    ),
    (
        "--allowed-origins",
        {"multiple": True, "metavar": "ORIGIN", "help": "Origin whose pages may call; * is all; repeatable."},
    ),
    (
        "--allowed-hosts",
        {
            "multiple": True,
            "metavar": "NAME",
            "help": "Further name by which a server on a loopback address may be called; repeatable.",
        },
    ),
    ("--ssl-certfile", {"type": click.Path(path_type=Path), "help": "Serve TLS with this chain, PEM."}),
    ("--ssl-keyfile", {"type": click.Path(path_type=Path), "help": "Its key, where not in that file."}),
]
_LOGGING: list[tuple[str, dict[str, Any]]] = [
    (
        "--log-format",
        {"type": click.Choice(LOG_FORMATS), "help": f"How log lines look; default: {_DEFAULT.log_format}."},
    ),
    (
        "--log-level",
        {"type": click.Choice(LOG_LEVELS), "help": f"Least severity shown; default: {_DEFAULT.log_level}."},
    ),
    ("--access-log/--no-access-log", {"default": None, "help": "Log a line a request; default: on."}),
    (
        "--metrics-prefix",
        {"type": click.Choice(METRICS_PREFIXES), "help": "What metrics' names begin with; vllm: as vLLM's."},
    ),
    ("--otlp-traces-endpoint", {"metavar": "URL", "help": "Send OpenTelemetry spans there."}),
]
_GROUPS = {"Server": _SERVER, "Security": _SECURITY, "Logging and metrics": _LOGGING}
_SEED = "Source of the seeds of requests without one; default: those are drawn at random."


def _server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for group, options in reversed(_GROUPS.items()):
        function = grouped(function, group, options)
    return function


@click.command("serve", cls=GroupedCommand)
@click.argument("model")
@config_option
@_server_options
@engine_options
@click.option("--seed", cls=GroupedOption, group="Engine", type=int, help=_SEED)
def command(model: str, **values: Any) -> int:
    """Serve MODEL to OpenAI's clients, until an interrupt or SIGTERM: requests in flight may finish.

    MODEL is a directory, a .gguf file, a hub id or an alias; the file of --config may name it instead.
    """
    settings = _engine_settings(values)
    config = usage_checked(lambda: server_config(values))
    _check_keys(config)
    from loadproof.server.logs import configure_logging, flush_logs
    from loadproof.server.sockets import allow_connections, bound_sockets, close_all
    from loadproof.server.tls import tls_context
    from loadproof.server.tracing import check_tracing

    tls_context(config)
    check_tracing(config)
    allow_connections()
    sockets = bound_sockets(config.host, config.port)
    try:
        configure_logging(config)
        llm = _load(model, settings)
        from loadproof.server.serve import serve

        return serve(llm, config, sockets)
    finally:
        close_all(sockets)
        flush_logs()  # before whatever is said about an error


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The server's settings from the options that were given; raises ``ServerConfigError``."""
    given = {name: value for name, value in values.items() if value not in (None, ())}
    settings = {one.name: given[one.name] for one in fields(ServerConfig) if one.name in given}
    if "api_key" in given:
        settings["api_keys"] = given["api_key"]
    if "allow_template_argument" in given:
        settings["template_arguments"] = (*TEMPLATE_ARGUMENTS, *given["allow_template_argument"])
    return ServerConfig(**settings)


def _check_keys(config: ServerConfig) -> None:
    """Refuse to open the server to all where keys were meant to close it, and came out empty."""
    in_file = "api_key" in (click.get_current_context().default_map or {})
    if not config.api_keys and (in_file or _KEY_VARIABLE in os.environ):
        where = "the config file's api-key" if in_file else f"the variable {_KEY_VARIABLE}"
        raise click.UsageError(f"{where} holds no key; leave it out to have none")


def _engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    settings = engine_settings(values)
    if values["seed"] is not None:
        settings["seed"] = values["seed"]
        usage_checked(lambda: EngineConfig.of("model", settings))
    return settings


def _load(model: str, settings: Mapping[str, Any]) -> LLM:
    """The model, loaded while another thread imports the server: each is most of the time to the start."""
    from loadproof.llm import LLM

    _log.info("loading %s", model)
    importing = threading.Thread(target=importlib.import_module, args=("loadproof.server.serve",))
    importing.start()
    try:
        return LLM(model, **settings)
    finally:
        importing.join()

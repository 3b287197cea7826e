"""``loadproof serve``: how its options become settings, and what it says about wrong ones."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tests.server.running import Running

from loadproof.cli import cli, run
from loadproof.commands.serve import command
from loadproof.config import EngineConfig
from loadproof.server.settings import TEMPLATE_ARGUMENTS, ServerConfig
from loadproof.server.sockets import allow_connections

ROOT = Path(__file__).parents[2]


@dataclass
class Called:
    """What the command did: the model it loaded, and how it served that."""

    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    config: ServerConfig | None = None


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Stand in for loading and serving."""
    seen = Called()

    def load(model: str, settings: dict[str, Any]) -> None:
        seen.model, seen.settings = model, settings

    def serve(llm: object, config: ServerConfig, sockets: Sequence[object]) -> int:
        assert sockets
        seen.config = config
        return 0

    monkeypatch.delenv("LOADPROOF_API_KEY", raising=False)
    monkeypatch.setattr("loadproof.commands.serve._load", load)
    monkeypatch.setattr("loadproof.server.serve.serve", serve)
    monkeypatch.setattr("loadproof.server.logs.configure_logging", lambda config: None)
    return seen


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *args])


def config_of(called: Called, *args: str) -> ServerConfig:
    result = invoke("m", "--port", "0", *args)
    assert result.exit_code == 0, result.output
    assert called.config is not None
    return called.config


def test_without_options_every_setting_has_its_default(called: Called) -> None:
    assert config_of(called) == ServerConfig(port=0)
    assert (called.model, called.settings) == ("m", {})


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (("--host", "localhost"), "host", "localhost"),
        (("--strict",), "strict", True),
        (("--max-queue", "3"), "max_queue", 3),
        (("--max-stream-backlog", "5"), "max_stream_backlog", 5),
        (("--request-timeout", "1.5"), "request_timeout", 1.5),
        (("--read-timeout", "2"), "read_timeout", 2.0),
        (("--health-timeout", "3"), "health_timeout", 3.0),
        (("--shutdown-timeout", "0"), "shutdown_timeout", 0.0),
        (("--max-body-size", "3MiB"), "max_body_size", 3 << 20),
        (("--max-header-size", "8000"), "max_header_size", 8000),
        (("--allow-template-argument", "a"), "template_arguments", (*TEMPLATE_ARGUMENTS, "a")),
        (("--api-key", "a", "--api-key", "b"), "api_keys", ("a", "b")),
        (("--allowed-origins", "*"), "allowed_origins", ("*",)),
        (("--allowed-hosts", "a", "--allowed-hosts", "b"), "allowed_hosts", ("a", "b")),
        (("--log-format", "json"), "log_format", "json"),
        (("--log-level", "debug"), "log_level", "debug"),
        (("--no-access-log",), "access_log", False),
        (("--metrics-prefix", "vllm"), "metrics_prefix", "vllm"),
        (("--otlp-traces-endpoint", "http://x"), "otlp_traces_endpoint", "http://x"),
    ],
)
def test_an_option_arrives_at_its_setting(
    called: Called, args: tuple[str, ...], name: str, value: Any
) -> None:
    assert getattr(ServerConfig(), name) != value
    assert config_of(called, *args) == ServerConfig(port=0, **{name: value})


def test_there_is_an_option_for_every_setting() -> None:
    renamed = {"api_key": "api_keys", "allow_template_argument": "template_arguments"}
    options = {renamed.get(param.name or "", param.name) for param in command.params}
    settings = set(ServerConfig.__dataclass_fields__) | set(EngineConfig.__dataclass_fields__)
    assert options - {"config"} == settings


def test_engine_options_arrive(called: Called) -> None:
    config_of(called, "--max-model-len", "64", "--seed", "7", "--no-async-scheduling")
    assert called.settings == {"max_model_len": 64, "seed": 7, "async_scheduling": False}


def test_keys_come_from_the_environment_unless_given(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADPROOF_API_KEY", "one two")
    assert config_of(called).api_keys == ("one", "two")
    assert config_of(called, "--api-key", "three").api_keys == ("three",)


def test_the_documentation_names_every_option() -> None:
    named = set(re.findall(r"`(--[a-z-]+)`", (ROOT / "docs" / "server.md").read_text()))
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("--")} - {"--config"} == named


def test_the_documentation_names_every_route(server: Running) -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    for path in server.app.openapi()["paths"]:
        assert f" {path.replace(':path', '')}`" in text


def test_as_many_files_as_the_system_lets_be_opened() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_help_groups_options() -> None:
    text = invoke("--help").stdout
    headings = ["\nOptions:", "\nServer:", "\nSecurity:", "\nLogging and metrics:", "\nEngine:"]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    for group, flag in ((1, "--max-queue"), (2, "--api-key"), (3, "--log-format"), (4, "--block-size")):
        assert places[group] < text.index(flag)
        assert group == 4 or text.index(flag) < places[group + 1]
    assert "default: 8000" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "Missing argument 'MODEL'"),
        (("m", "--port", "70000"), "port must be an integer from 0 to 65535, not 70000"),
        (("m", "--port", "x"), "'x' is not a valid integer"),
        (("m", "--host", ""), "host must be an address or a name"),
        (("m", "--shutdown-timeout", "-1"), "shutdown_timeout must be seconds, 0 or more"),
        (("m", "--health-timeout", "nan"), "health_timeout must be seconds"),
        (("m", "--max-body-size", "lots"), "a size such as 4GiB"),
        (("m", "--api-key", ""), "an api_key must be ASCII text"),
        (("m", "--read-timeout", "0"), "read_timeout must be more than 0"),
        (("m", "--ssl-keyfile", "k"), "ssl_keyfile needs ssl_certfile"),
        (("m", "--ssl-certfile", "/no/cert"), "ssl_certfile: there is no file /no/cert"),
        (("m", "--metrics-prefix", "x"), "'x' is not one of"),
        (("m", "--block-size", "7"), "block_size must be"),
        (("m", "--seed", str(2**70)), "seed must be an integer"),
    ],
)
def test_usage_errors_exit_with_2(called: Called, args: tuple[str, ...], message: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert called.config is None


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_a_variable_without_a_key_does_not_open_the_server(
    called: Called, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LOADPROOF_API_KEY", value)
    result = invoke("m", "--port", "0")
    assert result.exit_code == 2
    assert "the variable LOADPROOF_API_KEY holds no key" in result.stderr
    assert called.config is None
    assert config_of(called, "--api-key", "k").api_keys == ("k",)


def test_a_file_without_a_key_does_not_open_the_server(called: Called, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("api-key: []")
    result = invoke("m", "--port", "0", "--config", str(path))
    assert result.exit_code == 2
    assert "the config file's api-key holds no key" in result.stderr
    assert config_of(called, "--config", str(path), "--api-key", "k").api_keys == ("k",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 70000", "port must be an integer"),
        ("read-timeout: 0", "read_timeout must be more than 0"),
        ("api-key: ['']", "an api_key must be ASCII text"),
        ("block-size: 7", "block_size must be"),
        ("seed: 1180591620717411303424", "seed must be an integer"),
    ],
)
def test_a_value_of_the_file_is_named_with_it(
    called: Called, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    result = invoke("m", "--config", str(path))
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert message in result.stderr
    result = invoke("m", "--config", str(path), "--max-queue", "-1")
    assert (str(path) in result.stderr) == ("max_queue" not in result.stderr)


def test_a_missing_extra_is_told_before_the_model_is_loaded(
    called: Called, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "loadproof.server.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert run(["serve", "m", "--port", "0", "--otlp-traces-endpoint", "http://x"]) == 1
    assert "otlp_traces_endpoint needs a package" in capsys.readouterr().err
    assert called.model == ""


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "address 192.0.2.1 is not an address of this machine"),
        ("no..name", "can't listen on no..name, port 0: not a name that a machine can have"),
    ],
)
def test_an_address_that_cannot_be_had_is_one_line(
    called: Called, capsys: pytest.CaptureFixture[str], host: str, message: str
) -> None:
    assert run(["serve", "m", "--port", "0", "--host", host]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"loadproof: {message}")
    assert stderr.count("\n") == 1
    assert called.model == ""


def test_a_certificate_that_is_none_is_one_line(
    called: Called, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    assert run(["serve", "m", "--ssl-certfile", str(junk)]) == 1
    assert capsys.readouterr().err.startswith(f"loadproof: ssl_certfile {junk}: no certificate chain and key")


def test_the_exit_code_is_the_servers(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadproof.server.serve.serve", lambda llm, config, sockets: 130)
    assert run(["serve", "m", "--port", "0"]) == 130


def test_a_model_is_loaded_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr("loadproof.llm.LLM", lambda model, **settings: seen.append((model, settings)))
    from loadproof.commands.serve import _load

    _load("m", {"seed": 1})
    assert seen == [("m", {"seed": 1})]


def test_the_command_is_listed() -> None:
    assert "Serve a model" in CliRunner().invoke(cli, ["--help"]).stdout
    assert isinstance(command, click.Command)

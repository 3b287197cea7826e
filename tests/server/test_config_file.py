"""The file of ``--config``: what it may hold, and what is said about what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from loadproof.commands.config_file import config_option
from loadproof.commands.options import Size

Seen = dict[str, Any]


@click.command()
@click.argument("model")
@config_option
@click.option("--port", type=int)
@click.option("--wait", type=float)
@click.option("--max-size", type=Size())
@click.option("--api-key", multiple=True, envvar="TEST_CONFIG_KEY")
@click.option("--log-format", type=click.Choice(["plain", "json"]))
@click.option("--strict", is_flag=True, default=None)
@click.option("--access-log/--no-access-log", default=None)
@click.pass_obj
def example(seen: Seen, /, **values: Any) -> None:
    seen.update({name: value for name, value in values.items() if value not in (None, ())})


def invoke(path: Path, args: Sequence[str], seen: Seen) -> Result:
    return CliRunner().invoke(example, ["--config", str(path), *args], obj=seen)


def read(tmp_path: Path, text: str, *args: str, suffix: str = ".yaml") -> Seen:
    """What the command gets with a file."""
    path = tmp_path / f"config{suffix}"
    path.write_text(text)
    seen: Seen = {}
    result = invoke(path, args, seen)
    assert result.exit_code == 0, result.output
    return seen


YAML = """
# every kind of option
model: a-model
port: 9000
wait: 2
max-size: 2MiB
api_key: [one, two]
log-format: json
strict: true
access-log: false
"""
TOML = """
model = "a-model"
port = 9000
wait = 2
max_size = 2097152
api-key = ["one", "two"]
log-format = "json"
strict = true
no-access-log = true
"""
ALL = {
    "model": "a-model",
    "port": 9000,
    "wait": 2.0,
    "max_size": 2 << 20,
    "api_key": ("one", "two"),
    "log_format": "json",
    "strict": True,
    "access_log": False,
}


@pytest.mark.parametrize(("suffix", "text"), [(".yaml", YAML), (".yml", YAML), (".TOML", TOML)])
def test_options_of_every_kind_by_name(tmp_path: Path, suffix: str, text: str) -> None:
    assert read(tmp_path, text, suffix=suffix) == ALL


def test_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_CONFIG_KEY", "from-env")
    seen = read(tmp_path, YAML, "other", "--port", "1", "--access-log", "--log-format", "plain")
    wins = {"model": "other", "port": 1, "access_log": True, "log_format": "plain", "api_key": ("from-env",)}
    assert seen == ALL | wins


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing\n", "m") == {"model": "m"}


def test_a_single_value_where_several_may_be(tmp_path: Path) -> None:
    assert read(tmp_path, "api-key: one", "m")["api_key"] == ("one",)


BOMB = "a: &a [x, x]\n" + "\n".join(f"b{i}: &b{i} [*a, *a]" for i in range(30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "prot: there is no such option; did you mean port?"),
        ("nothing-like-it: 1", "nothing-like-it: there is no such option"),
        ("config: other.yaml", "config: there is no such option"),
        ("port: '80'", "port: must be an integer, not '80'"),
        ("port: 1.0", "port: must be an integer, not 1.0"),
        ("port: true", "port: must be an integer, not True"),
        ("port:", "port: must be an integer, not None"),
        ("port: [1]", "port: must be an integer, not [1]"),
        ("wait: fast", "wait: must be a number, not 'fast'"),
        ("max-size: 1.5", "max-size: must be a size, not 1.5"),
        ("max-size: lots", "max-size: a size such as 4GiB"),
        ("model: 7", "model: must be text, not 7 (put it in quotes)"),
        ("api-key: [a, 7]", "api-key: must be text (put it in quotes)"),
        ("log-format: xml", "log-format: 'xml' is not one of 'plain', 'json'"),
        ("strict: 1", "strict: must be true or false, not 1"),
        ("strict: 'yes'", "strict: must be true or false, not 'yes'"),
        ("no-access-log: 0", "no-access-log: must be true or false, not 0"),
        ("no-strict: true", "no-strict: there is no such option"),
        ("max-size: 1\nmax_size: 2", "max_size: stands there twice"),
        ("no-access-log: true\naccess-log: true", "access-log: stands there twice"),
        ("port: 1\nport: 2", "line 2: port stands there twice"),
        ("- port", "a config file holds one option a line"),
        ("just text", "a config file holds one option a line"),
        ("1: 2", "a config file holds one option a line"),
        ("port: [", "line 1: "),
        ("x: !!python/object/apply:os.system ['id']", "line 1: could not determine a constructor"),
        (BOMB, "line 2: references (*name) are not allowed"),
        ("[" * 50000, "config.yaml: "),
        ("port: \x00", "config.yaml: "),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    seen: Seen = {}
    result = invoke(path, ["m"], seen)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert message in result.stderr
    assert not seen


@pytest.mark.parametrize("value", ["12345", "[good, 12345]", "12345.5", "[[12345]]", "{key: 12345}"])
def test_a_key_that_is_no_text_is_not_shown(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"api-key: {value}")
    result = invoke(path, ["m"], {})
    assert result.exit_code == 2
    assert "api-key: must be text" in result.output
    assert "12345" not in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "Invalid value (at end of document)"),
        ("port = 1\nport = 2", "Cannot overwrite a value"),
        ("[server]\nport = 1", "server: there is no such option"),
        ("model = 2020-01-01", "model: must be text, not datetime.date"),
    ],
)
def test_what_is_wrong_in_toml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    result = invoke(path, ["m"], {})
    assert result.exit_code == 2
    assert f"{path}: " in result.stderr
    assert message in result.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    large, latin, other = tmp_path / "large.yaml", tmp_path / "latin.yaml", tmp_path / "config.ini"
    large.write_text("#" * (1 << 20) + "\n")
    latin.write_bytes(b"model: caf\xe9")
    other.write_text("port=1")
    for path, message in (
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "a config file ends in .yaml, .yml, .toml"),
        (other, "a config file ends in .yaml, .yml, .toml"),
        (large, "larger than 1048576 bytes"),
        (latin, "can't decode byte 0xe9"),
    ):
        result = invoke(path, ["m"], {})
        assert result.exit_code == 2
        assert f"{path}: " in result.stderr
        assert message in result.stderr

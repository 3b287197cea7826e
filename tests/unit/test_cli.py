from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tests.fake_device import fake_loader, small_limits
from tests.tiny_models import write_model

from loadproof import LLM, SamplingParams, __version__
from loadproof.cli import cli, run


@pytest.fixture(autouse=True)
def _fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = small_limits(max_model_len=1280, num_blocks=1280 // 16 * 2, max_num_batched_tokens=2048)
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader(limits=limits))


def _invoke(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, args, input=stdin)


def _records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def _answer(prompt: str, **params: Any) -> str:
    with LLM("fake") as llm:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 256, **params}
        return llm.generate(prompt, SamplingParams(**settings))[0].outputs[0].text


def test_a_single_prompt_prints_its_completion() -> None:
    result = _invoke("generate", "fake", "hello", "--max-tokens", "12")
    assert result.exit_code == 0
    assert result.stdout == _answer("hello", max_tokens=12) + "\n"


def test_several_prompts_are_named() -> None:
    result = _invoke("generate", "fake", "one", "two", "--max-tokens", "5")
    parts = [f"==> {prompt} <==\n{_answer(prompt, max_tokens=5)}\n\n" for prompt in ("one", "two")]
    assert result.stdout == "".join(parts)


def test_json_tells_everything_about_a_completion() -> None:
    (record,) = _records(_invoke("generate", "fake", "hello", "--json", "--max-tokens", "6", "--ignore-eos"))
    assert record["prompt"] == "hello"
    assert record["text"] == _answer("hello", max_tokens=6, ignore_eos=True)
    assert len(record["token_ids"]) == 6
    assert (record["finish_reason"], record["index"]) == ("length", 0)
    assert record["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert record["system_fingerprint"] == "fake"


def test_a_reported_seed_repeats_the_answer() -> None:
    sampled = ("generate", "fake", "hello", "--json", "--temperature", "1", "--n", "2")
    first, second = _records(_invoke(*sampled))
    (again,) = _records(_invoke(*sampled[:-2], "--seed", str(second["seed"])))
    assert again["token_ids"] == second["token_ids"]
    assert first["token_ids"] != second["token_ids"]


def test_prompts_from_a_file_and_from_standard_input(tmp_path: Path) -> None:
    lines = "one\n\n  \ntwo\r\nthree"
    file = tmp_path / "prompts.txt"
    file.write_bytes(lines.encode())
    options = ("--json", "--max-tokens", "3")
    from_file = _records(_invoke("generate", "fake", "--file", str(file), *options))
    dash = _records(_invoke("generate", "fake", "--file", "-", *options, stdin=lines))
    piped = _records(_invoke("generate", "fake", *options, stdin=lines))
    assert [record["prompt"] for record in from_file] == ["one", "two", "three"]
    for records in (dash, piped):
        assert [record["token_ids"] for record in records] == [record["token_ids"] for record in from_file]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\n")
    for args, stdin in ((("--file", str(file)), None), ((), "\ufeffone\n"), (("--file", "-"), "\ufeffone\n")):
        (record,) = _records(_invoke("generate", "fake", *args, "--json", "--max-tokens", "1", stdin=stdin))
        assert record["prompt"] == "one"


def test_chat_applies_the_template() -> None:
    options = ("--chat", "--system", "be kind", "--json", "--max-tokens", "4")
    (record,) = _records(_invoke("generate", "fake", "hi", *options))
    prompt = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert record["prompt"] == "hi"
    assert record["text"] == _answer(prompt, max_tokens=4)


def test_every_sampling_option_arrives() -> None:
    options = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.01,
        "max_tokens": 30,
        "min_tokens": 4,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
    }
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    more = ["--stop", "qq", "--stop", "zz", "--stop-token-ids", "7", "--logit-bias", '{"65": 1.5}']
    (record,) = _records(_invoke("generate", "fake", "hello", "--json", *flags, *more))
    expected = _answer("hello", **options, stop=["qq", "zz"], stop_token_ids=[7], logit_bias={65: 1.5})
    assert record["text"] == expected
    assert record["seed"] == 11


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate",), "Missing argument 'MODEL'"),
        (("generate", "fake"), "no prompt: the input is empty"),
        (("generate", "fake", ""), "no prompt: argument 1 after the model is empty"),
        (("generate", "fake", "a", "", "b", "--chat"), "no prompt: argument 2 after the model is empty"),
        (("generate", "fake", "a", "--file", "-"), "not both"),
        (("generate", "fake", "a", "--system", "s"), "--system needs --chat"),
        (("generate", "fake", "a", "--top-p", "3"), "top_p must be"),
        (("generate", "fake", "a", "--min-tokens", "300"), "min_tokens 300 is above max_tokens 256"),
        (("generate", "fake", "a", "--logit-bias", "x"), "an object such as"),
        (("generate", "fake", "a", "--logit-bias", f'{{"1": 1{"0" * 400}}}'), "an object such as"),
        (("generate", "fake", "a", "--logit-bias", "[" * 60000), "an object such as"),
        (("generate", "fake", "a", "--block-size", "7"), "block_size must be"),
        (("generate", "fake", "a", "--kv-cache-memory", "lots"), "a size such as 4GiB"),
        (("generate", "fake", "a", "--file", "/no/such/file"), "No such file"),
        (("bench", "fake", "--workload", "single", "--input-len", "3"), "leave it or the sizes out"),
        (("bench", "fake", "--num-prompts", "100000000"), "16000000000 tokens; at most 16777216"),
        (("bench", "fake", "--workload", "nothing"), "'nothing' is not one of"),
        (("nothing",), "No such command"),
    ],
)
def test_usage_errors_exit_with_2(args: tuple[str, ...], message: str) -> None:
    result = _invoke(*args, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_failure_is_one_line_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOADPROOF_DEBUG", raising=False)
    assert run(["generate", "fake", "x" * 5000]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("loadproof: the prompt has 5000 tokens; at most 1279 fit")
    assert captured.err.count("\n") == 1
    monkeypatch.setenv("LOADPROOF_DEBUG", "1")
    assert run(["generate", "fake", "x" * 5000]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_refused_prompt_is_named_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n" + "x" * 5000 + "\n")
    assert run(["generate", "fake", "--file", str(file)]) == 1
    expected = f"loadproof: {file}, line 4: prompt 3 of 3: the prompt has 5000 tokens"
    assert capsys.readouterr().err.startswith(expected)
    file.write_text("\n" + "x" * 5000 + "\n")
    assert run(["generate", "fake", "--file", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"loadproof: {file}, line 2: the prompt has 5000 tokens")
    piped = _invoke("generate", "fake", stdin="a\n" + "x" * 5000)
    assert str(piped.exception).startswith("standard input, line 2: prompt 2 of 2: the prompt has 5000")
    assert run(["generate", "fake", "one", "x" * 5000]) == 1
    assert capsys.readouterr().err.startswith("loadproof: prompt 2 of 2: the prompt has 5000 tokens")


def test_no_standard_input_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(click.UsageError, match="no prompt: give one as an argument"):
        cli.main(["generate", "fake"], standalone_mode=False)
    with pytest.raises(click.UsageError, match="standard input is closed"):
        cli.main(["generate", "fake", "--file", "-"], standalone_mode=False)


@pytest.mark.parametrize("command", [("generate", "fake", "a"), ("bench", "fake"), ("pull", "fake")])
def test_no_standard_output_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        code = run(command)
    assert code == 1
    assert "standard output is closed" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loadproof.llm.load_model", interrupted)
    assert run(["generate", "fake", "a"]) == 130


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("loadproof.weights.resolve.resolve_model", lambda name: tmp_path / name)
    write_model(tmp_path / "some-model", "llama")
    result = _invoke("pull", "some-model")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/some-model\n")


def test_pull_of_what_is_no_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert (shown.out, f"{tmp_path} has no config.json" in shown.err) == ("", True)


def test_bench_refuses_what_does_not_fit_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader(limits=small_limits(max_model_len=400)))
    monkeypatch.setattr("loadproof.bench.measure", None)
    assert run(["bench", "fake"]) == 1
    assert "workload prefill makes requests of 1024 + 1 tokens" in capsys.readouterr().err
    assert run(["bench", "fake", "--output-len", "5000"]) == 1
    assert "workload custom makes requests of 32 + 5000 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_bench_reports_its_own_sizes_as_json(repeat: int) -> None:
    sizes = ("--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--repeat", str(repeat))
    result = _invoke("bench", "fake", "--json", *sizes)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (workload,) = report["workloads"]
    assert [workload[key] for key in ("num_prompts", "input_len", "output_len", "repeat")] == [
        3,
        20,
        5,
        repeat,
    ]
    assert len(workload["elapsed_runs"]) == repeat
    assert workload["elapsed"] == statistics.median(workload["elapsed_runs"])
    for kind, count in (("prompt", 60), ("output", 15), ("total", 75)):
        assert workload[f"{kind}_tokens_per_s"] == count / workload["elapsed"]
    assert 0 < workload["ttft"] <= workload["elapsed"]
    assert report["system_fingerprint"] == "fake"


def test_bench_prints_a_table() -> None:
    result = _invoke("bench", "fake", "--workload", "prefill", "--repeat", "1")
    assert result.exit_code == 0, result.output
    assert "8 x 1024 -> 1" in result.stdout


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_help_groups_the_options(command: str) -> None:
    result = _invoke(command, "--help")
    assert result.exit_code == 0
    assert result.stdout.index("\nOptions:") < result.stdout.index("\nEngine:")
    assert "--max-num-batched-tokens" in result.stdout


def test_help_and_version_of_the_whole() -> None:
    assert _invoke("--version").stdout.strip().endswith(__version__)
    listing = _invoke("--help").stdout
    assert all(command in listing for command in ("bench", "generate", "pull"))


SCRIPT = """
import sys
from tests.fake_device import fake_loader, small_limits
import loadproof.llm
from loadproof.cli import main
loadproof.llm.load_model = fake_loader(limits=small_limits(max_model_len=100000, num_blocks=6250))
sys.argv[0] = "loadproof"
main()
"""


def _process(*args: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        # Whoever runs the tests in the background has them ignore interrupts, and children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_process_of_its_own() -> None:
    process = _process("generate", "fake", "hello", "--max-tokens", "12")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert stdout == _answer("hello", max_tokens=12) + "\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    process = _process("generate", "fake", "hello", "--max-tokens", "50000", "--ignore-eos")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


def test_control_c_stops_the_process() -> None:
    process = _process("generate", "fake", "hello", "--max-tokens", "50000", "--ignore-eos")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr

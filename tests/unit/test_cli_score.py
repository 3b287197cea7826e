from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.tiny_models import write_model

from loadproof import LLM
from loadproof.cli import cli

TASKS: list[dict[str, Any]] = [
    {"context": "the rain in", "continuations": [" spain", " the sea"]},
    {"context": [5, 6, 7], "continuations": [[8], " tea"], "id": "kept by the caller"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", "llama"))


def _invoke(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["score", *args, "--num-threads", "1"], input=stdin)


def _records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def _lines() -> str:
    return "\n\r\n".join(map(json.dumps, TASKS)) + "\n"


def test_a_table_of_continuations(model: str) -> None:
    with LLM(model) as llm:
        first, second = llm.score("a dot ", ["on", " \u00e9\n"])
    result = _invoke(model, "--context", "a dot ", "--continuation", "on", "--continuation", " \u00e9\n")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows == [
        ["logprob", "greedy", "tokens", "bytes", "continuation"],
        [f"{first.logprob:.4f}", "no", str(first.num_tokens), "2", '"on"'],
        [f"{second.logprob:.4f}", "no", str(second.num_tokens), "4", '"', '\u00e9\\n"'],
    ]


def test_json_of_a_files_tasks(model: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(_lines())
    from_file = _records(_invoke(model, "--json", "--file", str(file)))
    assert from_file == _records(_invoke(model, "--json", "--file", "-", stdin=_lines()))
    assert [record["context_index"] for record in from_file] == [0, 0, 1, 1]
    with LLM(model) as llm:
        expected = [
            score for task in TASKS for score in llm.score(task["context"], list(task["continuations"]))
        ]
        fingerprint = llm.system_fingerprint
    for record, score in zip(from_file, expected, strict=True):
        task = TASKS[record["context_index"]]
        assert record["context"] == task["context"]
        assert record["continuation"] in task["continuations"]
        assert record["logprob"] == score.logprob
        assert record["is_greedy"] == score.is_greedy
        assert (record["num_tokens"], record["num_bytes"]) == (score.num_tokens, score.num_bytes)
        assert record["token_ids"] == list(score.token_ids)
        assert record["token_logprobs"] == list(score.token_logprobs)
        assert record["system_fingerprint"] == fingerprint


def test_a_byte_order_mark_is_no_part_of_a_task(model: str) -> None:
    marked = _records(_invoke(model, "--json", "--file", "-", stdin=b"\xef\xbb\xbf" + _lines().encode()))
    assert marked == _records(_invoke(model, "--json", "--file", "-", stdin=_lines()))


def test_standard_input_may_be_named_once(model: str) -> None:
    result = _invoke(model, "--perplexity", "-", "-", stdin="a text")
    assert result.exit_code == 2
    assert "standard input may be named once" in result.output


def test_tables_of_a_files_tasks_are_named(model: str) -> None:
    result = _invoke(model, "--file", "-", stdin=_lines())
    headings = [line for line in result.stdout.splitlines() if line.startswith("==>")]
    assert headings == ['==> "the rain in" <==', "==> [5, 6, 7] <=="]


def test_contexts_that_were_cut_are_counted(model: str) -> None:
    task = json.dumps({"context": [5] * 40, "continuations": [[6]]})
    options = ("--file", "-", "--max-model-len", "32")
    refused = _invoke(model, *options, stdin=f"\n{task}")
    assert refused.exit_code == 1
    message = "standard input, line 2: continuation 1: 40 tokens of context and 1 to score; at most 31 fit"
    assert message in str(refused.exception)
    cut = _invoke(model, *options, "--truncate-context", "--json", stdin=task)
    assert json.loads(cut.stdout)["num_dropped"] == 10
    assert cut.stderr == "loadproof: 1 of 1 contexts were cut from the left\n"


def test_perplexity_of_files(model: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_bytes(b"one\r\ntwo\r\n")
    second.write_bytes("\u00e9 three".encode())
    with LLM(model) as llm:
        scores = llm.score_texts(["one\r\ntwo\r\n", "\u00e9 three"])
    options = (model, "--perplexity", str(first), str(second))
    records = _records(_invoke(*options, "--json"))
    for record, score, file in zip(records, scores, (first, second), strict=True):
        assert record["file"] == str(file)
        assert record["logprob"] == score.logprob
        for name in ("num_tokens", "num_words", "num_bytes"):
            assert record[name] == getattr(score, name)
        for name in ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
            assert record[name] == getattr(score, name)
    rows = [line.split() for line in _invoke(*options).stdout.splitlines()]
    assert [row[-1] for row in rows[2:]] == [str(first), str(second), "total"]
    assert [row[1:4] for row in rows[2:]] == [
        [str(count) for count in counts]
        for counts in [
            (scores[0].num_tokens, 2, 10),
            (scores[1].num_tokens, 2, 8),
            (scores[0].num_tokens + scores[1].num_tokens, 4, 18),
        ]
    ]


def test_perplexity_takes_a_window_and_a_stride(model: str) -> None:
    text = "the rain in spain " * 9
    with LLM(model) as llm:
        (score,) = llm.score_texts([text], window=20, stride=5)
    options = ("--perplexity", "-", "--window", "20", "--stride", "5", "--json")
    (record,) = _records(_invoke(model, *options, stdin=text))
    assert (record["file"], record["logprob"]) == ("standard input", score.logprob)


def test_numbers_that_json_lacks_are_null(model: str) -> None:
    (record,) = _records(_invoke(model, "--perplexity", "-", "--json", stdin=" \n"))
    assert record["num_words"] == 0
    assert record["word_perplexity"] is None
    assert record["byte_perplexity"] > 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give --context and --continuation, or --file, or --perplexity FILES"),
        (("--context", "a", "--file", "-"), "give --context and --continuation, or --file"),
        (("--context", "a"), "--context and --continuation need each other"),
        (("--continuation", "a"), "--context and --continuation need each other"),
        (("--perplexity",), "--perplexity needs FILES"),
        (("--perplexity", "-", "--truncate-context"), "not with --perplexity"),
        (("--context", "a", "--continuation", "b", "-"), "FILES need --perplexity"),
        (("--context", "a", "--continuation", "b", "--stride", "3"), "--stride need --perplexity"),
        (("--file", "/nowhere/tasks.jsonl"), "No such file"),
        (("--context", "a", "--continuation", "b", "--block-size", "7"), "block_size"),
    ],
)
def test_wrong_calls(model: str, args: tuple[str, ...], message: str) -> None:
    result = _invoke(model, *args, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "standard input holds no tasks"),
        (b"{", "line 3: not JSON"),
        (b"[" * 100_000, "line 3: not JSON"),
        (b"[]", 'line 3: a task is {"context"'),
        (b'{"context": "a"}', 'line 3: a task is {"context"'),
        (b'{"context": "a", "continuations": "b"}', "line 3: continuations is a list"),
        (b'{"context": "a", "continuations": []}', "line 3: continuations is a list that is not empty"),
        (b'{"context": "a", "continuations": [5]}', "line 3: text or a list of token ids, not 5"),
        (b'{"context": null, "continuations": ["b"]}', "line 3: text or a list of token ids, not None"),
        (b"\xff", "standard input is not UTF-8"),
    ],
)
def test_files_that_are_wrong(model: str, line: bytes, message: str) -> None:
    result = _invoke(model, "--file", "-", stdin=b"\n \n" + line)
    assert result.exit_code == 2
    assert message in result.stderr


def test_errors_of_the_engine_name_the_line_or_the_file(model: str) -> None:
    task = json.dumps({"context": "a", "continuations": [" b", [999]]})
    result = _invoke(model, "--file", "-", stdin=f"{json.dumps(TASKS[0])}\n\n{task}\n")
    assert result.exit_code == 1
    message = "standard input, line 3: context 2 of 2, continuation 2: token id 999"
    assert str(result.exception).startswith(message)
    empty = _invoke(model, "--perplexity", "-", stdin="")
    assert str(empty.exception) == "standard input: text 1 of 1: it is empty"

"""``loadproof score``: how likely continuations are after contexts, and the perplexity of files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from loadproof.commands.files import InputFile
from loadproof.commands.options import GroupedCommand, engine_options, engine_settings

if TYPE_CHECKING:
    from loadproof.llm import LLM
    from loadproof.perplexity import TextScore
    from loadproof.scoring import ContinuationScore, Text

_STANDARD_INPUT = "standard input"


@click.command("score", cls=GroupedCommand)
@click.argument("model")
@click.argument("files", nargs=-1, type=InputFile())
@click.option("--context", help="Text that comes before the continuations; may be empty.")
@click.option("--continuation", "continuations", multiple=True, help="Text to score; may be repeated.")
@click.option(
    "--file",
    "tasks",
    type=InputFile(),
    help='Tasks, one {"context": ..., "continuations": [...]} a line; - is stdin.',
)
@click.option("--perplexity", is_flag=True, help="Score FILES as whole texts; - is stdin.")
@click.option("--window", type=int, help="With --perplexity: tokens that are seen at once.")
@click.option("--stride", type=int, help="With --perplexity: tokens that each window scores; default: most.")
@click.option("--truncate-context", is_flag=True, help="Cut contexts that are too long from the left.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each score.")
@engine_options
def command(
    model: str,
    files: tuple[BinaryIO, ...],
    context: str | None,
    continuations: tuple[str, ...],
    tasks: BinaryIO | None,
    perplexity: bool,
    window: int | None,
    stride: int | None,
    truncate_context: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Print how likely each --continuation is after --context, or those of each line of --file.

    MODEL is a directory, a .gguf file, a hub id or an alias. Log-probabilities are natural and summed over
    a continuation's tokens; a context's trailing white space counts as its continuations'. With
    --perplexity: how well MODEL predicts FILES.
    """
    from loadproof.llm import LLM

    _check_one_kind(perplexity, tasks is not None, context is not None or bool(continuations))
    _check_options(perplexity, files, window, stride, truncate_context)
    settings = engine_settings(values)
    if perplexity:
        texts = [_read(file) for file in files]
        with LLM(model, **settings) as llm, _located([_name(file) for file in files]):
            scores = llm.score_texts(texts, window=window, stride=stride)
            _print_texts([_name(file) for file in files], scores, llm, as_json)
        return
    given = _read_tasks(tasks) if tasks is not None else _given_task(context, continuations)
    with LLM(model, **settings) as llm, _located([task.source for task in given]):
        found = llm.score(
            [task.context for task in given],
            [task.continuations for task in given],
            truncate_context=truncate_context,
        )
        _print_tasks(given, found, llm, as_json)
    num_cut = sum(any(score.num_dropped for score in scores) for scores in found)
    if num_cut:
        click.echo(f"loadproof: {num_cut} of {len(given)} contexts were cut from the left", err=True)


def _check_one_kind(*given: bool) -> None:
    if sum(given) != 1:
        raise click.UsageError("give --context and --continuation, or --file, or --perplexity FILES")


def _check_options(
    perplexity: bool, files: Sequence[BinaryIO], window: int | None, stride: int | None, truncate: bool
) -> None:
    if perplexity and not files:
        raise click.UsageError("--perplexity needs FILES")
    if sum(_name(file) == _STANDARD_INPUT for file in files) > 1:
        raise click.UsageError("standard input may be named once: it can't be read again")
    if perplexity and truncate:
        raise click.UsageError("--truncate-context goes with contexts, not with --perplexity")
    if not perplexity and files:
        raise click.UsageError("FILES need --perplexity")
    if not perplexity and (window is not None or stride is not None):
        raise click.UsageError("--window and --stride need --perplexity")


@dataclass(frozen=True)
class _Task:
    context: Text
    continuations: Sequence[Text]
    source: str  # where it was read, for errors; empty for options


def _given_task(context: str | None, continuations: tuple[str, ...]) -> list[_Task]:
    if context is None or not continuations:
        raise click.UsageError("--context and --continuation need each other")
    return [_Task(context, continuations, "")]


def _read_tasks(file: BinaryIO) -> list[_Task]:
    """The file's tasks; lines that hold nothing but space are passed over."""
    lines = enumerate(_read(file, "utf-8-sig").split("\n"), 1)
    tasks = [_task(line, f"{_name(file)}, line {number}") for number, line in lines if line.strip()]
    if not tasks:
        raise click.UsageError(f"{_name(file)} holds no tasks")
    return tasks


def _task(line: str, source: str) -> _Task:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{source}: not JSON: {error}") from error
    if not isinstance(found, dict) or not {"context", "continuations"} <= found.keys():
        raise click.UsageError(f'{source}: a task is {{"context": ..., "continuations": [...]}}')
    continuations = found["continuations"]
    if not isinstance(continuations, list) or not continuations:
        raise click.UsageError(f"{source}: continuations is a list that is not empty")
    for text in (found["context"], *continuations):
        if not isinstance(text, str | list):
            raise click.UsageError(f"{source}: text or a list of token ids, not {text!r:.100}")
    return _Task(found["context"], continuations, source)


def _read(file: BinaryIO, encoding: str = "utf-8") -> str:
    try:
        with file:
            return file.read().decode(encoding)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{_name(file)} is not UTF-8 text: {error}") from error


def _name(file: BinaryIO) -> str:
    name = str(getattr(file, "name", "-"))
    return _STANDARD_INPUT if name in ("-", "<stdin>") else name


@contextmanager
def _located(sources: list[str]) -> Iterator[None]:
    """Have an error about a task or a text say where it was read."""
    from loadproof.scoring import ScoreError

    try:
        yield
    except ScoreError as error:
        if error.context_index is None or not sources[error.context_index]:
            raise
        raise ScoreError(f"{sources[error.context_index]}: {error}") from error


_SCORE_COLUMNS = ("logprob", "greedy", "tokens", "bytes", "continuation")
_TEXT_COLUMNS = ("logprob", "tokens", "words", "bytes", "by token", "by word", "by byte", "bits/byte", "text")


def _print_tasks(tasks: list[_Task], found: list[list[ContinuationScore]], llm: LLM, as_json: bool) -> None:
    for index, (task, scores) in enumerate(zip(tasks, found, strict=True)):
        pairs = list(zip(task.continuations, scores, strict=True))
        if as_json:
            _print_json(llm, (_record(index, task.context, text, score) for text, score in pairs))
            continue
        if len(tasks) > 1:
            click.echo(f"==> {_shown(task.context)} <==")
        _print_table([_SCORE_COLUMNS, *(_row(text, score) for text, score in pairs)])


def _print_texts(names: list[str], scores: list[TextScore], llm: LLM, as_json: bool) -> None:
    """A row a file; of several, one for all as well."""
    from loadproof.perplexity import total

    if as_json:
        records = zip(names, scores, strict=True)
        _print_json(llm, ({"file": name, **_text_record(score)} for name, score in records))
        return
    rows = [_text_row(name, score) for name, score in zip(names, scores, strict=True)]
    if len(rows) > 1:
        rows.append(_text_row("total", total(scores)))
    click.echo("perplexity by token, word and byte:")
    _print_table([_TEXT_COLUMNS, *rows])


def _row(text: Text, score: ContinuationScore) -> tuple[str, ...]:
    greedy = "yes" if score.is_greedy else "no"
    return (f"{score.logprob:.4f}", greedy, str(score.num_tokens), str(score.num_bytes), _shown(text))


def _text_row(name: str, score: TextScore) -> tuple[str, ...]:
    counts = map(str, (score.num_tokens, score.num_words, score.num_bytes))
    ratios = (score.token_perplexity, score.word_perplexity, score.byte_perplexity, score.bits_per_byte)
    return (f"{score.logprob:.4f}", *counts, *(f"{ratio:.4f}" for ratio in ratios), name)


def _record(index: int, context: Text, text: Text, score: ContinuationScore) -> dict[str, Any]:
    return {
        "context_index": index,
        "context": context,
        "continuation": text,
        "logprob": _finite(score.logprob),
        "is_greedy": score.is_greedy,
        "num_tokens": score.num_tokens,
        "num_bytes": score.num_bytes,
        "num_dropped": score.num_dropped,
        "token_ids": score.token_ids,
        "token_logprobs": [_finite(logprob) for logprob in score.token_logprobs],
    }


def _text_record(score: TextScore) -> dict[str, Any]:
    return {
        "logprob": _finite(score.logprob),
        "num_tokens": score.num_tokens,
        "num_words": score.num_words,
        "num_bytes": score.num_bytes,
        "token_perplexity": _finite(score.token_perplexity),
        "word_perplexity": _finite(score.word_perplexity),
        "byte_perplexity": _finite(score.byte_perplexity),
        "bits_per_byte": _finite(score.bits_per_byte),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


def _print_json(llm: LLM, records: Iterable[dict[str, Any]]) -> None:
    for record in records:
        record["system_fingerprint"] = llm.system_fingerprint
        click.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as they need to be, numbers to the right; the last one is text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]))


def _shown(text: Text) -> str:
    """On one line, with the spaces at its ends visible."""
    return json.dumps(text, ensure_ascii=False)

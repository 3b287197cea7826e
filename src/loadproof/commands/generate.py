"""``loadproof generate``: complete prompts from arguments, a file or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from loadproof.commands.files import InputFile
from loadproof.commands.options import (
    GroupedCommand,
    engine_options,
    engine_settings,
    sampling_options,
    sampling_settings,
    usage_checked,
)
from loadproof.engine.admission import RequestError

if TYPE_CHECKING:
    from loadproof.engine.output import RequestOutput
    from loadproof.engine.prompts import Prompt
    from loadproof.engine.sampling_params import SamplingParams
    from loadproof.llm import LLM

# Where neither the command line nor the model says otherwise; greedy, as such models are meant to be run.
_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}


@click.command("generate", cls=GroupedCommand)
@click.argument("model")
@click.argument("prompts", nargs=-1)
@click.option(
    "--file", "file", type=InputFile("r", encoding="utf-8-sig"), help="Prompts, one a line; - is stdin."
)
@click.option(
    "--chat", is_flag=True, help="Apply the model's chat template; each prompt is a user's message."
)
@click.option("--system", help="System message of each chat.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each completion.")
@sampling_options
@engine_options
def command(
    model: str,
    prompts: tuple[str, ...],
    file: TextIO | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Complete PROMPTS, or those of --file, or those piped in, one a line.

    MODEL is a directory, a .gguf file, a hub id or an alias. A single prompt streams to the terminal;
    several are completed together.
    """
    from loadproof.engine.sampling_params import SamplingParams
    from loadproof.llm import LLM

    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    given_prompts = _read_prompts(prompts, file)
    texts = given_prompts.texts
    given = sampling_settings(values)
    usage_checked(lambda: SamplingParams(**{**_DEFAULTS, **given}))
    with LLM(model, **engine_settings(values)) as llm, given_prompts.located():
        params = SamplingParams(**{**_DEFAULTS, **llm.recommended_sampling(), **given})
        ready = [_prompt(llm, text, chat, system) for text in texts]
        if as_json:
            _print_json(llm, texts, ready, params)
        elif len(ready) == 1 and params.n == 1:
            _print_stream(llm, ready[0], params)
        else:
            _print_texts(llm, texts, ready, params)


@dataclass(frozen=True)
class _Prompts:
    texts: list[str]
    lines: list[int]  # where each stands in ``source``; empty for arguments
    source: str

    @contextmanager
    def located(self) -> Iterator[None]:
        """Have an error about a prompt that was read say on which line it stands."""
        try:
            yield
        except RequestError as error:
            if error.prompt_index is None or not self.lines:
                raise
            line = self.lines[error.prompt_index]
            raise RequestError(f"{self.source}, line {line}: {error}") from error


def _read_prompts(prompts: tuple[str, ...], file: TextIO | None) -> _Prompts:
    """Prompts from where they were given; lines that hold nothing but space are passed over."""
    if prompts and file is not None:
        raise click.UsageError("give prompts as arguments or by --file, not both")
    if prompts:
        if "" in prompts:
            raise click.UsageError(f"no prompt: argument {prompts.index('') + 1} after the model is empty")
        return _Prompts(list(prompts), [], "")
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("no prompt: give one as an argument, by --file or on standard input")
    try:
        with file or click.open_file("-", encoding="utf-8-sig") as stream:
            lines = {number: line.rstrip("\r\n") for number, line in enumerate(stream, 1) if line.strip()}
    except UnicodeDecodeError as error:
        raise click.UsageError(f"prompts are UTF-8 text: {error}") from error
    if not lines:
        raise click.UsageError("no prompt: the input is empty")
    return _Prompts(list(lines.values()), list(lines), _source_name(file))


def _source_name(file: TextIO | None) -> str:
    name = "-" if file is None else getattr(file, "name", "-")
    return "standard input" if name in ("-", "<stdin>") else str(name)


def _prompt(llm: LLM, text: str, chat: bool, system: str | None) -> Prompt:
    if not chat:
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    for delta in llm.stream(prompt, params):
        click.echo(delta.text, nl=False)
    click.echo()


def _print_texts(llm: LLM, texts: list[str], prompts: list[Prompt], params: SamplingParams) -> None:
    """Each completion under a line that names its prompt, as ``head`` and ``tail`` name files."""
    for text, output in zip(texts, llm.generate(prompts, params), strict=True):
        for completion in output.outputs:
            click.echo(f"==> {text} <==\n{completion.text}\n")


def _print_json(llm: LLM, texts: list[str], prompts: list[Prompt], params: SamplingParams) -> None:
    for text, output in zip(texts, llm.generate(prompts, params), strict=True):
        for record in _records(text, output, llm.system_fingerprint):
            click.echo(json.dumps(record, ensure_ascii=False))


def _records(text: str, output: RequestOutput, fingerprint: str) -> Iterator[dict[str, Any]]:
    num_prompt = len(output.prompt_token_ids)
    for completion in output.outputs:
        num_output = len(completion.token_ids)
        yield {
            "prompt": text,
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "seed": completion.seed,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
            },
            "system_fingerprint": fingerprint,
        }

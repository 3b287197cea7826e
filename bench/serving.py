"""How fast a server serves: requests and tokens a second, time to first token, and time between tokens.

Drives any OpenAI-compatible ``/v1/completions`` with so many connections at a time, each asking one thing
after the other: streamed, greedy, all of one length, the prompts token ids that no two requests share.
``--generate`` completes the same prompts by ``LLM.generate`` in this process as well, for the ratio; with
``--repeats`` server and ``LLM.generate`` take turns. Figures are medians, ratios are formed within each turn.

    python bench/serving.py http://127.0.0.1:8000 [--connections 1,16,64] [--generate smollm2-135m]
                            [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any
from urllib.parse import SplitResult, urlsplit

import uvloop
from rich.console import Console
from rich.table import Table

from loadproof.bench import Workload, random_prompts

_VOCAB_SIZE = 1 << 30  # the prompts' own range fits any common vocabulary
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class ServingError(RuntimeError):
    """A server that doesn't answer as it should."""


@dataclass(frozen=True)
class Server:
    """Where to send requests."""

    url: SplitResult
    model: str | None
    api_key: str | None

    def request(self, body: dict[str, Any]) -> bytes:
        """The bytes of a request to complete something."""
        content = json.dumps(body).encode()
        path = self.url.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"POST {path}/v1/completions HTTP/1.1",
            f"host: {self.url.netloc}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            *([f"authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass(frozen=True)
class Answer:
    """Times since the request was sent, in seconds."""

    first: float
    gaps: list[float]  # between the events that bring text
    total: float
    num_tokens: int


@dataclass(frozen=True)
class Level:
    """What so many connections got. Times are in seconds."""

    connections: int
    requests: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_median: float
    ttft_p99: float
    itl_median: float | None
    itl_p99: float | None


@dataclass(frozen=True)
class Turns:
    """So many connections, measured again and again, and in turn tokens a second of ``LLM.generate``."""

    levels: list[Level]
    generate_tokens_per_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Served tokens a second as a share of what ``LLM.generate`` makes, by turn."""
        pairs = zip(self.levels, self.generate_tokens_per_s, strict=False)
        return [level.output_tokens_per_s / made for level, made in pairs]

    def median(self, name: str) -> float | None:
        """The median of a level's field; None where there is none."""
        values = [getattr(level, name) for level in self.levels]
        return None if None in values else statistics.median(values)

    def as_json(self) -> dict[str, Any]:
        """The medians, and what each turn gave."""
        medians = {one.name: self.median(one.name) for one in fields(Level)}
        return {**medians, "ratios": self.ratios, **asdict(self)}


@dataclass
class Transcript:
    """What came of an answer and when, as it came: it is read when nothing is measured any more."""

    start: float
    pieces: list[tuple[float, bytes]]

    def answer(self, output_len: int) -> Answer:
        """The times; raises :class:`ServingError` for an error, or other than so many tokens."""
        times, num_tokens = [], 0
        for moment, event in self._events():
            if event.get("choices"):
                times.append(moment - self.start)
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if "error" in event:
                raise ServingError(f"an error in the stream: {event['error']}")
        if num_tokens != output_len or not times:
            raise ServingError(f"{num_tokens} tokens of {output_len}")
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Answer(times[0], gaps, self.pieces[-1][0] - self.start, num_tokens)

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Events, each with the moment at which its chunk was there."""
        whole = b"".join(piece for _, piece in self.pieces)
        head, _, body = whole.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        if " 200" not in lines[0]:
            raise ServingError(f"{lines[0]}: {body[:500].decode(errors='replace')}")
        if "transfer-encoding: chunked" not in lines:
            raise ServingError("the answer is no stream")
        if not whole.endswith(_LAST_CHUNK):
            raise ServingError("the stream was cut off")
        ends = list(itertools.accumulate(len(piece) for _, piece in self.pieces))
        at, rest = len(head) + 4, b""
        while size := int(whole[at : (begin := whole.index(b"\r\n", at) + 2)].partition(b";")[0], 16):
            at = begin + size + 2
            moment = self.pieces[bisect_left(ends, at)][0]
            *events, rest = (rest + whole[begin : begin + size]).split(b"\n")
            for event in events:
                if event.startswith(b"data: {"):
                    yield moment, json.loads(event[6:])


class Connection(asyncio.Protocol):
    """One connection to a server, for one request after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._pieces: list[tuple[float, bytes]] = []
        self._end: asyncio.Future[None] | None = None

    async def complete(self, prompt: Sequence[int], output_len: int) -> Transcript:
        """Ask to complete a prompt to just so many tokens, and wait for the end."""
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = self._server.request({name: value for name, value in body.items() if value is not None})
        start = time.perf_counter()
        kept = self._transport is not None
        try:
            await self._ask(request)
        except ConnectionError:
            if not kept or self._pieces:
                raise
            await self._ask(request)  # the server had closed a connection that was idle
        return Transcript(start, self._pieces)

    async def _ask(self, request: bytes) -> None:
        self._pieces = []
        loop = asyncio.get_running_loop()
        if self._transport is None:
            url = self._server.url
            tls = url.scheme == "https"
            port = url.port or (443 if tls else 80)
            self._transport, _ = await loop.create_connection(
                lambda: self, str(url.hostname), port, ssl=tls or None
            )
        self._end = loop.create_future()
        self._transport.write(request)
        await self._end

    def data_received(self, data: bytes) -> None:
        """Keep what came; the last chunk ends a stream, and whatever is none ends at once."""
        self._pieces.append((time.perf_counter(), data))
        tail = data if len(data) >= len(_LAST_CHUNK) else b"".join(piece for _, piece in self._pieces[-8:])
        over = tail.endswith(_LAST_CHUNK) or (len(self._pieces) == 1 and b"chunked" not in data.lower())
        if over and self._end is not None and not self._end.done():
            self._end.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is not over ends here: a stream with an error, any other one with what there is."""
        self._transport = None
        if self._end is not None and not self._end.done():
            if self._pieces:
                self._end.set_result(None)
            else:
                self._end.set_exception(ConnectionResetError("the server closed the connection"))

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


async def measure(
    server: Server, prompts: Sequence[Sequence[int]], output_len: int, connections: int
) -> Level:
    """Complete all prompts, so many at a time."""
    waiting, transcripts = iter(prompts), []

    async def client() -> None:
        connection = Connection(server)
        for prompt in waiting:
            transcripts.append(await connection.complete(prompt, output_len))
        connection.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    elapsed = time.perf_counter() - start
    return level([one.answer(output_len) for one in transcripts], connections, elapsed)


def level(answers: Sequence[Answer], connections: int, elapsed: float) -> Level:
    """The figures of a run that took ``elapsed`` seconds."""
    firsts = [answer.first for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return Level(
        connections=connections,
        requests=len(answers),
        requests_per_s=len(answers) / elapsed,
        output_tokens_per_s=sum(answer.num_tokens for answer in answers) / elapsed,
        ttft_median=statistics.median(firsts),
        ttft_p99=percentile(firsts, 0.99),
        itl_median=statistics.median(gaps) if gaps else None,
        itl_p99=percentile(gaps, 0.99) if gaps else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that ``share`` of all are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def generate(model: str, prompts: list[list[int]], output_len: int, connections: int) -> float:
    """Output tokens a second of ``LLM.generate`` with all prompts, as many at a time."""
    from loadproof import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    with LLM(model, max_num_seqs=connections) as llm:
        llm.generate([prompt[:8] for prompt in prompts[:2]], params, use_tqdm=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return len(prompts) * output_len / (time.perf_counter() - start)


def table(measured: Sequence[Turns]) -> Table:
    """For people; milliseconds where times are."""
    made = Table()
    names = ("connections", "requests/s", "tokens/s", "ttft ms", "p99", "itl ms", "p99", "generate", "ratio")
    for name in names:
        made.add_column(name, justify="right")
    for turns in measured:
        times = [turns.median(name) for name in ("ttft_median", "ttft_p99", "itl_median", "itl_p99")]
        made.add_row(
            str(turns.levels[0].connections),
            f"{turns.median('requests_per_s'):.2f}",
            f"{turns.median('output_tokens_per_s'):.1f}",
            *("-" if seconds is None else f"{seconds * 1000:.1f}" for seconds in times),
            _spread(turns.generate_tokens_per_s, ".1f"),
            _spread(turns.ratios, ".3f"),
        )
    return made


def _spread(values: Sequence[float], form: str) -> str:
    """The median and, of several, the least and the largest."""
    if not values:
        return "-"
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{ends}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a server is asked: so many requests of each connection, and not fewer than some in all."""

    connections: int
    seed: int = 0
    rounds: int = 2
    least_requests: int = 8
    input_len: int = 128
    output_len: int = 128

    def prompts(self) -> list[list[int]]:
        """A prompt of each request."""
        return self._drawn(max(self.least_requests, self.rounds * self.connections), 0)

    def warm_up(self) -> list[list[int]]:
        """Two others, to be asked before."""
        return self._drawn(2, 1)

    def _drawn(self, count: int, which: int) -> list[list[int]]:
        workload = Workload("serving", count, self.input_len, self.output_len)
        return random_prompts(workload, _VOCAB_SIZE, 2 * (10_000 * self.seed + self.connections) + which)


_SIZES = {one.name: one.default for one in fields(Load) if one.default is not MISSING}


def measure_load(server: Server, load: Load) -> Level:
    """Put a load on a server, after a short warm-up; raises :class:`ServingError`."""
    uvloop.run(measure(server, load.warm_up(), 4, 2))
    return uvloop.run(measure(server, load.prompts(), load.output_len, load.connections))


def run(args: argparse.Namespace) -> list[Turns]:
    """All levels of connections, beside ``LLM.generate`` where it is asked for; each turn has its prompts."""
    server = Server(urlsplit(args.url), args.model, args.api_key)
    measured = []
    for connections in args.connections:
        turns = Turns([], [])
        for turn in range(args.repeats):
            sizes = {name: getattr(args, name) for name in _SIZES} | {"seed": args.seed + turn}
            load = Load(connections=connections, **sizes)
            turns.levels.append(measure_load(server, load))
            if args.generate:
                made = generate(args.generate, load.prompts(), load.output_len, connections)
                turns.generate_tokens_per_s.append(made)
        measured.append(turns)
    return measured


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", help="the name that the server knows it by, where it wants one")
    parser.add_argument("--api-key")
    parser.add_argument("--connections", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", type=int, help="requests of each connection")
    for name in ("--least-requests", "--input-len", "--output-len", "--seed"):
        parser.add_argument(name, type=int)
    parser.add_argument("--repeats", type=int, default=1, help="turns of each level (1)")
    parser.add_argument("--generate", metavar="MODEL", help="complete the prompts by LLM.generate too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(connections=[1, 16, 64], **_SIZES)
    return parser.parse_args()


def main() -> int:
    """See the module."""
    args = parse()
    try:
        measured = run(args)
    except (ServingError, OSError) as error:
        print(f"{args.url}: {error}", file=sys.stderr)
        return 1
    if args.json:
        sizes = {"input_len": args.input_len, "output_len": args.output_len, "url": args.url}
        print(json.dumps({**sizes, "levels": [turns.as_json() for turns in measured]}, indent=2))
    else:
        Console(width=110).print(table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Figures of a comparison: medians, extremes and ratios, as a JSON object and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines import OURS
from rich.table import Table

from loadproof.bench import Workload
from loadproof.floors import Floor

START = "start"


@dataclass(frozen=True)
class Row:
    """Seconds of every round by engine, on one workload; None is the start to the first token."""

    workload: Workload | None
    floor: Floor | None
    product_floor: Floor | None  # at the rate of the linear kernel instead of its instruction
    seconds: Mapping[str, Sequence[float]]

    @property
    def name(self) -> str:
        """Name of the workload."""
        return START if self.workload is None else self.workload.name

    @property
    def tokens(self) -> int:
        """Tokens that a rate counts: prompt tokens if there is one output token a prompt, else outputs."""
        assert self.workload is not None
        each = self.workload.input_len if self.workload.output_len == 1 else self.workload.output_len
        return self.workload.num_prompts * each

    def figure(self, seconds: float) -> float:
        """What is shown for a time: the rate, or the time itself for a start."""
        return seconds if self.workload is None else self.tokens / seconds

    def ratios(self, peer: str) -> list[float]:
        """How many times as fast as a peer loadproof was, by round."""
        return [theirs / ours for ours, theirs in zip(self.seconds[OURS], self.seconds[peer], strict=True)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def as_json(row: Row) -> dict[str, Any]:
    """One workload's figures: rates in tokens a second (a start: seconds), their ratios and shares."""
    found: dict[str, Any] = {
        "workload": row.name,
        "unit": "s" if row.workload is None else "tokens/s",
        "engines": {
            name: {**summary([row.figure(s) for s in seconds]), "seconds": list(seconds)}
            for name, seconds in row.seconds.items()
        },
    }
    if OURS in row.seconds:
        peers = [name for name in row.seconds if name != OURS]
        found["ratios"] = {peer: {**summary(row.ratios(peer)), "rounds": row.ratios(peer)} for peer in peers}
    if row.workload is not None and row.floor is not None and row.product_floor is not None:
        w = row.workload
        found["sizes"] = {"num_prompts": w.num_prompts, "input_len": w.input_len, "output_len": w.output_len}
        found["floor"] = {"rate": row.figure(row.floor.seconds), **asdict(row.floor)}
        found["floor_at_product_rate"] = {
            "rate": row.figure(row.product_floor.seconds),
            **asdict(row.product_floor),
        }
        for engine in found["engines"].values():
            engine["share_of_floor"] = engine["median"] / found["floor"]["rate"]
    return found


def as_table(workloads: Sequence[Mapping[str, Any]], engines: Sequence[str]) -> Table:
    """The table of :func:`as_json` rows: medians with the least and largest below."""
    table = Table(title="tokens/s (start: seconds), median of rounds, least to largest")
    for heading in ("workload", "floor", *engines):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for peer in engines:
        if peer != OURS and OURS in engines:
            table.add_column(f"{OURS} / {peer}", justify="right")
    for found in workloads:
        table.add_row(*_cells(found, engines))
    return table


def _cells(found: Mapping[str, Any], engines: Sequence[str]) -> list[str]:
    plain: Callable[[float], str] = (
        (lambda v: f"{v:.2f} s") if found["unit"] == "s" else (lambda v: f"{v:.0f}")
    )
    floor = found.get("floor")
    cells = [_title(found), _floors(found, plain)]
    for name in engines:
        if name not in found["engines"]:
            cells.append("")
            continue
        engine = found["engines"][name]
        share = f"{engine['share_of_floor']:.0%} of the floor" if floor else ""
        cells.append("\n".join(line for line in (_spread(engine, plain), share) if line))
    ratios = found.get("ratios", {})
    for name in engines:
        if name != OURS and OURS in engines:
            cells.append(_spread(ratios[name], lambda v: f"{v:.2f}x") if name in ratios else "")
    return cells


def _floors(found: Mapping[str, Any], plain: Callable[[float], str]) -> str:
    if "floor" not in found:
        return ""
    hard, soft = plain(found["floor"]["rate"]), plain(found["floor_at_product_rate"]["rate"])
    return hard if hard == soft else f"{hard}\n{soft} at product rate"


def _title(found: Mapping[str, Any]) -> str:
    sizes = found.get("sizes")
    if sizes is None:
        return f"{found['workload']}\nto first token"
    return f"{found['workload']}\n{sizes['num_prompts']} x {sizes['input_len']} -> {sizes['output_len']}"


def _spread(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    return f"{text(values['median'])}\n{text(values['min'])} to {text(values['max'])}"

"""The graph's methods refuse parts that do not fit together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadproof.graph import Graph, Param, RopeSpec, Value

TABLE = Param("table", (10, 8))


def started() -> tuple[Graph, Value]:
    graph = Graph(vocab_size=10, max_position_embeddings=32)
    return graph, graph.embed(TABLE)


def attend(graph: Graph, x: Value, **changes: int | float | None) -> Value:
    settings: dict[str, int | float | None] = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "scale": 0.5}
    return graph.attention(x, x, x, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x: g.embed(TABLE), "first op"),
        (lambda g, x: g.linear(x, Param("w", (3, 7))), "does not take inputs of width 8"),
        (lambda g, x: g.linear(x, Param("w", (3, 8)), Param("b", (8,))), r"b: \(8,\) is not \(3,\)"),
        (lambda g, x: g.rms_norm(x, Param("n", (4,)), 1e-5), r"n: \(4,\) is not \(8,\)"),
        (lambda g, x: g.rms_norm(x, Param("n", (3,)), 1e-5, group=3), "not a multiple of 3"),
        (lambda g, x: g.rope(x, RopeSpec(3, 1e4)), "even head_dim"),
        (lambda g, x: g.rope(x, RopeSpec(6, 1e4)), "not a multiple of 6"),
        (lambda g, x: attend(g, x, num_kv_heads=0), "2 heads on 0"),
        (lambda g, x: attend(g, x, num_heads=3), "3 heads on 2"),
        (lambda g, x: attend(g, x, num_heads=4), "queries of width 8"),
        (lambda g, x: attend(g, x, num_kv_heads=1), "keys of width 8"),
        (lambda g, x: attend(g, x, window=0), "window of 0"),
        (lambda g, x: attend(g, x, softcap=0.0), "softcap of 0"),
        (lambda g, x: g.gated_mul(x, g.linear(x, Param("w", (4, 8)))), "gate of width 8, up of 4"),
        (lambda g, x: g.add(x, g.linear(x, Param("w", (4, 8)))), "widths 8 and 4"),
        (lambda g, x: g.logits(x, Param("head", (9, 8))), r"head: \(9, 8\) is not \(10, 8\)"),
        (lambda g, x: g.logits(x, TABLE, softcap=-1.0), "softcap of -1"),
        (lambda g, x: g.finish(), "ends with its logits"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(build: Callable[[Graph, Value], object], message: str) -> None:
    graph, x = started()
    with pytest.raises(ValueError, match=message):
        build(graph, x)


def test_an_embedding_needs_a_row_for_each_token() -> None:
    with pytest.raises(ValueError, match="one row per token"):
        Graph(vocab_size=11, max_position_embeddings=32).embed(TABLE)


def test_nothing_follows_the_logits() -> None:
    graph, x = started()
    graph.logits(x, TABLE)
    with pytest.raises(ValueError, match="no op may follow"):
        graph.add(x, x)


def test_attention_numbers_its_layers_and_params_are_listed_once() -> None:
    graph, x = started()
    for _ in range(3):
        x = attend(graph, graph.linear(x, Param("w", (8, 8)), Param("b", (8,))))
    graph.logits(x, TABLE)
    assert graph.finish() is graph
    assert graph.num_layers == 3
    assert [getattr(op, "layer", None) for op in graph.ops if hasattr(op, "layer")] == [0, 1, 2]
    assert set(graph.params) == {"table", "w", "b"}

"""From graphs to the native plan's steps, and the graphs that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.tiny_models import TINY, TinyModel

from loadproof.devices.lowering import (
    AttentionStep,
    LinearStep,
    LoweredGraph,
    NormStep,
    QkvStep,
    Step,
    UnsupportedGraphError,
    biases,
    lower,
    param_columns,
)
from loadproof.graph import Graph, Param, RopeSpec, Value

EVERY = pytest.mark.parametrize("model", TINY.values(), ids=TINY.keys())

PLAIN = ["norm", "qkv", "heads", "attention", "project+", "norm", "gated", "project+"]
# Gemma norms what a block adds as well, before it is added.
SANDWICH = [
    *("norm", "qkv", "heads", "attention", "project", "norm+"),
    *("norm", "gated", "project", "norm+"),
]


def kind(step: Step) -> str:
    match step:
        case NormStep():
            names = {"BF16": "norm", "ADD": "norm+", "FLOAT": "norm in place"}
            return names[step.output]
        case LinearStep(target="QKV"):
            return "qkv"
        case LinearStep(epilogue="GATED"):
            return "gated"
        case LinearStep():
            return "project+" if step.epilogue == "ADD" else "project"
        case QkvStep():
            return "heads"
        case AttentionStep():
            return "attention"


@EVERY
def test_a_layer_is_so_many_steps(model: TinyModel) -> None:
    lowered = lower(model.graph)
    layer = SANDWICH if model.name.startswith("gemma3") else PLAIN
    assert [kind(step) for step in lowered.steps] == layer * model.graph.num_layers


@EVERY
def test_every_tensor_is_lowered_once_for_each_use(model: TinyModel) -> None:
    lowered = lower(model.graph)
    assert sorted(params_of(lowered)) == sorted(
        part.name
        for op in model.graph.ops
        for part in (getattr(op, "weight", None), getattr(op, "bias", None))
        if isinstance(part, Param)
    )


def params_of(lowered: LoweredGraph) -> list[str]:
    params: list[Param | None] = [
        lowered.embed.weight,
        lowered.output_norm.weight,
        lowered.logits.weight,
    ]
    for step in lowered.steps:
        match step:
            case NormStep():
                params.append(step.norm.weight)
            case LinearStep():
                params += [layer.weight for layer in step.layers]
                params += biases(step.layers)
            case QkvStep():
                params += [norm.weight for norm in (step.q_norm, step.k_norm) if norm]
            case AttentionStep():
                pass
    return [param.name for param in params if param is not None]


@EVERY
def test_each_step_reads_what_the_last_one_wrote(model: TinyModel) -> None:
    """Buffers hold one thing at a time, so a step may read only what is there."""
    written = {"RESIDUAL"}
    for step in lower(model.graph).steps:
        match step:
            case NormStep() | LinearStep():
                assert step.source in written
                written.add(step.target)
                if step.target == "RESIDUAL":
                    written = {"RESIDUAL"}
            case QkvStep():
                assert "QKV" in written
            case AttentionStep():
                written.add("ATTENDED")


def test_columns_of_layers_side_by_side() -> None:
    (qkv, *_) = (step for step in lower(TINY["llama"].graph).steps if kind(step) == "qkv")
    assert isinstance(qkv, LinearStep)
    assert [layer.weight.shape for layer in qkv.layers] == [(64, 64), (32, 64), (32, 64)]
    assert param_columns(qkv.layers) == 128
    assert biases(qkv.layers) == (None, None, None)


WIDTH, HEAD, VOCAB = 32, 16, 64
ROPE = RopeSpec(HEAD, 10000.0)


class Block:
    """Parts of a small graph of one layer, each test with one of them another way."""

    def __init__(self) -> None:
        self.graph = Graph(VOCAB, 128)
        self.x = self.graph.embed(Param("embed", (VOCAB, WIDTH)))

    def linear(self, x: Value, name: str, out: int = WIDTH) -> Value:
        return self.graph.linear(x, Param(name, (out, x.width)))

    def norm(self, x: Value, name: str, group: int | None = None, eps: float = 1e-5) -> Value:
        return self.graph.rms_norm(x, Param(name, (group or x.width,)), eps, group=group)

    def heads(self) -> tuple[Value, Value, Value]:
        normed = self.norm(self.x, "norm")
        return self.linear(normed, "q"), self.linear(normed, "k"), self.linear(normed, "v")

    def attend(self, q: Value, k: Value, v: Value) -> Value:
        return self.graph.attention(q, k, v, num_heads=2, num_kv_heads=2, head_dim=HEAD, scale=0.25)

    def add_attention(self) -> None:
        self.x = self.graph.add(self.x, self.linear(self.attend(*self.heads()), "o"))

    def end(self, x: Value | None = None) -> Graph:
        last = self.norm(self.x, "last") if x is None else x
        self.graph.logits(last, Param("head", (VOCAB, WIDTH)))
        return self.graph.finish()


def test_a_block_of_the_right_shape_is_lowered() -> None:
    block = Block()
    block.add_attention()
    assert [kind(step) for step in lower(block.end()).steps] == PLAIN[:5]


def test_attention_and_gate_may_stand_side_by_side() -> None:
    block = Block()
    normed = block.norm(block.x, "norm")
    attended = block.attend(*(block.linear(normed, name) for name in "qkv"))
    gate = block.graph.gated_mul(block.linear(normed, "gate"), block.linear(normed, "up"))
    for branch, name in ((attended, "o"), (gate, "down")):
        block.x = block.graph.add(block.x, block.linear(branch, name))
    kinds = [kind(step) for step in lower(block.end()).steps]
    assert kinds == ["norm", "qkv", "heads", "attention", "gated", "project+", "project+"]


def logits_without_a_norm(block: Block) -> Graph:
    return block.end(block.linear(block.norm(block.x, "norm"), "extra"))


def output_norm_of_an_older_residual(block: Block) -> Graph:
    first = block.x
    block.add_attention()
    return block.end(block.norm(first, "last"))


def addition_of_an_activation_alone(block: Block) -> Graph:
    block.x = block.graph.add(block.x, block.attend(*block.heads()))
    return block.end()


def addition_to_an_older_residual(block: Block) -> Graph:
    first = block.x
    block.add_attention()
    normed = block.norm(block.x, "norm2")
    gate = block.graph.gated_mul(block.linear(normed, "gate"), block.linear(normed, "up"))
    block.x = block.graph.add(first, block.linear(gate, "down"))
    return block.end()


def addition_of_a_projected_norm(block: Block) -> Graph:
    block.x = block.graph.add(block.x, block.linear(block.norm(block.x, "norm"), "o"))
    return block.end()


def projection_of_an_older_block(block: Block) -> Graph:
    normed = block.norm(block.x, "norm")
    blocks = [block.attend(*(block.linear(normed, f"{name}{i}") for name in "qkv")) for i in range(2)]
    for i, attended in enumerate(blocks):
        block.x = block.graph.add(block.x, block.linear(attended, f"o{i}"))
    return block.end()


def addition_of_a_norm_by_head(block: Block) -> Graph:
    out = block.linear(block.attend(*block.heads()), "o")
    block.x = block.graph.add(block.x, block.norm(out, "post", HEAD))
    return block.end()


def heads_of_two_norms(block: Block) -> Graph:
    q, k, _ = block.heads()
    v = block.linear(block.norm(block.x, "other"), "v2")
    block.x = block.graph.add(block.x, block.linear(block.attend(q, k, v), "o"))
    return block.end()


def heads_without_a_norm(block: Block) -> Graph:
    q, k, v = (block.linear(block.x, name) for name in "qkv")
    block.x = block.graph.add(block.x, block.linear(block.attend(q, k, v), "o"))
    return block.end()


def rotated_queries_alone(block: Block) -> Graph:
    q, k, v = block.heads()
    block.x = block.graph.add(block.x, block.linear(block.attend(block.graph.rope(q, ROPE), k, v), "o"))
    return block.end()


def rotation_before_the_norm(block: Block) -> Graph:
    q, k, v = block.heads()
    q, k = (block.norm(block.graph.rope(x, ROPE), name, HEAD) for x, name in ((q, "qn"), (k, "kn")))
    block.x = block.graph.add(block.x, block.linear(block.attend(q, k, v), "o"))
    return block.end()


def rotated_values(block: Block) -> Graph:
    q, k, v = block.heads()
    block.x = block.graph.add(block.x, block.linear(block.attend(q, k, block.graph.rope(v, ROPE)), "o"))
    return block.end()


def queries_normed_over_the_row(block: Block) -> Graph:
    q, k, v = block.heads()
    block.x = block.graph.add(block.x, block.linear(block.attend(block.norm(q, "qn"), k, v), "o"))
    return block.end()


def head_norms_that_differ(block: Block) -> Graph:
    q, k, v = block.heads()
    q, k = block.norm(q, "qn", HEAD), block.norm(k, "kn", HEAD, eps=1e-3)
    block.x = block.graph.add(block.x, block.linear(block.attend(q, k, v), "o"))
    return block.end()


def gates_that_are_not_linear(block: Block) -> Graph:
    normed = block.norm(block.x, "norm")
    gate = block.graph.gated_mul(normed, block.linear(normed, "up"))
    block.x = block.graph.add(block.x, block.linear(gate, "down"))
    return block.end()


REFUSED: dict[Callable[[Block], Graph], str] = {
    logits_without_a_norm: "logits follow a norm",
    output_norm_of_an_older_residual: "does not read the residual stream",
    addition_of_an_activation_alone: "Attention where a linear layer is expected",
    addition_to_an_older_residual: "does not read the residual stream",
    addition_of_a_projected_norm: "does not read the latest block",
    projection_of_an_older_block: "does not read the latest block",
    addition_of_a_norm_by_head: "over the whole row",
    heads_of_two_norms: "have one input",
    heads_without_a_norm: "starts with a norm",
    rotated_queries_alone: "rotate alike",
    rotation_before_the_norm: "linear, then normed, then rotated",
    rotated_values: "Rope where a linear layer is expected",
    queries_normed_over_the_row: "normed by head",
    head_norms_that_differ: "agree in eps and offset",
    gates_that_are_not_linear: "RmsNorm where a linear layer is expected",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_a_graph_of_another_shape_is_refused(build: Callable[[Block], Graph]) -> None:
    with pytest.raises(UnsupportedGraphError, match=REFUSED[build]):
        lower(build(Block()))


def test_an_unfinished_graph_is_refused() -> None:
    block = Block()
    with pytest.raises(UnsupportedGraphError, match="ends with its logits"):
        lower(block.graph)
    with pytest.raises(UnsupportedGraphError, match="it is empty"):
        lower(Graph(VOCAB, 128))

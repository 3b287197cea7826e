from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tests.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    tiny_metadata,
    tiny_tensors,
    write_gguf,
    write_tiny,
)

from loadproof.weights.checkpoint import Checkpoint, open_checkpoint
from loadproof.weights.gguf_names import ARCHITECTURES
from loadproof.weights.tensors import WeightsError

F32 = npt.NDArray[np.float32]
Tensors = dict[str, npt.NDArray[Any]]


def converted(rows: F32, heads: int) -> F32:
    """What the converter does to a llama's query and key rows: halves of each head interleaved."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def opened(path: Path, arch: str, tensors: Tensors, **types: int) -> Checkpoint:
    return open_checkpoint(write_gguf(path, arch, tiny_metadata(arch), tensors, **types))


def layer_tensors(shapes: dict[str, int]) -> dict[str, F32]:
    rng = np.random.default_rng(5)
    return {
        f"blk.{layer}.{name}": rng.standard_normal(size).astype(np.float32)
        for layer in range(LAYERS)
        for name, size in shapes.items()
    }


def test_llama_names_and_row_order(tmp_path: Path) -> None:
    plain = tiny_tensors() | layer_tensors(
        {"attn_q.bias": HEADS * HEAD_DIM, "attn_k.bias": KV_HEADS * HEAD_DIM}
    )
    plain["output.weight"] = plain["token_embd.weight"] + 1
    stored = {
        name: converted(tensor, HEADS if ".attn_q." in name else KV_HEADS)
        if ".attn_q." in name or ".attn_k." in name
        else tensor
        for name, tensor in plain.items()
    }
    tensors = opened(tmp_path / "m.gguf", "llama", stored).tensors
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for layer in range(LAYERS):
        prefix, block = f"model.layers.{layer}", f"blk.{layer}"
        names |= {
            f"{prefix}.input_layernorm.weight": f"{block}.attn_norm.weight",
            f"{prefix}.self_attn.q_proj.weight": f"{block}.attn_q.weight",
            f"{prefix}.self_attn.q_proj.bias": f"{block}.attn_q.bias",
            f"{prefix}.self_attn.k_proj.weight": f"{block}.attn_k.weight",
            f"{prefix}.self_attn.k_proj.bias": f"{block}.attn_k.bias",
            f"{prefix}.self_attn.v_proj.weight": f"{block}.attn_v.weight",
            f"{prefix}.self_attn.o_proj.weight": f"{block}.attn_output.weight",
            f"{prefix}.post_attention_layernorm.weight": f"{block}.ffn_norm.weight",
            f"{prefix}.mlp.gate_proj.weight": f"{block}.ffn_gate.weight",
            f"{prefix}.mlp.up_proj.weight": f"{block}.ffn_up.weight",
            f"{prefix}.mlp.down_proj.weight": f"{block}.ffn_down.weight",
        }
    assert tensors.shapes() == {name: plain[source].shape for name, source in names.items()}
    for name, source in names.items():
        np.testing.assert_array_equal(tensors.read(name), plain[source], err_msg=name)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_rows_are_put_back_whole(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    tensors: Tensors = dict(tiny_tensors())
    plain = np.asarray(tensors["blk.0.attn_q.weight"])
    tensors["blk.0.attn_q.weight"] = gguf.quants.quantize(converted(plain, HEADS), kind)
    source = opened(tmp_path / "m.gguf", "llama", tensors, **{"blk.0.attn_q.weight": int(kind)}).tensors
    expected = gguf.quants.dequantize(gguf.quants.quantize(plain, kind), kind)
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(source.read(name), expected)
    np.testing.assert_array_equal(source.read_bf16(name), expected.astype(ml_dtypes.bfloat16))


def test_bf16_is_kept_and_f16_widened(tmp_path: Path) -> None:
    tensors: Tensors = dict(tiny_tensors())
    values = np.asarray(tensors["blk.0.ffn_up.weight"])
    half = values.astype(np.float16)
    narrow = values.astype(ml_dtypes.bfloat16)
    tensors["blk.0.ffn_up.weight"] = half
    tensors["blk.0.ffn_gate.weight"] = narrow.view(np.uint8)
    bf16 = int(gguf.GGMLQuantizationType.BF16)
    source = opened(tmp_path / "m.gguf", "llama", tensors, **{"blk.0.ffn_gate.weight": bf16}).tensors
    up, gate = (source.read(f"model.layers.0.mlp.{name}_proj.weight") for name in ("up", "gate"))
    assert up.dtype == np.float32
    assert gate.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(up, half.astype(np.float32))
    np.testing.assert_array_equal(gate, narrow)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay_where_they_are(tmp_path: Path, arch: str) -> None:
    extra = {"qwen2": {"attn_q.bias": HEADS * HEAD_DIM}, "qwen3": {"attn_q_norm.weight": HEAD_DIM}}[arch]
    plain = tiny_tensors() | layer_tensors(extra)
    source = opened(tmp_path / "m.gguf", arch, plain).tensors
    (kind,) = extra
    name = {"attn_q.bias": "q_proj.bias", "attn_q_norm.weight": "q_norm.weight"}[kind]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn"
        np.testing.assert_array_equal(
            source.read(f"{prefix}.q_proj.weight"), plain[f"blk.{layer}.attn_q.weight"]
        )
        np.testing.assert_array_equal(source.read(f"{prefix}.{name}"), plain[f"blk.{layer}.{kind}"])


def test_gemma3_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    norms = {
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    plain = tiny_tensors() | layer_tensors(
        {f"{norm}.weight": HEAD_DIM if "_q_" in norm or "_k_" in norm else HIDDEN for norm in norms}
    )
    stored = {name: tensor + np.float32(name.endswith("norm.weight")) for name, tensor in plain.items()}
    source = opened(tmp_path / "m.gguf", "gemma3", stored).tensors
    names = {f"model.layers.1.{ours}.weight": f"blk.1.{norm}.weight" for norm, ours in norms.items()}
    names["model.norm.weight"] = "output_norm.weight"
    for name, kind in names.items():
        expected = stored[kind] - np.float32(1)
        assert source.read(name).dtype == np.float32
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
        np.testing.assert_array_equal(source.read_bf16(name), expected.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(
        source.read("model.layers.0.mlp.up_proj.weight"), plain["blk.0.ffn_up.weight"]
    )


def test_digest_names_the_bytes(tmp_path: Path) -> None:
    first, same, other = (write_tiny(tmp_path / f"{i}.gguf") for i in range(3))
    content = bytearray(other.read_bytes())
    content[-40] ^= 1
    other.write_bytes(content)
    digests = [open_checkpoint(path).tensors.digest() for path in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert all(len(digest) == 64 for digest in digests)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.weight", "blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "cls"]
)
def test_a_tensor_without_a_place_is_refused(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors() | {name: np.zeros(32, np.float32)}
    with pytest.raises(WeightsError, match=f"{name} has no place"):
        opened(tmp_path / "m.gguf", "llama", tensors)


def test_rows_that_do_not_divide_into_heads_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"blk.0.attn_k.weight": np.zeros((15, HIDDEN), np.float32)}
    with pytest.raises(WeightsError, match="does not divide into 2 heads"):
        opened(tmp_path / "m.gguf", "llama", tensors)


def test_reading_an_absent_tensor(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny(tmp_path / "m.gguf")).tensors
    with pytest.raises(WeightsError, match=r"has no tensor lm_head\.weight"):
        source.read("lm_head.weight")


def test_names_agree_with_the_gguf_package() -> None:
    """Every name maps the way the converter's own table maps it back."""
    theirs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for name, arch in ARCHITECTURES.items():
        table = gguf.get_tensor_name_map(theirs[name], 3)
        for block in arch.block_names:
            stored = f"blk.2.{block}.weight"
            assert table.get_name(arch.hugging_face_name(stored), (".weight", ".bias")) == stored

"""What a config may say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import TINY

from loadproof.graph import Attention, Embed, GatedMul, Graph, Linear, Logits, RmsNorm, Rope, RopeScaling
from loadproof.models import ARCHITECTURES, ConfigError, UnknownArchitectureError, build_graph

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**TINY[name].config, **changes}


def without(name: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in TINY[name].config.items() if key not in keys}


def windows(graph: Graph) -> list[int | None]:
    return [op.window for op in graph.ops if isinstance(op, Attention)]


def ropes(graph: Graph) -> list[tuple[float, RopeScaling | None]]:
    """Theta and scaling of each layer's queries."""
    return [(op.spec.theta, op.spec.scaling) for op in graph.ops if isinstance(op, Rope)][::2]


@pytest.mark.parametrize("config", [{"architectures": ["MambaForCausalLM"]}, {"model_type": "mamba"}])
def test_an_unknown_architecture_is_named_beside_the_known_ones(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitectureError, match=r"(?i)mamba.*LlamaForCausalLM"):
        build_graph(config)


def test_an_empty_config_is_refused() -> None:
    with pytest.raises(UnknownArchitectureError, match="neither architectures nor model_type"):
        build_graph({})


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a JSON object but a list"):
        build_graph([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_type_alone_names_the_architecture(name: str) -> None:
    assert build_graph(without(name, "architectures")) == TINY[name].graph


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_each_size_is_required_and_bounded(name: str, key: str) -> None:
    if name != "gemma3" or key in ("hidden_size", "intermediate_size", "num_hidden_layers"):
        with pytest.raises(ConfigError, match=f"has no {key}"):
            build_graph(without(name, key))
    wrong_values: list[object] = [0, -1, 1 << 40, "64", 64.0, True, [64], {}]
    for wrong in wrong_values:
        with pytest.raises(ConfigError, match=key):
            build_graph(changed(name, **{key: wrong}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 15),
        ("head_dim", 1 << 30),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", -1.0),
        ("rope_theta", 10**400),
        ("hidden_act", "relu"),
        ("hidden_act", 3),
        ("attention_bias", 1),
        ("tie_word_embeddings", "yes"),
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 3),
        ("rope_scaling", "llama3"),
        ("rope_scaling", {"type": "linear"}),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        build_graph(changed("llama", **{key: value}))


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "proportional"])
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_an_unsupported_rope_scaling_is_refused(kind: str, form: str) -> None:
    with pytest.raises(ConfigError, match=f"{form}: rope_type '{kind}' is not supported"):
        build_graph(changed("llama", **{form: {"rope_type": kind, "factor": 4.0}}))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0, "mscale": 1.0},
        {"rope_type": "default", "mrope_section": [1, 2]},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 8.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_theta": 1e4, "full_attention": {}},
    ],
)
def test_rope_parameters_that_are_not_understood_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rope_parameters"):
        build_graph(changed("llama", rope_parameters=parameters))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("llama", {"sliding_window": 8}),
        ("llama", {"num_local_experts": 8}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"residual_multiplier": 0.5}),
        ("mistral", {"attention_bias": True}),
        ("mistral", {"mlp_bias": True}),
        ("qwen2", {"attention_bias": False}),
        ("qwen3", {"num_experts": 128}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_a_setting_that_an_architecture_lacks_is_refused(name: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        build_graph(changed(name, **setting))


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_that_are_off_or_mean_nothing_here_change_nothing(name: str) -> None:
    config = changed(
        name, quantization_config=None, num_experts=0, partial_rotary_factor=1.0, torch_dtype="x"
    )
    assert build_graph(config) == TINY[name].graph


def test_both_forms_of_rope_settings_give_the_same_graph() -> None:
    scaling = {"factor": 2.0, "type": "linear"}
    old = build_graph(changed("llama", rope_theta=5e5, rope_scaling=scaling))
    new = build_graph(
        {
            **without("llama", "rope_theta", "rope_scaling"),
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        }
    )
    assert old == new
    assert set(ropes(old)) == {(5e5, RopeScaling("linear", 2.0))}


def test_both_forms_at_once_must_agree() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert build_graph(changed("llama", rope_scaling=linear, rope_parameters=linear)) == build_graph(
        changed("llama", rope_scaling=linear)
    )
    with pytest.raises(ConfigError, match="do not agree"):
        build_graph(changed("llama", rope_scaling=linear, rope_parameters={**linear, "factor": 4.0}))


def test_gemma_rotates_sliding_layers_by_their_own_base() -> None:
    scaling = RopeScaling("linear", 8.0)
    local, full = (10000.0, None), (1000000.0, scaling)
    assert ropes(TINY["gemma3"].graph) == [local, local, full, local]
    new = without("gemma3", "rope_theta", "rope_local_base_freq", "rope_scaling")
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert build_graph(new) == TINY["gemma3"].graph


def test_windows_follow_each_architectures_pattern() -> None:
    assert windows(TINY["llama"].graph) == [None, None, None]
    assert windows(TINY["mistral"].graph) == [8, 8, 8]
    assert windows(TINY["qwen2"].graph) == [None, None, 8, 8]
    assert windows(TINY["qwen3"].graph) == [None, None, None]
    assert windows(TINY["gemma3"].graph) == [8, 8, None, 8]
    assert windows(build_graph(changed("mistral", sliding_window=None))) == [None] * 3
    assert windows(build_graph(changed("qwen2", use_sliding_window=False))) == [None] * 4
    assert windows(build_graph(changed("qwen2", max_window_layers=4))) == [None] * 4


def test_layer_types_decide_over_the_pattern() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    for name in ("qwen2", "gemma3"):
        assert windows(build_graph(changed(name, layer_types=kinds))) == [None, 8, None, 8]
    with pytest.raises(ConfigError, match="use_sliding_window is not set"):
        build_graph(changed("qwen2", layer_types=kinds, use_sliding_window=False))
    with pytest.raises(ConfigError, match="has no sliding_window"):
        build_graph(changed("gemma3", layer_types=kinds, sliding_window=None))


def test_head_dim_defaults_to_its_share_of_the_hidden_size() -> None:
    head_dims = {
        op.head_dim for op in build_graph(without("mistral", "head_dim")).ops if isinstance(op, Attention)
    }
    assert head_dims == {64 // 4}
    with pytest.raises(ConfigError, match="not a multiple"):
        build_graph(changed("llama", hidden_size=66))


def test_key_value_heads_default_to_the_attention_heads() -> None:
    graph = build_graph(without("llama", "num_key_value_heads"))
    assert {op.num_kv_heads for op in graph.ops if isinstance(op, Attention)} == {4}


def test_gemma_checkpoints_leave_out_what_their_config_class_defaults_to() -> None:
    """The 4B model's config has these keys and no others."""
    graph = build_graph(
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
    )
    shapes = {name: param.shape for name, param in graph.params.items()}
    assert shapes["model.embed_tokens.weight"] == (262208, 2560)
    assert shapes["model.layers.33.self_attn.q_proj.weight"] == (8 * 256, 2560)
    assert shapes["model.layers.33.self_attn.k_proj.weight"] == (4 * 256, 2560)
    assert windows(graph)[:7] == [1024] * 5 + [None, 1024]
    assert set(ropes(graph)) == {(1e4, None), (1e6, RopeScaling("linear", 8.0))}
    assert graph.max_position_embeddings == 131072


def test_a_tied_model_reads_no_output_matrix() -> None:
    tied, untied = TINY["llama"].graph, build_graph(changed("llama", tie_word_embeddings=False))
    assert set(untied.params) - set(tied.params) == {"lm_head.weight"}


def test_biases_are_where_the_architecture_has_them() -> None:
    def biased(name: str) -> set[str]:
        names = [op.bias.name for op in TINY[name].graph.ops if isinstance(op, Linear) and op.bias]
        return {name.split(".")[-2] for name in names}

    assert biased("qwen2") == {"q_proj", "k_proj", "v_proj"}
    assert biased("llama-bias") == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert biased("llama") == biased("mistral") == biased("qwen3") == biased("gemma3") == set()


def test_gemma_settings_reach_the_ops() -> None:
    graph = TINY["gemma3-softcap"].graph
    embed, logits = graph.ops[0], graph.ops[-1]
    assert isinstance(embed, Embed)
    assert isinstance(logits, Logits)
    assert (embed.scale, logits.softcap) == (72**0.5, 12.0)
    assert {(op.scale, op.softcap) for op in graph.ops if isinstance(op, Attention)} == {(0.25, 2.0)}
    assert {op.offset for op in graph.ops if isinstance(op, RmsNorm)} == {1.0}
    assert {op.activation for op in graph.ops if isinstance(op, GatedMul)} == {"gelu_tanh"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(FAMILIES), data=st.data())
def test_any_value_anywhere_is_accepted_or_a_clear_error(name: str, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(TINY[name].config)))
    value = data.draw(
        _JSON.filter(lambda v: not (key == "num_hidden_layers" and isinstance(v, int) and v > 8))
    )
    try:
        last = build_graph(changed(name, **{key: value})).ops[-1]
    except ConfigError as error:
        message = str(error)
        last = None
    assert isinstance(last, Logits) or message.startswith("config.json")


def test_every_architecture_has_a_small_model() -> None:
    assert {model.config["architectures"][0] for model in TINY.values()} == set(ARCHITECTURES)

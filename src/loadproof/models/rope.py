"""Rotary settings of a config, in the two forms that checkpoints carry, as a :class:`RopeSpec`.

Old form: ``rope_theta`` beside ``rope_scaling``. New form (transformers 5): one ``rope_parameters`` object,
or one for each layer type. A config with both must say the same twice.
"""

from __future__ import annotations

from loadproof.graph import RopeScaling, RopeSpec
from loadproof.models.config import MAX_POSITIONS, Config

_SCALING_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(
    config: Config,
    head_dim: int,
    layer_type: str,
    *,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    scaling_key: str | None = "rope_scaling",
) -> RopeSpec:
    """The rotary embedding of layers of ``layer_type``.

    ``theta`` is the architecture's default; ``theta_key`` and ``scaling_key`` name the old form's keys for
    these layers. Raises :class:`ConfigError` for a scaling that is not supported.
    """
    theta = config.positive(theta_key, theta)
    found = []
    parameters = config.section("rope_parameters")
    nested = parameters.keys() & set(LAYER_TYPES)
    if nested and parameters.keys() - set(LAYER_TYPES):
        raise config.error("rope_parameters", "mixes settings with settings for each layer type")
    if nested or parameters.keys():
        found.append(_read_form(parameters.section(layer_type) if nested else parameters, head_dim, theta))
    if scaling_key is not None and config.has(scaling_key):
        found.append(_read_form(config.section(scaling_key), head_dim, theta))
    if len(set(found)) > 1:
        raise config.error("rope_parameters", f"and {scaling_key} do not agree")
    return found[0] if found else RopeSpec(head_dim, theta)


def _read_form(form: Config, head_dim: int, theta: float) -> RopeSpec:
    kind = form.text("rope_type", form.text("type", "default"))
    if kind not in _SCALING_KEYS:
        raise form.error("rope_type", f"{kind!r} is not supported, only {', '.join(_SCALING_KEYS)}")
    unknown = sorted(form.keys() - _COMMON_KEYS - _SCALING_KEYS[kind])
    if unknown:
        raise form.error(unknown[0], f"is not supported for rotary scaling {kind!r}")
    if form.positive("partial_rotary_factor", 1.0) != 1.0:
        raise form.error("partial_rotary_factor", "other than 1 is not supported")
    return RopeSpec(head_dim, form.positive("rope_theta", theta), _read_scaling(form, kind))


def _read_scaling(form: Config, kind: str) -> RopeScaling | None:
    if kind == "default":
        return None
    factor = form.positive("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = form.positive("low_freq_factor"), form.positive("high_freq_factor")
    if low >= high:
        raise form.error("low_freq_factor", f"{low} is not below high_freq_factor {high}")
    original = form.integer("original_max_position_embeddings", high=MAX_POSITIONS)
    return RopeScaling("llama3", factor, low, high, original)

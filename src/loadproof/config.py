"""Every engine setting in one dataclass, validated once, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from loadproof.devices.device import DeviceLimits
    from loadproof.engine.pipeline import PipelineOptions
    from loadproof.engine.scheduler import SchedulerOptions
    from loadproof.graph import Graph, Param

_CACHE_ELEMENT_BYTES = 2  # bf16
_MATRIX_ELEMENT_BYTES = 2  # bf16
_VECTOR_ELEMENT_BYTES = 4
_CACHE_SHARE = 0.25  # of the memory that the weights leave, unless told otherwise
_LEAST_CACHE = 128 << 20
_INT32_MAX = 2**31 - 1
_UNITS = {"": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}I": 1024**_power}
# Rope tables and the rows of known tokens have an entry a position, whether it is ever used or not.
DEFAULT_MAX_MODEL_LEN = 262144


POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


class ConfigError(ValueError):
    """Engine settings that are wrong, or that don't fit the model or the memory."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may set about an engine. Raises :class:`ConfigError`, naming the setting and its value."""

    model: str
    """Directory, ``.gguf`` file, hub id or alias."""
    served_model_name: str | None = None
    """Name shown to clients; ``model`` where None."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; None takes what the model and the cache allow, up to
    262144, as memory is taken for each position: a longer one has to be set."""
    max_num_seqs: int = 64
    """Most sequences running at once; others wait."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step, shared by prompts and decodes."""
    max_num_prefill_tokens: int = 1024
    """Most prompt tokens of a step while other requests decode: a long prompt doesn't hold them up."""
    scheduling_policy: str = "fcfs"
    """Who goes first: "fcfs", by arrival; "priority", by the least priority, then by arrival."""
    enable_prefix_caching: bool = True
    """Reuse the blocks of prefixes that were computed before."""
    prompt_logprobs_cache: bool = True
    """Keep each position's final hidden state with its block, so that prompts that want log-probabilities
    can use cached prefixes; otherwise they are computed anew."""
    async_scheduling: bool = True
    """Plan and submit a step while the one before it runs."""
    check_integrity: bool = False
    """Check all bookkeeping after every step instead of only when idle: for tests and for those in doubt."""
    block_size: int = 32
    """Tokens in a block of the key-value cache: 16, 32, 64, 128, 256 or a multiple of 512."""
    num_blocks_override: int | None = None
    """Blocks of the key-value cache; refused where the memory isn't there."""
    kv_cache_memory: int | None = None
    """Bytes of the key-value cache, refused where they aren't there; None takes a quarter of the free memory,
    or less where that is enough."""
    num_threads: int | None = None
    """Threads that compute; None takes the processors that the process may use."""
    seed: int | None = None
    """Source of the seeds of requests without one; None draws those at random."""
    max_logprobs: int = 20
    """Most log-probabilities a position that a request may ask for; -1 for no limit."""

    logprobs_mode: str = "raw_logprobs"
    """What log-probabilities are of, as in vLLM: "raw_logprobs", of the model's logits; "raw_logits", these
    themselves; "processed_logprobs" and "processed_logits", after penalties, bias, temperature and filters.
    Nothing of that applies to a prompt, so its own are raw in any case."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must name a model, not {self.model!r}")
        name = self.served_model_name
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"served_model_name must be a name, not {name!r}")
        for name, low, high in (
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("max_num_prefill_tokens", 1, 1 << 20),
            ("block_size", 16, 4096),
            ("max_logprobs", -1, _INT32_MAX),
        ):
            _check_integer(name, getattr(self, name), low, high)
        for name, low, high in (
            ("max_model_len", 2, _INT32_MAX),
            ("num_blocks_override", 1, _INT32_MAX),
            ("kv_cache_memory", 1, 1 << 50),
            ("num_threads", 1, 1024),
            ("seed", -(2**63), 2**64 - 1),
        ):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low, high)
        for name in ("enable_prefix_caching", "prompt_logprobs_cache", "async_scheduling", "check_integrity"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name, choices in (("scheduling_policy", POLICIES), ("logprobs_mode", LOGPROBS_MODES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}")
        if self.block_size not in (16, 32, 64, 128, 256) and self.block_size % 512:
            raise ConfigError(
                f"block_size must be 16, 32, 64, 128, 256 or a multiple of 512, not {self.block_size}"
            )

    @classmethod
    def of(cls, model: str, settings: Mapping[str, Any]) -> Self:
        """Settings by name; raises :class:`ConfigError` for a name that is none, with those that are."""
        known = [field.name for field in fields(cls) if field.name != "model"]
        unknown = sorted(settings.keys() - set(known))
        if unknown:
            raise ConfigError(f"no such settings: {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(model=model, **settings)

    def scheduler_options(self) -> SchedulerOptions:
        """What the scheduler is told."""
        from loadproof.engine.scheduler import SchedulerOptions

        return SchedulerOptions(
            policy=self.scheduling_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            max_num_prefill_tokens=self.max_num_prefill_tokens,
        )

    def pipeline_options(self) -> PipelineOptions:
        """What the pipeline of steps is told."""
        from loadproof.engine.pipeline import PipelineOptions

        return PipelineOptions(async_scheduling=self.async_scheduling, check_integrity=self.check_integrity)

    def limits(self, graph: Graph, free_memory: int) -> DeviceLimits:
        """Sizes of the device for a model, with ``free_memory`` bytes there before its weights are read.

        A length that was not set is the model's, or what the cache holds if that is less. Raises
        :class:`ConfigError` where one that was set exceeds either, where the weights exceed the memory, and
        where a cache that was set exceeds what they leave of it.
        """
        from loadproof.devices.device import DeviceLimits

        blocks = self._blocks_allowed(graph, free_memory)
        max_model_len = self._model_len(graph.max_position_embeddings, blocks * self.block_size)
        if self.num_blocks_override is None and self.kv_cache_memory is None:
            blocks = min(blocks, self.max_num_seqs * -(-max_model_len // self.block_size))
        return DeviceLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.block_size,
            num_blocks=min(blocks, _INT32_MAX // self.block_size),
            logprobs_mode=self.logprobs_mode,
            keeps_hidden=self.prompt_logprobs_cache,
        )

    def _blocks_allowed(self, graph: Graph, free_memory: int) -> int:
        token_bytes = cache_bytes_per_token(graph)
        if self.prompt_logprobs_cache:
            token_bytes += hidden_bytes_per_token(graph)
        block_bytes = self.block_size * token_bytes
        weights = weight_bytes(graph)
        if weights > free_memory:
            raise ConfigError(f"the model's weights take {weights} bytes; {free_memory} are available")
        left = free_memory - weights
        if self.num_blocks_override is not None:
            _check_memory("num_blocks_override", self.num_blocks_override, block_bytes, left)
            return self.num_blocks_override
        memory = self.kv_cache_memory
        if memory is None:
            memory = max(_LEAST_CACHE, int(left * _CACHE_SHARE))
        if memory < block_bytes:
            raise ConfigError(
                f"the key-value cache has {memory} bytes; "
                f"one block of {self.block_size} tokens takes {block_bytes}"
            )
        if self.kv_cache_memory is not None:
            _check_memory("kv_cache_memory", memory // block_bytes, block_bytes, left)
        return memory // block_bytes

    def _model_len(self, model_limit: int, cached: int) -> int:
        wanted = self.max_model_len
        if wanted is None:
            return min(model_limit, cached, DEFAULT_MAX_MODEL_LEN)
        if wanted > model_limit:
            raise ConfigError(f"max_model_len {wanted} is above the model's limit of {model_limit}")
        if wanted > cached:
            raise ConfigError(
                f"max_model_len {wanted} does not fit the key-value cache, which holds {cached} tokens; "
                "raise kv_cache_memory or num_blocks_override, or lower max_model_len"
            )
        return wanted


def cache_bytes_per_token(graph: Graph) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    from loadproof.graph import Attention

    layers = [op for op in graph.ops if isinstance(op, Attention)]
    return sum(2 * layer.num_kv_heads * layer.head_dim * _CACHE_ELEMENT_BYTES for layer in layers)


def hidden_bytes_per_token(graph: Graph) -> int:
    """Bytes of a position's final hidden state."""
    from loadproof.graph import Embed

    (width,) = (op.weight.shape[1] for op in graph.ops if isinstance(op, Embed))
    # Rows are padded to an odd number of 32 elements, as those of native/layout.h.
    return (-(-width // 32) | 1) * 32 * _CACHE_ELEMENT_BYTES


def weight_bytes(graph: Graph) -> int:
    """Bytes of the weights as the device holds them."""
    return sum(map(_packed_bytes, graph.params.values()))


def _packed_bytes(param: Param) -> int:
    if len(param.shape) == 1:
        return param.shape[0] * _VECTOR_ELEMENT_BYTES
    # Panels of 16 columns, each a multiple of 32 elements long, as in native/kernels.h.
    columns, length = -(-param.shape[0] // 16) * 16, -(-param.shape[1] // 32) * 32
    return columns * length * _MATRIX_ELEMENT_BYTES


def parse_bytes(text: str) -> int:
    """Bytes from ``"4GiB"``, ``"500M"`` or ``"1048576"``; raises :class:`ConfigError`."""
    number = text.strip().upper().removesuffix("B")
    digits = number.rstrip("KMGTI")
    unit = number[len(digits) :]
    try:
        size = float(digits) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"a size such as 4GiB or 500MB, not {text!r}") from None
    if not 0 <= size <= 1 << 50:
        raise ConfigError(f"{text!r} is not a sensible size")
    return int(size)


def _check_memory(name: str, num_blocks: int, block_bytes: int, left: int) -> None:
    if num_blocks * block_bytes > left:
        raise ConfigError(
            f"{name} asks for a key-value cache of {num_blocks * block_bytes} bytes; "
            f"{left} are available beside the weights"
        )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")

"""Types of the compiled module; shapes and errors are in native/plan.h, step_queue.h and matrix.h."""

import enum

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]
U64 = npt.NDArray[np.uint64]

KERNEL_VERSION: int

def available_levels() -> list[str]: ...

class Buffer(enum.Enum):
    RESIDUAL = 0
    NORMED = 1
    QKV = 2
    ATTENDED = 3
    GATED = 4
    PROJECTED = 5

class NormOutput(enum.Enum):
    BF16 = 0
    FLOAT = 1
    ADD = 2

class Epilogue(enum.Enum):
    STORE = 0
    ADD = 1
    GATED = 2

class Gate(enum.Enum):
    SILU = 0
    GELU = 1
    GELU_TANH = 2

class LogprobsMode(enum.Enum):
    RAW_LOGPROBS = 0
    RAW_LOGITS = 1
    PROCESSED_LOGPROBS = 2
    PROCESSED_LOGITS = 3

class Matrix:
    def __init__(self, columns: int, k: int) -> None: ...
    def pack(self, rows: U16, first: int, panel_step: int, panel_offset: int) -> None: ...

class RopeTable:
    def __init__(self, cos: F32, sin: F32) -> None: ...

class Plan:
    def __init__(
        self,
        isa: str,
        num_threads: int,
        hidden_size: int,
        vocab_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        *,
        logprobs_mode: LogprobsMode = ...,
        keeps_hidden: bool = True,
    ) -> None: ...
    def set_embedding(self, table: Matrix, scale: float) -> None: ...
    def add_norm(
        self, source: Buffer, target: Buffer, output: NormOutput, weight: F32, eps: float, offset: float
    ) -> None: ...
    def add_linear(
        self,
        source: Buffer,
        target: Buffer,
        weight: Matrix,
        bias: F32,
        out_columns: int,
        epilogue: Epilogue,
        gate: Gate,
    ) -> None: ...
    def add_qkv(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: F32,
        k_norm: F32,
        norm_eps: float,
        norm_offset: float,
        rope: RopeTable | None,
    ) -> None: ...
    def add_attention(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float,
        window: int,
    ) -> None: ...
    def set_output(
        self, norm_weight: F32, eps: float, offset: float, weight: Matrix, softcap: float
    ) -> None: ...
    @property
    def cache_bytes(self) -> int: ...

class StepQueue:
    def __init__(self, plan: Plan) -> None: ...
    def submit(
        self,
        token_ids: I32,
        query_starts: I32,
        seq_lens: I32,
        block_tables: I32,
        logits_rows: I32,
        carried_rows: I32,
        carried_slots: I32,
        sample_slots: I32,
        temperature: F32,
        top_k: I32,
        top_p: F32,
        min_p: F32,
        repetition_penalty: F32,
        presence_penalty: F32,
        frequency_penalty: F32,
        seeds: U64,
        positions: I64,
        history: I32,
        history_starts: I32,
        num_prompt: I32,
        bias_ids: I32,
        bias_values: F32,
        bias_starts: I32,
        num_logprobs: I32,
        hidden_rows: I32,
        score_targets: I32,
        score_tops: I32,
        return_logits: bool,
    ) -> int: ...
    def wait(self, number: int) -> tuple[I32, F32, I32, I32, F32, F32 | None]: ...

def sample_row(
    logits: F32,
    *,
    isa: str,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    position: int = 0,
    history: I32 | None = None,
    num_prompt: int = 0,
    bias_ids: I32 | None = None,
    bias_values: F32 | None = None,
    num_logprobs: int = -1,
    logprobs_mode: LogprobsMode = ...,
    repeats: int = 1,
) -> tuple[int, float, int, I32, F32]: ...
def philox(seed: int, position: int) -> tuple[int, int, int, int]: ...
def read_bandwidth(num_threads: int, num_bytes: int) -> float: ...
def product_rate(isa: str, num_threads: int) -> float: ...
def instruction_rate(isa: str, num_threads: int) -> float: ...

"""What a run of the engine over a workload finds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineBenchmarkResult:
    """What was measured; times in seconds. Every field is plain JSON."""

    model: str
    dtype: str
    quantization: str | None
    device: str
    attention: str  # as asked for
    threads: int
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prefill_s: float  # forward passes with prompt tokens in them
    decode_s: float  # forward passes with nothing but decodes
    # Where the wall time went, by the host's clock. On a CPU these five and `waiting_s` are all of it; on a GPU, where
    # the parts of a pass are only queued, `prefill_s` and `decode_s` stand for them.
    linear_s: float | None
    attention_s: float | None
    other_forward_s: float | None  # norms, rotation, embeddings, residuals, writing the cache
    sampling_s: float
    prepare_s: float
    waiting_s: float  # outside the engine: admission and bookkeeping of this loop
    # Ceilings measured after the run, on the same weights; not on a GPU, see engine_iterations.
    gemm_floor_s: float | None
    share_of_gemm_floor: float | None  # floor / wall: 1 would be products and nothing else
    weight_reading_s: float | None
    share_of_weight_reading: float | None  # the same for reading the weights once per step; above it with few rows
    read_gb_per_s: float | None
    outside_forward_share: float  # of the wall time
    weight_bytes: int
    kv_token_bytes: int
    kv_bytes: int  # block storage asked for
    peak_rss_bytes: int  # of loading, packing and running, before the ceilings
    peak_device_bytes: int | None  # likewise, of a GPU's memory

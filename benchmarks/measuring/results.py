"""Results of kernels, engine and transfers, for scripts that report them without PyTorch. Every field is plain JSON."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """Measured best of a device; GB are 10^9 bytes, TFLOP 10^12 operations."""

    device: str
    dtype: str  # of the matrix product
    read_gb_per_s: float  # from its memory
    copy_gb_per_s: float  # within its memory: bytes read and bytes written
    matrix_tflop_per_s: float  # a large square product
    host_to_device_gb_per_s: float | None  # page-locked host memory; None on a CPU
    device_to_host_gb_per_s: float | None

    def bound_s(self, num_bytes: float, num_operations: float, *, is_copy: bool) -> float:
        """Return the least seconds for these bytes and operations: whichever take longer."""
        bandwidth = self.copy_gb_per_s if is_copy else self.read_gb_per_s
        return max(num_bytes / bandwidth / 1e9, num_operations / self.matrix_tflop_per_s / 1e12)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel over one batch."""

    kernel: str  # what is computed
    case: str
    by: str  # which implementation
    microseconds: float
    gb_per_s: float
    tflop_per_s: float
    bound: str  # what it cannot be faster than: read, copy or matrix
    share: float  # of that bound: 1 is as fast as measured on the same device in the same run
    against_aligned: float | None = None  # decode of mixed lengths: its time over that of as many tokens, evenly long


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All kernels of one run."""

    shape: str
    dtype: str
    ceilings: DeviceCeilings
    rows: list[KernelRow]
    left_out: list[str]  # what does not run here


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One kind of iteration, or of copies, against what bounds it."""

    kind: str  # decode, prefill, decode beside copies, offload, prefetch
    what: str  # the same with its sizes
    milliseconds: float
    bound: str  # what it is measured against
    bound_milliseconds: float
    ratio: float  # as the target counts it
    target: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class IterationReport:
    """Single iterations of the engine on one device."""

    model: str
    dtype: str
    attention: str
    ceilings: DeviceCeilings
    rows: list[IterationRow]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class EngineBenchmarkResult:
    """Measured figures, times in seconds. Every field is plain JSON."""

    model: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    device: str
    attention: str  # as asked for
    threads: int  # of each rank
    tensor_parallel: int  # ranks
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
    kv_token_bytes: int  # of the first rank, like the next two
    kv_bytes: int  # block storage asked for
    peak_rss_bytes: int  # of loading, packing and running, before the ceilings
    peak_device_bytes: int | None  # likewise, of a GPU's memory


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One way of moving one size; speeds in GB/s (10^9 bytes), medians. Every field is plain JSON."""

    shape: str
    block_bytes: int
    num_blocks: int
    transport: str  # pinned: between a device and page-locked host memory
    operation: str  # offload, fetch or relay; prefetch: what pinned brings back
    gb_per_s: float
    plain_gb_per_s: float  # the same bytes without lease, checks or checksums, and side by side
    share: float  # of the two


@dataclass(slots=True)
class TransferReport:
    """All ways of one machine."""

    rows: list[TransferResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what this machine does not have
    failures: list[str] = field(default_factory=list)  # what it should have been able to do


def transfer_result(
    size: tuple[str, int, int], way: tuple[str, str], measured_s: float, plain_s: float
) -> TransferResult:
    """Build a result. `size`: shape, bytes of a block, number of blocks; `way`: transport and operation."""
    _, block_bytes, num_blocks = size
    num_bytes = block_bytes * num_blocks
    return TransferResult(
        *size,
        *way,
        gb_per_s=round(num_bytes / measured_s / 1e9, 4),
        plain_gb_per_s=round(num_bytes / plain_s / 1e9, 4),
        share=round(plain_s / measured_s, 3),
    )

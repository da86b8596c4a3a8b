"""What `bench transfer` finds, for those who report it without loading PyTorch."""

from dataclasses import dataclass, field


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
    """`size`: shape, bytes of a block, number of blocks; `way`: transport and operation."""
    _, block_bytes, num_blocks = size
    num_bytes = block_bytes * num_blocks
    return TransferResult(
        *size,
        *way,
        gb_per_s=round(num_bytes / measured_s / 1e9, 2),
        plain_gb_per_s=round(num_bytes / plain_s / 1e9, 2),
        share=round(plain_s / measured_s, 3),
    )

"""What `bench transfer` finds, for those who report it without loading PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One way of moving one size; speeds in GB/s (10^9 bytes), medians. Every field is plain JSON."""

    shape: str
    block_bytes: int
    num_blocks: int
    transport: str
    operation: str  # offload, fetch or relay
    gb_per_s: float
    plain_gb_per_s: float  # the same bytes without lease, checks or checksums
    share: float  # of the two

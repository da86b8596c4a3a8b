"""What benchmarks on one device find, for those who report it without loading PyTorch. Every field is plain JSON."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """What the device does at its best, measured; GB are 10^9 bytes, TFLOP 10^12 operations."""

    device: str
    dtype: str  # of the matrix product
    read_gb_per_s: float  # from its memory
    copy_gb_per_s: float  # within its memory: bytes read and bytes written
    matrix_tflop_per_s: float  # a large square product
    host_to_device_gb_per_s: float | None  # page-locked host memory; None on a CPU
    device_to_host_gb_per_s: float | None

    def bound_s(self, num_bytes: float, num_operations: float, *, is_copy: bool) -> float:
        """Seconds that moving so many bytes, or so much arithmetic, takes at least: whichever takes longer."""
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

"""Parameters of the transfer benchmark."""

from dataclasses import dataclass

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError
from lab.profiling.shapes import SHAPES

BLOCK_SIZE = 16
LAYOUTS = {
    "pocket": BlockLayout(BLOCK_SIZE, num_layers=5, num_kv_heads=2, head_dim=64, dtype="float32"),
    **{name: shape.block_layout(BLOCK_SIZE, shape.dtype) for name, shape in SHAPES.items()},
}
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TransferBenchmarkSpec:
    """Parameters of the benchmark. Raises ConfigError naming the field."""

    shapes: tuple[str, ...] = ("pocket", "opt-125m")  # whose blocks; keys of LAYOUTS
    mebibytes: tuple[int, ...] = (4, 64)  # of one request
    num_rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for shape in self.shapes:
            if shape not in LAYOUTS:
                raise ConfigError(f"shape {shape!r} is none of {', '.join(LAYOUTS)}.")
        if not self.mebibytes or not all(1 <= size <= 4096 for size in self.mebibytes):
            raise ConfigError("mebibytes must be from 1 to 4096.")
        if self.num_rounds < 1:
            raise ConfigError("num_rounds must be at least 1.")

    def sizes(self) -> list[tuple[str, int]]:
        return [
            (shape, max(1, size * _MIB // LAYOUTS[shape].block_bytes))
            for shape in self.shapes
            for size in self.mebibytes
        ]


# Of a GPU: blocks of 80 KiB, which are gathered, and of 2 MiB, which are copied straight.
DEVICE_SPEC = TransferBenchmarkSpec(("pocket", "llama-3-8b"), (64, 512))

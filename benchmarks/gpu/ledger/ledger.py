"""The ledger: for each model and step the kernels and bytes of one step, of its first layer and of each other."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.ledger.kernel_bytes import TO_GPU, TO_HOST, Launch
from benchmarks.measuring.recording import RESULTS

PATH = RESULTS / "gpu" / "ledger.json"

_ABOUT = "counted from what the engine launches, nothing of it measured: python -m benchmarks.gpu.ledger"


class Kernels(NamedTuple):
    """All launches of one kernel."""

    launches: int
    read: int  # bytes
    written: int
    operations: int  # of matrix products


@dataclass(frozen=True, slots=True)
class LedgerStep:
    """One step of a model."""

    layers: int
    idle_waits: int  # of the host, each with nothing queued behind what it waits for
    covered_waits: int  # of the host, while the GPU computes the next step
    host_reads: int  # other values that the host reads, each of which waits for the GPU
    recorded: int  # kernels that a graph replays, of all layers
    first: Mapping[str, Kernels]  # of the first layer, and outside of layers
    layer: Mapping[str, Kernels]  # of each other layer

    @property
    def layer_kernels(self) -> int:
        """Return the kernels of one layer but the first."""
        return sum(one.launches for one in self.layer.values())

    @property
    def kernels(self) -> int:
        """Return the kernels of the step, without copies between host and GPU."""
        own = [one.launches for name, one in self.first.items() if name not in (TO_GPU, TO_HOST)]
        return sum(own) + (self.layers - 1) * self.layer_kernels

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the step reads and writes."""
        parts = ((1, self.first), (self.layers - 1, self.layer))
        return sum(times * (one.read + one.written) for times, part in parts for one in part.values())


Ledger = Mapping[str, Mapping[str, LedgerStep]]  # by model and step


def kernels_of(launches: Sequence[Launch]) -> dict[str, Kernels]:
    """Return launches by kernel, in the order of their first ones."""
    found: dict[str, Kernels] = {}
    for name, *numbers in launches:
        before = found.get(name, Kernels(0, 0, 0, 0))
        found[name] = Kernels(*(old + new for old, new in zip(before, (1, *numbers), strict=True)))
    return found


def between(one: Mapping[str, Kernels], other: Mapping[str, Kernels]) -> dict[str, Kernels]:
    none = Kernels(0, 0, 0, 0)
    pairs = {name: zip(other.get(name, none), one.get(name, none), strict=True) for name in {**one, **other}}
    rests = {name: Kernels(*(after - before for after, before in pair)) for name, pair in pairs.items()}
    return {name: rest for name, rest in rests.items() if any(rest)}


def written(ledger: Ledger) -> str:
    models = {model: {name: asdict(step) for name, step in steps.items()} for model, steps in ledger.items()}
    text = json.dumps({"what": _ABOUT, "kernel": Kernels._fields, "models": models}, indent=1)
    return re.sub(r"\[\s+([^\]]*?)\s+\]", lambda list_: f"[{' '.join(list_[1].split())}]", text) + "\n"


def read(path: Path = PATH) -> Ledger:
    models = json.loads(path.read_text())["models"]
    return {model: {name: _of_fields(step) for name, step in steps.items()} for model, steps in models.items()}


def _of_fields(fields: dict[str, Any]) -> LedgerStep:
    parts = {part: {name: Kernels(*numbers) for name, numbers in fields[part].items()} for part in ("first", "layer")}
    return LedgerStep(**{**fields, **parts})

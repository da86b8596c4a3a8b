"""Attention of this tree against that of another build of the extension, in turns: what one order of reduction costs.

    python -m benchmarks.kernels.deterministic_attention OTHER_EXTENSION.so [seconds] [names ...]

Build the other one from the commit to compare with (`python setup.py build_ext`) and give the path of its
`_native...so`. Each extension has a process of its own, since both define the same types; both read the same memory, as
where it lies matters more than what is compared. They take turns of a few milliseconds, on one thread, so that nothing
waits for another one that other work holds up. The ratio is new to old, below 1 is faster: of the best turns, which
nothing disturbed, and of the lower quartiles.
"""

import importlib.util
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import get_context

import kernels
from alignedserve.microbench.engine.workloads import W4, parse_workload
from benchmarks.support.recording import write_result
from kernels.int8_rows import quantise_rows

BLOCK_SIZE, HEAD_DIM, NUM_LAYERS = 16, 64, 4
HEADS = {"125M OPT (12 heads)": (12, 1), "0.5B Llama (14 heads on 2)": (2, 7)}
FORMS = ("float32", "bfloat16", "int8 in float32", "int8 in bfloat16")
# Running at once in the middle of their answers.
W4_LENGTHS = [group.prompt_len + group.output_len // 2 for group in parse_workload(W4)][:64]
DECODES = {
    "W1": [64] * 64,
    "W2": [64] * 60 + [1532] * 4,
    "W4-like": W4_LENGTHS,
    "16 x 2048": [2048] * 16,
    "1 x 4096": [4096],
    "1 x 128": [128],
}
# Contexts, and how many of their last tokens are computed.
CHUNKS = {"W3": ([1024] * 2, 1024), "512 after 1536": ([2048], 512), "2048": ([2048], 2048), "64 x 32": ([32] * 64, 32)}


class Case(NamedTuple):
    """One layer's attention."""

    name: str
    heads: tuple[int, int]
    form: str
    lengths: list[int]
    num_new: int  # tokens of each; 0: decodes

    @property
    def kinds(self) -> tuple[torch.dtype, bool]:
        """Return the dtype of queries, and whether the cache is one of int8."""
        dtype = torch.bfloat16 if self.form.endswith("bfloat16") else torch.float32
        return dtype, self.form.startswith("int8")


def cases(names: list[str]) -> list[Case]:
    """Return all cases, or those whose names are given."""
    found = []
    for heads in HEADS.values():
        for form in FORMS:
            found += [Case(name, heads, form, lengths, 0) for name, lengths in DECODES.items()]
            found += [Case(name, heads, form, lengths, count) for name, (lengths, count) in CHUNKS.items()]
    return [case for case in found if not names or case.name in names]


class Runner:
    """One case on one extension."""

    def __init__(self, extension: Any, case: Case, blocks: Tensor) -> None:
        kv_heads, group = case.heads
        dtype, is_int8 = case.kinds
        widths = [-(-length // BLOCK_SIZE) for length in case.lengths]
        self._blocks = blocks
        sizes = (len(self._blocks), NUM_LAYERS, BLOCK_SIZE, kv_heads, group, HEAD_DIM)
        kinds = (dtype == torch.bfloat16, is_int8)
        self._cache = extension.Cache(extension.supported_levels()[0], self._blocks.data_ptr(), *sizes, *kinds)
        tables = np.zeros((len(widths), max(widths)), np.int64)
        free = np.random.default_rng(0).permutation(sum(widths)).tolist()
        for row, width in enumerate(widths):
            tables[row, :width] = [free.pop() for _ in range(width)]
        num_rows = len(widths) * max(1, case.num_new)
        self._queries = torch.randn(num_rows, kv_heads, group, HEAD_DIM).to(dtype)
        self._out = torch.empty_like(self._queries)
        self._plan = make_plan(extension, self._cache, tables, case)

    def run(self) -> float:
        """Return the seconds of a layer, over all layers once."""
        began = time.perf_counter()
        for layer in range(NUM_LAYERS):
            addresses = (self._queries.data_ptr(), self._queries.stride(0), self._out.data_ptr(), self._out.stride(0))
            self._plan.run(layer, False, *addresses)
        return (time.perf_counter() - began) / NUM_LAYERS


def random_blocks(case: Case) -> Tensor:
    """Make blocks of random keys and values."""
    kv_heads, (dtype, is_int8) = case.heads[0], case.kinds
    shape = (sum(-(-length // BLOCK_SIZE) for length in case.lengths), NUM_LAYERS, 2, BLOCK_SIZE)
    content = torch.randn(*shape, kv_heads, HEAD_DIM)
    if not is_int8:
        return content.to(dtype)
    return quantise_rows(content.view(-1, kv_heads, HEAD_DIM)).view(*shape, -1)


def make_plan(extension: Any, cache: Any, tables: np.ndarray[Any, Any], case: Case) -> Any:
    """Plan the case; builds of before there were reversed sequences take no directions."""
    rows = np.arange(len(case.lengths))
    lengths = np.array(case.lengths)
    counts = (np.full(len(rows), case.num_new),) if case.num_new else ()
    make = extension.ChunkPlan if case.num_new else extension.DecodePlan
    after = (lengths, *counts, 0, 1)
    try:
        return make(cache, tables, rows, np.zeros(len(rows), np.bool_), *after)
    except TypeError:
        return make(cache, tables, rows, *after)


def serve(path: str, asked: Connection) -> None:
    """Run what is asked for: a case to be prepared, or None to run it once more."""
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.manual_seed(0)
    runner: Runner | None = None
    while True:
        message = asked.recv()
        if message is None:
            assert runner is not None, "nothing to run"
            asked.send(runner.run())
        elif message == "end":
            return
        else:
            runner = Runner(extension, *message)


def measure(case: Case, links: dict[str, Connection], seconds: float) -> dict[str, Any]:
    """Measure one case on both extensions in turns."""
    blocks = random_blocks(case).share_memory_()  # type: ignore[no-untyped-call]
    for link in links.values():
        link.send((case, blocks))
    times: dict[str, list[float]] = {name: [] for name in links}
    began = None
    while began is None or time.perf_counter() - began < seconds or len(times["new"]) < 7:
        for name, link in links.items():
            link.send(None)
            times[name].append(link.recv())
        if began is None:  # the first turn touches the memory
            times, began = {name: [] for name in links}, time.perf_counter()
    old, new = (min(times[name]) for name in ("old", "new"))
    quartiles = [statistics.quantiles(times[name], n=4)[0] for name in ("old", "new")]
    shape = next(name for name, heads in HEADS.items() if heads == case.heads)
    kind = "chunks" if case.num_new else "decodes"
    figures = {"old_ms": round(1e3 * old, 3), "new_ms": round(1e3 * new, 3)}
    ratios = {"ratio": round(new / old, 3), "ratio_of_quartiles": round(quartiles[1] / quartiles[0], 3)}
    return {"shape": shape, "form": case.form, "kind": kind, "batch": case.name, **figures, **ratios}


def main() -> None:
    """Measure, print, record unless cases are named."""
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    own = next(Path(kernels.__path__[0]).glob("_native*.so"))
    context = get_context("spawn")
    links, rows = {}, []
    for name, path in (("old", sys.argv[1]), ("new", str(own))):
        links[name], theirs = context.Pipe()
        context.Process(target=serve, args=(path, theirs), daemon=True).start()
    for case in cases(sys.argv[3:]):
        rows.append(measure(case, links, seconds))
        print(*rows[-1].values(), sep="  ", flush=True)
    for link in links.values():
        link.send("end")
    if not sys.argv[3:]:
        write_result("deterministic_attention", rows)


if __name__ == "__main__":
    main()

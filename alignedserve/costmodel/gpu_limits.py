"""How many requests a GPU's worker runs at a time, from its memory and from what an iteration costs.

requests = min(tokens in the cache / 256, the most whose decodes take 100 ms an iteration, 1024), in steps of 32

Decodes are estimated at contexts of 768 tokens, or shorter ones that fill the cache. Example: 8B parameters in bfloat16
leave 427 000 tokens on an H100 or A100 of 80 GB. On an H100 1 024 requests are estimated at 51 ms; on an A100 100 ms
are enough for 736. 13B parameters leave 56 000 tokens on an H100: 192 requests.
"""

from collections.abc import Mapping

from alignedserve.costmodel.hardware import Hardware
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork

REQUEST_TOKENS = 768  # in the caches, of an ordinary request; twice that is a long conversation
LEAST_TOKENS = 256  # a batch of more requests than this allows is only preempted
_PACE_S = 0.1  # of one answer's tokens: ten a second are more than anyone reads
_MOST = 1024
_FEW = 64  # always run, whatever the cost
_STEP = 32  # as the sizes of recorded graphs

# By compute capability, operations of one multiprocessor in a cycle: dense products in bfloat16 and float16, float32.
_PER_CYCLE: Mapping[tuple[int, int], tuple[int, int]] = {
    (7, 0): (1024, 128),
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (1024, 256),
    (8, 9): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (10, 3): (8192, 256),
    (12, 0): (1024, 256),
}
_HAS_BFLOAT16 = (8, 0)
_PCIE_BYTES_PER_S = 16e9  # not among what a driver says of a GPU; decodes do not depend on it


def running_requests(num_tokens: int, costs: CostModel | None) -> int:
    """Return the requests of a worker whose cache holds so many tokens. `costs`: None: memory alone decides."""
    room = min(num_tokens // LEAST_TOKENS, _MOST)
    count = room // _STEP * _STEP
    while count > _FEW and costs is not None and _decodes_s(costs, count, num_tokens) > _PACE_S:
        count -= _STEP
    return max(count, min(room, _FEW), 1)


def gpu_of(
    name: str,
    capability: tuple[int, int],
    *,
    num_multiprocessors: int,
    memory_bytes: int,
    clock_hz: float,
    memory_hz: float,
    bus_bits: int,
) -> Hardware | None:
    """Return the accelerator that a driver describes; None: it is of a kind whose products are not known.

    Memory moves two words of its bus in a cycle. Datasheets agree within a tenth, by the clock that they are for.
    """
    per_cycle = _PER_CYCLE.get(capability)
    if per_cycle is None or min(num_multiprocessors, clock_hz, memory_hz, bus_bits) <= 0:
        return None
    narrow, wide = (num_multiprocessors * clock_hz * operations for operations in per_cycle)
    flops = {"float16": narrow, "float32": wide}
    if capability >= _HAS_BFLOAT16:
        flops["bfloat16"] = narrow
    bytes_per_s = 2 * memory_hz * bus_bits / 8
    return Hardware(name, num_multiprocessors, memory_bytes, bytes_per_s, flops, _PCIE_BYTES_PER_S, _PCIE_BYTES_PER_S)


def _decodes_s(costs: CostModel, count: int, num_tokens: int) -> float:
    work, context_len = IterationWork(), min(REQUEST_TOKENS, num_tokens // count)
    work.add_decodes(count, count * context_len, context_len)
    return costs.iteration_s(work)

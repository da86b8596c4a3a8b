"""The interface of iteration policies: what they see, and what they answer.

A worker asks its policy before every iteration. The policy sees every request that the worker holds (RequestTable),
its memory, its limits and the time, and says who computes how many tokens, and whose cache leaves the device for that.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from alignedserve.costmodel.model import CostModel
from alignedserve.scheduling.table import Bools, Ints, RequestTable


class Mechanism(enum.Enum):
    """What a policy needs beyond chunks and pauses; an engine has it or refuses the policy by name."""

    SWAP = "swap"  # cache copied to host memory and back
    INT8_SWAP = "int8_swap"  # as int8, quantised per channel
    HIDDEN_CACHE = "hidden_cache"  # layer inputs instead of keys and values
    SHARED_BLOCKS = "shared_blocks"  # one block holds a real-time and a best-effort request from its two ends
    KNOWN_LENGTHS = "known_lengths"  # predicted lengths are the true ones: only a simulator can


class Eviction(enum.Enum):
    """How the cache of a request leaves the device."""

    DROP = "drop"  # to be recomputed
    SWAP = "swap"  # to host memory


class Evict(NamedTuple):
    """Part of a plan: before the iteration, a request's cache leaves the device, and its blocks are free."""

    row: int
    how: Eviction
    num_tokens: int | None = None  # the last so many tokens only (SWAP); None: all


class Share(NamedTuple):
    """Part of a plan: a request computes so many tokens in the iteration."""

    row: int
    num_tokens: int  # at most its num_remaining
    is_hidden: bool = False  # begin a hidden cache (with no cache yet, or after an Evict of this plan)


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """A policy's answer. Evictions first, then what a share has of its cache on the host comes back, then the pass.
    Whoever is uploaded gets all that it has on the host back as well, but computes nothing yet.

    What it needs fits: `DeviceMemory.blocks_needed` of the shares within free blocks and those that the evictions free.
    No row is in both, but for a change of cache kind. A plan without shares lets the worker rest until something
    happens.
    """

    shares: tuple[Share, ...] = ()
    evictions: tuple[Evict, ...] = ()
    uploads: tuple[int, ...] = ()  # rows, none of which is in shares or evictions; only beside shares


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Blocks of one worker, and the rule of how many a request needs."""

    num_blocks: int
    num_free: int
    block_size: int  # token slots per block
    num_free_host: int = 0  # tokens, as they lie on the host, that it has room for; 0: no swapping
    hidden_ratio: float | None = None  # bytes of a hidden cache by bytes of keys and values; None: cannot be had
    has_shared_blocks: bool = False
    swap_width: float = 1.0  # bytes of a token on the host by its bytes on the device; below 1: int8

    def copy_tokens(self, num_tokens: int, *, is_hidden: bool = False) -> float:
        """Full-width tokens that copying so many to the host or back counts as (IterationWork)."""
        assert not is_hidden or self.hidden_ratio is not None, "a hidden cache where there is none"
        return num_tokens * self.swap_width * ((self.hidden_ratio or 1.0) if is_hidden else 1.0)

    def blocks_for(self, num_tokens: int, *, is_hidden: bool = False, is_real_time: bool = True) -> int:
        """Blocks that hold a cache of so many tokens.

        With shared blocks the last, partly filled block of a best-effort request is filled up by a real-time one from
        the other end, and counted there (BROS, section 5.1).
        """
        slots = num_tokens
        if is_hidden:
            assert self.hidden_ratio is not None, "a hidden cache where there is none"
            slots = int(-(-num_tokens * self.hidden_ratio // 1))
        if self.has_shared_blocks and not is_real_time:
            return slots // self.block_size
        return -(-slots // self.block_size)

    def slots_in(self, num_blocks: int, *, is_real_time: bool = True) -> int:
        """Tokens whose keys and values so many blocks hold at most: the other way round."""
        if self.has_shared_blocks and not is_real_time:
            return (num_blocks + 1) * self.block_size - 1
        return num_blocks * self.block_size

    def blocks_for_each(self, num_tokens: Ints, *, is_hidden: Bools, is_real_time: Bools) -> Ints:
        """`blocks_for` of many caches at once."""
        slots = num_tokens
        if is_hidden.any():
            assert self.hidden_ratio is not None, "a hidden cache where there is none"
            slots = np.where(is_hidden, np.ceil(num_tokens * self.hidden_ratio).astype(np.int64), num_tokens)
        whole: Ints = -(-slots // self.block_size)
        return np.where(is_real_time, whole, slots // self.block_size) if self.has_shared_blocks else whole

    def blocks_needed(self, table: RequestTable, share: Share, *, is_evicted: bool = False) -> int:
        """Free blocks that this share takes: for the tokens it computes and for what comes back from the host."""
        row = share.row
        num_cached = 0 if is_evicted else int(table.num_cached[row])
        is_hidden = share.is_hidden or (bool(table.is_hidden[row]) and not is_evicted)
        wanted = self.blocks_for(
            num_cached + share.num_tokens, is_hidden=is_hidden, is_real_time=bool(table.is_real_time[row])
        )
        held = 0 if is_evicted else int(table.num_blocks[row])
        return max(wanted - held, 0)


@dataclass(frozen=True, slots=True)
class IterationLimits:
    """What the engine bounds."""

    max_running_requests: int  # requests in one iteration
    max_tokens: int  # tokens in one iteration; a decode is one


@dataclass(slots=True)
class IterationHistory:
    """How long iterations took here. Kept by the worker, read by policies."""

    num_iterations: int = 0
    last_s: float = 0.0
    mean_s: float = 0.0  # moving average, BROS's T_avg: a tenth of the latest
    max_s: float = 0.0  # AccelGen's T_max: of the last 64 to 128

    _earlier_max_s: float = 0.0
    _current_max_s: float = 0.0

    def note(self, duration_s: float) -> None:
        """An iteration is over."""
        self.mean_s = duration_s if not self.num_iterations else 0.9 * self.mean_s + 0.1 * duration_s
        self.num_iterations += 1
        self.last_s = duration_s
        self._current_max_s = max(self._current_max_s, duration_s)
        self.max_s = max(self._earlier_max_s, self._current_max_s)
        if self.num_iterations % 64 == 0:
            self._earlier_max_s, self._current_max_s = self._current_max_s, 0.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """All that a decision may depend on."""

    table: RequestTable
    memory: DeviceMemory
    limits: IterationLimits
    history: IterationHistory
    costs: CostModel
    now: float
    can_evict: bool = True  # False on prefill and decode workers: whoever is here holds what it needs


class IterationPolicy(Protocol):
    """Decides one iteration of one worker.

    Deterministic: the same history of views gives the same plans. A policy may keep what the table does not hold (a
    batch size that adapts, an average), never a clock, and nothing per row. It runs on colocated workers, where rows
    are prompts and decodes; on prefill workers, where all are prompts that hold their blocks already; and on decode
    workers, where all are decodes in the running batch and none can leave: there it may only pause.
    """

    def plan(self, view: WorkerView) -> IterationPlan:
        """Who computes what in the next iteration."""

"""The interface of iteration policies: the view that they decide on, and the plan that they return.

A worker asks its policy before every iteration. The policy sees every request that the worker holds (RequestTable),
its memory, its limits and the time, and plans which requests compute how many tokens, and which caches are evicted.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.shared_blocks import HeldBlocks, SharedBlocks
from alignedserve.scheduling.table import Bools, Ints, RequestTable


class Mechanism(enum.Enum):
    """A capability that a policy needs beyond chunks and pauses; an engine without it refuses the policy by name."""

    SWAP = "swap"  # cache copied to host memory and back
    POOL = "pool"  # decodes that leave to the pool of their node, and come back, while others compute
    INT8_SWAP = "int8_swap"  # as int8, quantised per channel
    HIDDEN_CACHE = "hidden_cache"  # layer inputs instead of keys and values
    SHARED_BLOCKS = "shared_blocks"  # one block holds a real-time and a best-effort request from its two ends
    KNOWN_LENGTHS = "known_lengths"  # predicted lengths are the true ones: only a simulator can


class CandidateChoice(enum.Enum):
    """Requests elsewhere for which blocks are short, among which a separate decode worker lets its policy choose."""

    NONE = "none"  # all wait for free blocks
    OVER_BEST_EFFORT = "over best-effort"  # real-time ones, while best-effort ones hold blocks
    ALL = "all"


class EvictionMode(enum.Enum):
    """The way in which a cache leaves the device."""

    DROP = "drop"  # to be recomputed
    SWAP = "swap"  # to host memory


class PlannedEviction(NamedTuple):
    """Part of a plan: a cache that leaves the device before the iteration, so that its blocks are free."""

    row: int
    how: EvictionMode
    num_tokens: int | None = None  # the last tokens only (SWAP); None: all


class ScheduledRequest(NamedTuple):
    """Part of a plan: a request and the tokens that it computes in the iteration."""

    row: int
    num_tokens: int  # at most its num_remaining
    is_hidden: bool = False  # begin a hidden cache (with no cache yet, or after a PlannedEviction of this plan)


class PlannedShare(NamedTuple):
    """Part of a plan: a scheduled request takes the last block of one of the other class as the last of its own."""

    row: int
    partner: int  # its row; neither shares a block yet


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """A policy's answer: evictions, then scheduled requests get their cache back from the host, then the pass.

    Uploaded requests get their cache back from the host too, but compute nothing yet. Scheduled requests fit into the
    free blocks and the blocks of evictions; where blocks are shared, the slots of no pair may meet. A row is both
    scheduled and evicted only to change the kind of its cache. With an empty plan the worker is idle until the next
    event. Requests that leave to the pool free their blocks later, and may be scheduled until then. Requests that come
    back hold blocks from now on, and compute later.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    evictions: tuple[PlannedEviction, ...] = ()
    uploads: tuple[int, ...] = ()  # rows neither scheduled nor evicted; only beside scheduled ones
    shares: tuple[PlannedShare, ...] = ()  # blocks fewer for as many of the scheduled ones
    departures: tuple[int, ...] = ()  # rows that are to leave to the pool
    returns: tuple[int, ...] = ()  # rows that are to come back from it
    work: IterationWork | None = field(default=None, compare=False)  # of the scheduled ones, where it is added up
    # Predicted seconds of its real-time part alone, where interference is bounded and its gaps run; else 0.
    alone_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Blocks of one worker, and the number of them that a request needs."""

    num_blocks: int
    num_free: int
    block_size: int  # token slots per block
    num_free_host: int = 0  # tokens, as stored on the host, that still fit there; 0: no swapping
    hidden_ratio: float | None = None  # bytes of a hidden cache by bytes of keys and values; None: cannot be had
    has_shared_blocks: bool = False  # two requests may share a block (scheduling/shared_blocks.py)
    swap_width: float = 1.0  # bytes of a token on the host by its bytes on the device; below 1: int8
    state_blocks: int = 0  # that every cache has beside those of its tokens, for recurrent states

    def with_free(self, num_free: int, num_free_host: int) -> "DeviceMemory":
        """Return a copy with `num_free` free blocks and room for `num_free_host` tokens on the host."""
        kind = (self.hidden_ratio, self.has_shared_blocks, self.swap_width, self.state_blocks)
        return DeviceMemory(self.num_blocks, num_free, self.block_size, num_free_host, *kind)  # `replace` takes 5 times

    def copy_tokens(self, num_tokens: int, *, is_hidden: bool = False) -> float:
        """Return the full-width tokens as which a copy to or from the host counts (IterationWork)."""
        assert not is_hidden or self.hidden_ratio is not None, "a hidden cache where there is none"
        return num_tokens * self.swap_width * ((self.hidden_ratio or 1.0) if is_hidden else 1.0)

    def blocks_for(self, num_tokens: int, *, is_hidden: bool = False) -> int:
        """Return the blocks that hold a cache of this many tokens."""
        slots = num_tokens
        if is_hidden:
            assert self.hidden_ratio is not None, "a hidden cache where there is none"
            slots = int(-(-num_tokens * self.hidden_ratio // 1))
        return -(-slots // self.block_size) + self.state_blocks

    def slots_in(self, num_blocks: int) -> int:
        """Return the most tokens whose keys and values these blocks hold: the inverse of `blocks_for`."""
        return max(num_blocks - self.state_blocks, 0) * self.block_size

    def blocks_for_each(self, num_tokens: Ints, *, is_hidden: Bools) -> Ints:
        """Return `blocks_for` of many caches at once."""
        slots = num_tokens
        if self.hidden_ratio is not None and is_hidden.any():
            slots = np.where(is_hidden, np.ceil(num_tokens * self.hidden_ratio).astype(np.int64), num_tokens)
        whole: Ints = (slots + (self.block_size - 1)) // self.block_size
        return whole + self.state_blocks if self.state_blocks else whole


@dataclass(frozen=True, slots=True)
class IterationLimits:
    """Bounds of one iteration."""

    max_running_requests: int  # requests in one iteration
    max_tokens: int  # tokens in one iteration; a decode is one


_STRETCH_STEP = 0.02  # fifty iterations
_MOST_STRETCH = 3.0  # of a single iteration: one long rest of the machine tells little of the next


@dataclass(slots=True)
class IterationHistory:
    """Durations of past iterations. Updated by the worker, read by policies.

    An urgent iteration counts as part of the iteration in which it runs.
    """

    num_iterations: int = 0
    last_s: float = 0.0
    mean_s: float = 0.0  # moving average, BROS's T_avg: a tenth of the latest
    max_s: float = 0.0  # AccelGen's T_max: of the last 64 to 128
    stretch: float = 1.0  # how long gaps between ends are, as multiples of the time predicted: a moving average
    urgent_ttft_s: float = math.inf  # the tightest first-token objective of urgent ones within the latest iteration

    _ended_s: float = -math.inf
    _earlier_max_s: float = 0.0
    _current_max_s: float = 0.0
    _urgent_s: float = 0.0  # of urgent iterations, since the last ordinary one
    _urgent_took_s: float = 0.0  # of urgent iterations with a prediction
    _urgent_predicted_s: float = 0.0
    _urgent_ttft_s: float = math.inf

    def urgent_began(self, ttft_s: float) -> None:
        """Note an urgent iteration, whose prompts may be gone when the next one is planned. `ttft_s`: the tightest."""
        self._urgent_ttft_s = min(self._urgent_ttft_s, ttft_s)

    def note_error(self, predicted_s: float, duration_s: float, now: float, *, is_urgent: bool = False) -> None:
        """Note how long the iteration that ends now was predicted to take, and took.

        Time between consecutive iterations counts, as the next token waits for it too; a rest does not.
        """
        predicted_s, duration_s = predicted_s + self._urgent_predicted_s, duration_s + self._urgent_took_s
        self._urgent_predicted_s, self._urgent_took_s = (predicted_s, duration_s) if is_urgent else (0.0, 0.0)
        if is_urgent:
            return
        gap_s, self._ended_s = now - self._ended_s, now
        took_s = gap_s if duration_s <= gap_s <= 2 * duration_s else duration_s
        self.stretch += _STRETCH_STEP * (min(took_s / predicted_s, _MOST_STRETCH) - self.stretch)

    def note(self, duration_s: float, *, is_urgent: bool = False) -> None:
        """Note the duration of an iteration that has ended."""
        duration_s += self._urgent_s
        self._urgent_s = duration_s if is_urgent else 0.0
        if is_urgent:
            return
        self.urgent_ttft_s, self._urgent_ttft_s = self._urgent_ttft_s, math.inf
        self.mean_s = duration_s if not self.num_iterations else 0.9 * self.mean_s + 0.1 * duration_s
        self.num_iterations += 1
        self.last_s = duration_s
        self._current_max_s = max(self._current_max_s, duration_s)
        self.max_s = max(self._earlier_max_s, self._current_max_s)
        if self.num_iterations % 64 == 0:
            self._earlier_max_s, self._current_max_s = self._current_max_s, 0.0


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool of the worker's node, which keeps decodes for it, and the requests on their way there and back."""

    block_s: float  # a block is copied in so long, either way
    has_room: bool  # false for a while after it had none
    is_busy: bool  # something is on its way, either way
    leaving: tuple[RequestId, ...]  # requests that are in the table still
    num_coming: int  # blocks that are free once all of those, and those being copied already, have left
    away: Mapping[RequestId, bool]  # requests whose cache is there; True: it is on its way back
    num_returning: int  # blocks of those on their way back


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The whole input of a decision."""

    table: RequestTable
    memory: DeviceMemory
    limits: IterationLimits
    history: IterationHistory
    costs: CostModel
    now: float
    can_evict: bool = True  # False on prefill and decode workers: each request holds its blocks
    shared_blocks: SharedBlocks | None = None  # None: there are none
    held_blocks: HeldBlocks | None = None  # of requests that may share some; None: none does
    pool: PoolView | None = None  # None: it keeps no decodes
    computes_prompts: bool = True  # False on separate decode workers, but for caches that they lost


class IterationPolicy(Protocol):
    """Decides one iteration of one worker.

    Deterministic: the same history of views gives the same plans. A policy may keep what the table does not hold (a
    batch size that adapts, an average), never a clock, and nothing per row. It runs on colocated workers, where rows
    are prompts and decodes; on prefill workers, where all are prompts that hold their blocks already; and on decode
    workers, where all are decodes in the running batch and none can leave: there it may only pause.
    """

    def plan(self, view: WorkerView) -> IterationPlan:
        """Plan the next iteration."""

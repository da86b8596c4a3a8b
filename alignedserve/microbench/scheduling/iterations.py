"""Cost of scheduling one decode iteration: the real logics of decode worker, pool and candidate buffers.

Every message is delivered at once and every copy is done at once; only the time inside the decode worker's logic is
counted. Scheduling is from the end of an iteration to the next one's commands: releases, admission from candidate
requests and candidate batch, growth, eviction, the batch switch, prefetches and returns (AlignedServe, section 4.4:
"the time to schedule an iteration", below 5 ms for 95 % of them). Messages and finished copies are dealt with while the
iteration computes; what they take is told beside it, for all that fall into one iteration together.
"""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.metrics import percentile
from alignedserve.core.request import Request, SampledToken, SamplingParams
from alignedserve.messages.caches import (
    ArenaOffered,
    BlockCopy,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelPrefetch,
    PrefetchBlocks,
    ReservationRefused,
    ReserveBlocks,
    ReturnRequest,
)
from alignedserve.messages.events import CommonEvent, PeerConnected, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    IterationCompleted,
    LoadBlocks,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    RunIteration,
)
from alignedserve.messages.pools import FormBatch
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import WorkerLoad, WorkerRegistered
from alignedserve.workload.traces import TraceRow, shipped_trace
from decode_worker.batching.batch_order import DecodeLimits, SwitchLimits
from decode_worker.logic import DecodeLogic
from kvpool.logic import PoolLogic
from kvpool.policies import make_batch_former
from prefill_worker.candidate_buffers import CandidateBuffers

_DECODE, _POOL, _PREFILL, _ROUTER = "decode-0", "pool-0", "prefill-0", "router"
_BLOCK_SIZE = 16
_CANDIDATE_REQUESTS = 16
_ITERATION_S = 0.02
_WARM_UP = 200  # iterations until batches follow each other


@dataclass(frozen=True, slots=True)
class IterationScheduleFigures:
    """Milliseconds in the decode worker's logic per iteration. Every field is plain JSON."""

    num_running: int  # places; nearly always all are taken
    num_pooled: int
    mean_batch_size: float
    schedule_p50_ms: float
    schedule_p95_ms: float
    schedule_p99_ms: float
    messages_p50_ms: float
    messages_p95_ms: float
    num_evictions: int
    switch_share: float


def measure_iteration_schedule(
    *, num_running: int = 128, num_pooled: int = 1000, num_iterations: int = 2000, seed: int = 0
) -> IterationScheduleFigures:
    """Run that many iterations with the pool kept at its size; lengths of the shipped Azure slice."""
    bench = _SchedulingBenchmark(num_running, num_pooled, seed)
    bench.run(_WARM_UP + num_iterations)
    times_ms = sorted(1e3 * one for one in bench.schedule_s[_WARM_UP:])
    messages_ms = sorted(1e3 * one for one in bench.messages_s[_WARM_UP:])
    records = bench.decode.iteration_log.records()[-num_iterations:]
    return IterationScheduleFigures(
        num_running=num_running,
        num_pooled=num_pooled,
        mean_batch_size=sum(record.batch_size for record in records) / len(records),
        schedule_p50_ms=percentile(times_ms, 50),
        schedule_p95_ms=percentile(times_ms, 95),
        schedule_p99_ms=percentile(times_ms, 99),
        messages_p50_ms=percentile(messages_ms, 50),
        messages_p95_ms=percentile(messages_ms, 95),
        num_evictions=bench.num_evictions,
        switch_share=sum(record.is_switching for record in records) / len(records),
    )


class _SchedulingBenchmark:
    """A decode worker, a pool and a prefill worker's buffers, joined by a queue."""

    def __init__(self, num_running: int, num_pooled: int, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311  (nothing secret)
        self._rows = [row for row in shipped_trace() if row.prompt_len > 1]
        self._num_running, self._num_pooled = num_running, num_pooled
        mean_blocks = blocks_for(int(sum(row.prompt_len + row.output_len for row in self._rows) / len(self._rows)), 16)
        self._num_blocks = int(0.8 * num_running * mean_blocks)  # tight, so that requests are evicted
        self.decode = self._make_decode()
        former = make_batch_former("density_first", block_size=_BLOCK_SIZE, starvation_s=2.0)
        arena = ArenaOffered("", 4 * num_pooled * mean_blocks, 1, "")
        self._pool = PoolLogic(arena=arena, block_size=_BLOCK_SIZE, batch_former=former, lease_s=1e9)
        self._buffers = CandidateBuffers(_POOL)
        self._queue: deque[tuple[str, CommonEvent | BlocksLoaded | BlocksOffloaded | BlocksRelayed]] = deque()
        self._load = WorkerLoad()
        self._completed: IterationCompleted | None = None
        self._now = self._num_requests = self._num_batches = 0
        self._in_pool: dict[RequestId, None] = {}
        self.schedule_s: list[float] = []
        self.messages_s: list[float] = []
        self._spent_s = 0.0
        self._link()

    @property
    def num_evictions(self) -> int:
        """Return the requests that were evicted."""
        return self._load.num_evictions

    def run(self, num_iterations: int) -> None:
        """Run that many iterations."""
        self._fill()
        for _ in range(num_iterations):
            self._now += 1
            self._spent_s = 0.0
            completed, self._completed = self._completed, None
            if completed is not None:
                self._tell_decode(completed)
            self.schedule_s.append(self._spent_s)
            self._spent_s = 0.0
            self._ask()
            self._fill()
            self._deliver()
            self.messages_s.append(self._spent_s)

    # --- the parts

    def _make_decode(self) -> DecodeLogic:
        registered = WorkerRegistered(
            self._num_blocks, _BLOCK_SIZE, self._num_running, _POOL, can_prefill=False, can_decode=True
        )
        limits = DecodeLimits(self._num_running, SwitchLimits(min_requests=36, low_running=96, starvation_s=2.0))
        return DecodeLogic(registered=registered, limits=limits, eos_token_ids=frozenset())

    def _link(self) -> None:
        self._queue.append((_DECODE, PeerConnected(Role.ROUTER, _ROUTER)))
        self._queue.append((_POOL, PeerConnected(Role.ROUTER, _ROUTER)))
        for worker, role in ((_PREFILL, Role.PREFILL_WORKER), (_DECODE, Role.DECODE_WORKER)):
            self._queue.append((_POOL, PeerConnected(role, worker)))
        self._buffers.pool_connected()
        for command in self._buffers.connected(_DECODE):
            if isinstance(command, OpenBuffer):
                offered = ArenaOffered("", self._num_blocks // 2, 1, "")
                self._perform_all(_PREFILL, self._buffers.opened(BufferOpened(_DECODE, command.link_epoch, offered)))
        self._deliver()

    def _fill(self) -> None:
        """Add requests to the pool until it has its size again."""
        while len(self._in_pool) < self._num_pooled:
            row = self._rng.choice(self._rows)
            request = self._request(row)
            self._in_pool[request.request_id] = None
            num_blocks = blocks_for(request.prompt_len, _BLOCK_SIZE)
            answers = self._pool.on_event(
                Received(_PREFILL, ReserveBlocks(request.request_id, 1 << 16, num_blocks)), self._time
            )
            sent = [one.message for one in answers if isinstance(one, Send)]
            reserved = next(message for message in sent if isinstance(message, BlocksReserved))
            copy = BlockCopy(reserved.generation, request.prompt_len, _runs(reserved.block_ids))
            written = BlocksWritten(reserved.lease_id, copy, 1 << 16, request, (1,))
            self._pool.on_event(Received(_PREFILL, written), self._time)

    def _request(self, row: TraceRow) -> Request:
        self._num_requests += 1
        # One object for all tokens of a length: what they are does not matter here.
        prompt = (7,) * row.prompt_len
        sampling = SamplingParams(max_tokens=max(row.output_len, 2), ignore_eos=True)
        return Request(RequestId(f"request-{self._num_requests:07d}"), prompt, sampling, "gateway", self._time)

    @property
    def _time(self) -> float:
        return self._now * _ITERATION_S

    def _ask(self) -> None:
        """Ask for a batch as the router does (router/placement.py)."""
        load = self._load
        share = int(0.4 * self._num_blocks) - load.num_candidate_blocks
        if share < 1:
            return
        self._num_batches += 1
        batch_id, name = BatchId(self._num_batches), WorkerName(_DECODE)
        if not load.num_batch_candidates:
            self._queue.append((_POOL, Received(_ROUTER, FormBatch(batch_id, name, share, self._num_running, 36))))
        elif load.running is not None and load.num_candidate_requests < _CANDIDATE_REQUESTS:
            wanted = _CANDIDATE_REQUESTS + self._num_running - load.num_running - load.num_candidate_requests
            form = FormBatch(batch_id, name, share, max(wanted, 1), 1, load.running)
            self._queue.append((_POOL, Received(_ROUTER, form)))

    # --- delivery

    def _tell_decode(self, event: object) -> None:
        began = time.perf_counter()
        commands = self.decode.on_event(event, self._time)  # type: ignore[arg-type]
        self._spent_s += time.perf_counter() - began
        self._perform_all(_DECODE, commands)

    def _deliver(self) -> None:
        while self._queue:
            target, event = self._queue.popleft()
            if target == _DECODE:
                self._tell_decode(event)
            elif target == _POOL:
                assert not isinstance(event, BlocksLoaded | BlocksOffloaded | BlocksRelayed), "the pool copies nothing"
                self._perform_all(_POOL, self._pool.on_event(event, self._time))
            else:
                self._perform_all(_PREFILL, self._tell_buffers(event))

    def _tell_buffers(self, event: object) -> list[object]:
        if isinstance(event, BlocksRelayed):
            return [*self._buffers.relayed(event)]
        assert isinstance(event, Received), "buffers hear messages and the end of copies"
        match event.message:
            case PrefetchBlocks():
                return [*self._buffers.prefetch(event.peer, event.message)]
            case CancelPrefetch():
                return [*self._buffers.cancel(event.peer, event.message)]
            case ReturnRequest():
                return [*self._buffers.return_to_pool(event.peer, event.message)]
            case BlocksReserved() | BlocksTaken() | ReservationRefused():
                return [*self._buffers.answered(event.message)]
        return []

    def _perform_all(self, source: str, commands: Iterable[object]) -> None:
        for command in commands:
            self._perform(source, command)

    def _perform(self, source: str, command: object) -> None:
        match command:
            case Send(peer, message) if peer == _ROUTER:
                self._note(message)
            case Send(peer, message):
                self._queue.append((peer, Received(source, message)))
            case RunIteration():
                tokens = tuple(SampledToken(request_id, 5) for request_id, _ in command.slices)
                self._completed = IterationCompleted(tokens)
            case LoadBlocks(peer, loads):
                for load in loads:
                    self._in_pool.pop(load.request_id, None)
                self._queue.append((_DECODE, BlocksLoaded(peer, loads, frozenset())))
            case OffloadBlocks():
                self._queue.append((_DECODE, BlocksOffloaded(command, _runs(command.target_block_ids))))
            case RelayBlocks():
                self._queue.append((_PREFILL, BlocksRelayed(command, _runs(command.target_block_ids))))

    def _note(self, message: Message) -> None:
        if isinstance(message, WorkerLoad):
            self._load = message


def _runs(block_ids: tuple[int, ...]) -> tuple[BlockRun, ...]:
    """Return a run per block: more runs than there would be, so no less work."""
    return tuple(BlockRun(block_id, 1, 0) for block_id in block_ids)

"""Ways to place prompts and to move decodes that were tried beside the router's own, for simulations of them.

None is part of the product: decision 18 says what each was worth, `placement_trials` and `moves` measure it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from alignedserve.config.sections import ClusterConfig
from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.events import Send
from alignedserve.sim.config import SimConfig
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import Workload
from router.leans import Leans, PlannedMove, Requests, moves_for_memory, moves_for_time
from router.logic import RouterLogic
from router.placement import Placement
from router.policies import make_prefill_order
from router.policies.bypass import UrgentBypass
from router.prefill_choice import ChosenPrefill, PrefillChoice
from router.state import NO_HIT, TrackedRequest, WorkerRecord


class TrialRouter(RouterLogic):
    """A router with parts of its own."""

    choice: ClassVar[type["TrialChoice"] | None] = None
    leans: ClassVar[type[Leans]] = Leans

    def __init__(self, cluster: ClusterConfig) -> None:
        config = cluster.router
        self.placement = Placement(max_candidate_requests=config.max_candidate_requests, batching=cluster.batching)
        super().__init__(
            config=config,
            placement=self.placement,
            order=make_prefill_order(config.prefill_order or "least_slack"),
            bypass=UrgentBypass(),
            leans=self.leans(),
        )
        self._trial: TrialChoice | None = None
        if self.choice is not None:
            self._trial = self._prefill_choice = self.choice(
                registry=self._registry,
                placement=self.placement,
                max_tokens_per_worker=config.max_prefill_tokens_per_worker,
            )

    @override
    def _dispatch_prefills(self, now: float) -> list[Send]:
        if self._trial is not None:
            self._trial.now = now
        return super()._dispatch_prefills(now)


class TrialChoice(PrefillChoice):
    """A choice of workers that knows the time, and looks at all of them."""

    now = 0.0

    def able(self, *, is_real_time: bool) -> list[WorkerRecord]:
        """Return the workers with a free place, in the order of the product's own choice."""
        workers = [
            one
            for one in self._placement.workers.values()
            if not one.is_draining and len(one.prefilling) + len(one.decoding) < one.registered.max_running_requests
        ]
        return sorted(workers, key=lambda one: (one.wait_s(is_real_time=is_real_time), len(one.decoding), one.name))

    def is_in_time(self, worker: WorkerRecord, tracked: TrackedRequest, share: float = 0.5) -> bool:
        """Return whether wait and prompt take at most this share of the time that is left to the first token."""
        wait_s = worker.wait_s(is_real_time=tracked.is_real_time)
        return wait_s + prompt_s(worker, tracked) <= share * (tracked.first_due_s - self.now)


def prompt_s(worker: WorkerRecord, tracked: TrackedRequest) -> float:
    """Return how long its prompt takes there alone."""
    rate = worker.load.prompt_tokens_per_s if worker.load is not None else 0
    return tracked.num_prefill_tokens / (rate or 1)


# --- prompts and memory


class WhereThereIsRoom(TrialChoice):
    """The least wait among the workers with free blocks for the prompt, if it is in time there."""

    def _least_loaded(self, tracked: TrackedRequest) -> Iterator[WorkerRecord]:
        able = self.able(is_real_time=tracked.is_real_time)
        with_room = [one for one in able if has_room(one, tracked) and self.is_in_time(one, tracked)]
        yield from (with_room or able)[:1]


def has_room(worker: WorkerRecord, tracked: TrackedRequest) -> bool:
    """Return whether its blocks are free once all prompts before it are computed, and some for growth beside."""
    registered, load = worker.registered, worker.load
    wanted = blocks_for(worker.num_prefill_tokens + tracked.num_prefill_tokens, registered.block_size)
    return load is None or wanted <= load.num_free_blocks - registered.num_blocks // 16


# --- leans that follow forecast work


class Forecast:
    """Workers' worth of prompts and of decodes that come per second: moving means, with hysteresis."""

    _MEMORY_S = 10.0  # of the means
    _TURNS_S = 5.0  # at least between two changes
    _MARGIN = 0.75  # of a worker, for a change

    def __init__(self) -> None:
        self._prompts_s = self._decodes_s = 0.0  # workers' worth
        self._last_s: float | None = None
        self._num_leaning: int | None = None
        self._turned_s = 0.0

    def observe(self, tracked: TrackedRequest, worker: WorkerRecord, now: float) -> None:
        """Learn from a request that comes.

        An answer is worth its length times the gap that it allows, by the answers that a worker holds at once.
        """
        elapsed_s = max(now - self._last_s, 1e-3) if self._last_s is not None else self._MEMORY_S
        kept, self._last_s = max(1.0 - elapsed_s / self._MEMORY_S, 0.0), now
        length = min(tracked.predicted_output_len, 1024.0)  # the first are not predicted yet
        registered = worker.registered
        context_len = tracked.num_prefill_tokens + length
        at_once = min(registered.num_blocks * registered.block_size / context_len, registered.max_running_requests)
        decode_s = length * (tracked.request.slo.tpot_s or 0.1) / at_once
        gained = 1.0 / self._MEMORY_S
        self._prompts_s = kept * self._prompts_s + gained * prompt_s(worker, tracked)
        self._decodes_s = kept * self._decodes_s + gained * decode_s

    def num_leaning(self, num_workers: int, now: float) -> int:
        """Return how many workers are to lean to prompts."""
        work_s = self._prompts_s + self._decodes_s
        wanted = num_workers * self._prompts_s / work_s if work_s else num_workers / 2
        known = self._num_leaning
        if known is None or (abs(wanted - known) > self._MARGIN and now - self._turned_s > self._TURNS_S):
            self._num_leaning, self._turned_s = min(max(round(wanted), 1), max(num_workers - 1, 1)), now
        return self._num_leaning or 1


class LeaningChoice(TrialChoice):
    """Prompts go to the workers that lean to them, or, if late there, to the least wait of all."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.forecast = Forecast()

    def leaning(self) -> list[str]:
        """Return the names of the workers that lean to prompts."""
        names = sorted(self._placement.workers)
        return names[: self.forecast.num_leaning(len(names), self.now)]

    def _least_loaded(self, tracked: TrackedRequest) -> Iterator[WorkerRecord]:
        able = self.able(is_real_time=tracked.is_real_time)
        if able:
            self.forecast.observe(tracked, able[0], self.now)
            leaning = self.leaning()
            chosen = [one for one in able if one.name in leaning and self.is_in_time(one, tracked)]
            yield (chosen or able)[0]


class LeaningMoves(Leans):
    """Answers move from the workers that lean to prompts to the one of the others with the fewest."""

    def __init__(self) -> None:
        super().__init__()
        self.leaning: Callable[[], Collection[str]] = tuple

    @override
    def moves_among(self, near: Collection[WorkerRecord], requests: Requests) -> list[PlannedMove]:
        """See Leans: all that may move, from one worker at a time."""
        leaning = self.leaning()
        takers = [one for one in near if one.name not in leaning and one.can_take_over and one.lean > 0.125]
        for giver in sorted((one for one in near if one.name in leaning), key=lambda one: -len(one.decoding)):
            taker = min(takers, key=lambda one: (len(one.decoding), one.name), default=None)
            movable = [requests[one] for one in sorted(giver.decoding)]
            movable = [one for one in movable if one.stage is Stage.DECODING and one.destination is None]
            if taker is not None and (fresh := [one for one in movable if not one.num_moves]):
                return [PlannedMove(one, taker) for one in fresh[:8]]
        return []


class LeaningRouter(TrialRouter):
    """Leans follow forecast work."""

    choice = LeaningChoice
    leans = LeaningMoves

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__(cluster)
        assert isinstance(self._leans, LeaningMoves)
        assert isinstance(self._trial, LeaningChoice)
        self._leans.leaning = self._trial.leaning


# --- prompts that are kept until a worker can begin them


class LateBinding(TrialChoice):
    """Prompts wait in the router until a worker can nearly begin one: urgent ones by slack, then the shortest first."""

    held_s = 0.1  # the most that a worker has before it
    urgent_s = 0.5

    @override
    def next(self, gateways: Mapping[str, str]) -> ChosenPrefill | None:
        """See PrefillChoice."""
        queue = self._registry.queue
        if not len(queue):
            return None
        by_class = {is_real_time: self.able(is_real_time=is_real_time)[:1] for is_real_time in (False, True)}
        ready = {
            is_real_time: able[0]
            for is_real_time, able in by_class.items()
            if able and able[0].wait_s(is_real_time=is_real_time) <= self.held_s
        }
        queued = [one for one in self._registry.requests.values() if one.stage is Stage.QUEUED]
        queued = [one for one in queued if one.is_real_time in ready]
        if not queued:
            return None
        tracked = min(queued, key=partial(self._rank, next(iter(ready.values()))))
        before = len(queue)
        queue.discard(tracked.request.request_id)
        return ChosenPrefill(tracked, ready[tracked.is_real_time], NO_HIT) if len(queue) < before else None

    def _rank(self, worker: WorkerRecord, tracked: TrackedRequest) -> tuple[int, float, str]:
        slack_s = tracked.first_due_s - self.now - prompt_s(worker, tracked)
        if not tracked.is_real_time:
            return 3, tracked.request.arrival_s, tracked.request.request_id
        if slack_s < 0.0:
            return 2, tracked.num_prefill_tokens, tracked.request.request_id
        if slack_s < self.urgent_s:
            return 0, slack_s, tracked.request.request_id
        return 1, tracked.num_prefill_tokens, tracked.request.request_id


class EarliestDue(LateBinding):
    """The same by slack alone: those that are not late, the least first."""

    urgent_s = float("inf")


# --- moves


class NoMoves(Leans):
    """Nothing moves."""

    @override
    def moves_among(self, near: Collection[WorkerRecord], requests: Requests) -> list[PlannedMove]:
        """See Leans."""
        return []


class MovesToIdle(Leans):
    """Moves for time, and to workers without prompts alone."""

    @override
    def moves_among(self, near: Collection[WorkerRecord], requests: Requests) -> list[PlannedMove]:
        """See Leans."""
        return moves_for_time(near, [one for one in near if one.can_take_over and not one.prefilling], requests)


class MovesForTime(Leans):
    """Moves for time alone."""

    @override
    def moves_among(self, near: Collection[WorkerRecord], requests: Requests) -> list[PlannedMove]:
        """See Leans."""
        return moves_for_time(near, [one for one in near if one.can_take_over], requests)


class MovesForMemory(Leans):
    """Moves for memory alone."""

    @override
    def moves_among(self, near: Collection[WorkerRecord], requests: Requests) -> list[PlannedMove]:
        """See Leans."""
        return moves_for_memory(near, [one for one in near if one.can_take_over], requests)


def router_with(choice: type[TrialChoice] | None = None, leans: type[Leans] = Leans) -> type[TrialRouter]:
    """Return a router with this choice and these moves."""
    return type("ComposedRouter", (TrialRouter,), {"choice": choice, "leans": leans})


ROUTERS: dict[str, type[TrialRouter]] = {
    "as it is": TrialRouter,
    "no moves": router_with(leans=NoMoves),
    "moves to idle workers": router_with(leans=MovesToIdle),
    "moves for time": router_with(leans=MovesForTime),
    "moves for memory": router_with(leans=MovesForMemory),
    "where there is room": router_with(WhereThereIsRoom),
    "forecast leans": LeaningRouter,
    "late binding": router_with(LateBinding),
    "late binding by slack": router_with(EarliestDue),
}


class RoutedSimulation(Simulation):
    """A simulated cluster with such a router."""

    def __init__(self, config: SimConfig, workload: Workload, router: type[TrialRouter]) -> None:
        self._router = router
        super().__init__(config, workload)

    @override
    def _router_logic(self) -> TrialRouter:
        return self._router(self._config.cluster)

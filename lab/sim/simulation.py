"""A whole simulated cluster: the live components' own logics on one event queue.

Links come up first, then requests are sent. After the last one has ended time continues for a little, so that the last
messages arrive and the counts are final.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, repeat

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.iteration_points import Point, calibrate, calibration_points, feasible_points
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.straggler import straggler_points
from alignedserve.messages.events import TICK_S
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.factory import calibration_s, check_yielding, limits_of
from alignedserve.scheduling.policies import require_policy
from alignedserve.scheduling.policy import IterationLimits, Mechanism
from alignedserve.worker_core import factory as colocated_factory
from alignedserve.worker_core.router_link import registration_of
from decode_worker import factory as decode_factory
from kvpool import logic as pool_logic
from kvpool.state import SetBlockGeneration
from lab.sim.components import AnyLogic, Network, SharedMemory, SimulatedComponent, SimulatedWorker
from lab.sim.config import SimConfig, SimWorkerLoss
from lab.sim.copies import MemoryLinks, SharedCores, SimulatedCopier
from lab.sim.engine import EOS, SimulatedEngine
from lab.sim.event_queue import EventQueue
from lab.sim.gateway import GATEWAY, SimulatedGateway, SimulatedTexts
from lab.sim.records import GapSample, RequestRecord, SimulatedRequest
from lab.sim.result import RouterResult, SimulationResult, classes_of, total_of, worker_of
from lab.sim.routers import RouterChoice, SimulatedRouter
from lab.workload.requests import Workload, turns_of
from prefill_worker import logic as prefill_logic
from router import logic as router_logic

_NUM_ROUNDS = 2  # nothing scatters here, and a thousand nodes have two thousand workers
_SPARE = 4  # tokens by which a live worker lets every request grow


def points_of(layout: BlockLayout, limits: IterationLimits, *, num_blocks: int, has_hidden_cache: bool) -> list[Point]:
    max_requests, num_tokens = min(limits.max_running_requests, limits.max_tokens), num_blocks * layout.block_size
    points = calibration_points(
        max_requests=max_requests, max_tokens=limits.max_tokens, has_hidden_cache=has_hidden_cache
    )
    points += straggler_points(max_requests=max_requests, max_context_len=num_tokens, num_tokens=num_tokens)
    return feasible_points(
        points,
        max_context_len=num_tokens,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        spare=_SPARE,
    )


def calibrated(costs: CostModel, points: Sequence[Point], duration_s: float) -> tuple[Sample, ...]:
    elapsed_s = 0.0

    def measure(point: Point) -> float:
        nonlocal elapsed_s
        seconds = costs.swap_s(2 * point.num_swapped) if point.num_swapped else costs.iteration_s(point.work)
        elapsed_s += seconds
        return seconds

    max_samples = _NUM_ROUNDS * len(points)
    return calibrate(points, measure, clock=lambda: elapsed_s, duration_s=duration_s, max_samples=max_samples)


def check_fit(config: SimConfig, workload: Workload) -> None:
    """Raise ConfigError for a request that could never be served as it is; live it would fail or be cut short.

    One with a limit of its own is to fit a decode worker's memory at its longest; one without, the context.
    """
    for number, first in enumerate(workload.requests):
        for timed in turns_of(first):
            if timed.max_tokens is None:
                holds, words, limit = timed.final_context_len, "comes to hold", config.max_context_len
            else:
                holds, words, limit = timed.prompt_len + timed.max_tokens, "may come to hold", config.memory_tokens
            if holds > limit:
                what = "a decode worker's memory holds" if limit == config.memory_tokens else "the model's context is"
                raise ConfigError(f"request {number} of the workload {words} {holds} tokens; {what} {limit}")


def check_losses(losses: Sequence[SimWorkerLoss], workers: Collection[str]) -> None:
    """Raise ConfigError if a loss names an unknown worker, or a worker twice."""
    names = [loss.worker for loss in losses]
    for name in names:
        if name not in workers or names.count(name) > 1:
            known = ", ".join(workers)
            raise ConfigError(f"losses: {name} is lost twice or no worker of this cluster; it has {known}")


def check_policy(config: SimConfig, workload: Workload) -> None:
    """Raise ConfigError if a policy needs true predictions and has none; predictions of closed loops count as true."""
    turns = chain.from_iterable(map(turns_of, workload.requests))
    are_known = all(timed.predicted_len == timed.output_len for timed in turns)
    known = frozenset({Mechanism.KNOWN_LENGTHS}) if are_known else frozenset()
    scheduling, topology = config.cluster.scheduling, config.cluster.chosen_topology
    require_policy(scheduling, topology, config.available | known)
    check_yielding(scheduling, topology, config.available)


class MissWatch:
    """The requests of each class that certainly miss their objectives: ended without, or open and too late for them.

    Clients know how long their answers are: a mean gap is missed as soon as even an answer that ended now has it.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._ended: Counter[str] = Counter()
        self._num_seen = 0

    def is_over(self, records: Sequence[RequestRecord], under_way: Iterable[SimulatedRequest], now: float) -> bool:
        """Return whether more requests miss than a limit allows. `records`: all that have ended, in their order."""
        for record in records[self._num_seen :]:
            self._ended[record.class_name] += not record.has_met_slo
        self._num_seen = len(records)
        missed = Counter(self._ended)
        missed.update(request.timed.class_name for request in under_way if _is_late(request, now))
        return any(missed[name] > limit for name, limit in self._limits.items())

    def is_settled(self, under_way: Iterable[SimulatedRequest], now: float) -> bool:
        return all(_is_late(request, now) for request in under_way if request.timed.class_name in self._limits)


def _is_late(request: SimulatedRequest, now: float) -> bool:
    slo, times, arrival_s = request.timed.slo, request.token_times_s, request.arrival_s
    first_s = times[0] if times else now
    if slo.ttft_s is not None and first_s > arrival_s + slo.ttft_s:
        return True
    if slo.deadline_s is not None and now > arrival_s + slo.deadline_s:
        return True
    return slo.tpot_s is not None and now - first_s > slo.tpot_s * max(request.timed.output_len - 1, 1)


Progress = Callable[[float, int], None]  # simulated seconds since the first request, number of ended requests

BEGIN_S = 1.0  # start of sending: components are linked by then
_SETTLE_S = 2.5  # after the last end; the router's counts come every second
_EOS_TOKEN_IDS = frozenset({EOS})
_MAX_FIRST_LEASE = 1 << 39  # as in a live pool
_PROGRESS_S = 5.0
_WATCH_S = 1.0


class Simulation:
    """One run. Raises ConfigError if the configuration or a request of the workload can never work."""

    def __init__(self, config: SimConfig, workload: Workload) -> None:
        self._config = config = config.resolved
        self._random = random.Random(config.seed)  # noqa: S311
        check_fit(config, workload)
        check_policy(config, workload)
        self._event_queue = EventQueue()
        self._network = Network(self._event_queue, config.links, config.seed)
        self._routers: dict[str, SimulatedRouter] = {}
        names = [_router(number, config.routers.count) for number in range(config.routers.count)]
        choice = RouterChoice(names)
        self._gateway = SimulatedGateway(
            workload,
            self._event_queue,
            self._network,
            choice,
            texts=SimulatedTexts(config.layout.block_size if config.cluster.prefix_cache.enabled else None),
            max_context_len=config.max_context_len,
            default_slo=config.cluster.gateway.named_slo,
            on_idle=self._settle,
        )
        self._network.to_gateway = self._gateway.emitted
        self._is_abandoned = False
        self._busy_s: list[float] = []  # of the routers, when the last request ended
        self._components: list[SimulatedComponent] = []
        self._workers: dict[str, SimulatedWorker] = {}
        self._memory_links = MemoryLinks(self._event_queue, config.links, config.layout.block_bytes)
        num_decode = config.cluster.decode.count // (1 if config.moves_between_nodes else config.num_pools)
        buffer_blocks = prefill_logic.buffer_blocks_of(config.cluster.prefill, config.layout, num_decode)
        cores = SharedCores(self._event_queue, config.slowdowns) if any(config.slowdowns) else None
        self._memory = SharedMemory(block_bytes=config.layout.block_bytes, buffer_blocks=buffer_blocks, cores=cores)
        self._build(names)
        check_losses(config.losses, self._workers)

    def run(self, progress: Progress | None = None) -> SimulationResult:
        """Simulate from the first request to the last; may be called once."""
        if self._config.duration_s is not None:
            self._event_queue.end_s = BEGIN_S + self._config.duration_s
        for number, component in enumerate(self._components):
            component.tick_from(TICK_S * (number + 1) / len(self._components))
        self._gateway.start(BEGIN_S)
        if self._config.routers.lost_at_s is not None:
            first = next(iter(self._routers.values()))
            self._event_queue.at(BEGIN_S + self._config.routers.lost_at_s, self._lose, first)
        for loss in self._config.losses:
            self._event_queue.at(BEGIN_S + loss.at_s, self._lose_worker, loss)
        if progress is not None:
            self._event_queue.at(BEGIN_S, self._report, progress)
        if self._config.miss_limits is not None:
            self._event_queue.at(BEGIN_S, self._watch, MissWatch(self._config.miss_limits))
        num_events = self._event_queue.run()
        self._gateway.cut_off()
        if not self._busy_s:
            self._note_busy()
        return self._result(num_events)

    def records(self) -> Sequence[RequestRecord]:
        """Return every ended request, by its end; times begin with the simulation, requests a second later."""
        return self._gateway.records

    def gaps(self) -> Mapping[str, GapSample]:
        """Return the gaps between tokens, by class."""
        return self._gateway.gaps

    def logics(self) -> dict[str, AnyLogic]:
        """Return each component's logic by its name."""
        return {component.name: component.logic for component in self._components}

    # --- building

    def _build(self, routers: list[str]) -> None:
        cluster = self._config.cluster
        for name in routers:
            router = self._make_router(name)
            self._routers[name] = router
            self._components.append(router)
            self._network.link(GATEWAY, name)
        for node in range(self._config.num_pools):
            decoders = range(node, cluster.decode.count, self._config.num_pools)
            if cluster.node_pool is not None:
                self._add_pool(node, cluster.node_pool)
            if self._config.is_colocated:
                self._add_node(node, [], [self._add_decode_worker(number, node) for number in decoders])
                continue
            prefillers = range(node, cluster.prefill.count, self._config.num_pools)
            self._add_node(
                node,
                [self._add_prefill_worker(number, node) for number in prefillers],
                [self._add_decode_worker(number, node) for number in decoders],
            )
        if self._config.moves_between_nodes:
            self._link_nodes()

    def _make_router(self, name: str) -> SimulatedRouter:
        event_s = self._config.routers.event_s
        logic, queue = self._router_logic(), self._event_queue
        return SimulatedRouter(name, logic, queue, self._network, event_s=event_s, begin_s=BEGIN_S)

    def _router_logic(self) -> AnyLogic:
        cluster = self._config.cluster
        return router_logic.make_logic(config=cluster.router, batching=cluster.batching)

    def _add_component(self, name: str, role: Role, logic: AnyLogic) -> SimulatedComponent:
        component = SimulatedComponent(name, role, logic, self._event_queue, self._network)
        self._components.append(component)
        return component

    def _add_pool(self, node: int, pool: PoolConfig) -> None:
        config, layout = self._config, self._config.layout
        num_blocks = layout.blocks_in(pool.memory_bytes)
        if num_blocks < 1:
            raise ConfigError(f"pool.memory_bytes holds no block of {layout.block_bytes} bytes")
        arena = self._memory.make_pool(_pool(node), num_blocks, layout.digest().hex())
        logic = pool_logic.make_logic(
            config=pool,
            batching=config.cluster.batching,
            arena=arena,
            block_size=layout.block_size,
            first_lease=self._random.randrange(1, _MAX_FIRST_LEASE),
            link_wait_s=0.0,  # nodes are not joined here
            takes_requests=not config.is_colocated,
            state_blocks=layout.state_blocks,
        )
        component = self._add_component(_pool(node), Role.KV_POOL, logic)
        stamp = self._memory.arenas[arena.path].stamp
        component.performers = {SetBlockGeneration: lambda command: stamp(command.block_ids, command.generation)}

    def _add_prefill_worker(self, number: int, node: int) -> str:
        config = self._config.cluster.prefill
        num_blocks = self._config.layout.blocks_in(config.kv_cache_bytes)
        registered = registration_of(
            self._config.layout, num_blocks, config.max_running_requests, _pool(node), can_prefill=True
        )
        name = f"prefill-{number}"
        costs = self._config.costs_of(name, is_prefill=True)
        make = partial(
            prefill_logic.make_logic,
            registered=registered,
            config=config,
            scheduling=self._config.cluster.scheduling,
            eos_token_ids=_EOS_TOKEN_IDS,
            costs=self._known(costs),
            measured=self._measured(name, costs, num_blocks, limits_of(config)),
            prefix_cache=self._config.cluster.prefix_cache,
            num_layers=self._config.layout.num_layers,
            state_blocks=self._config.layout.state_blocks,
        )
        return self._add_worker(name, Role.PREFILL_WORKER, make, _pool(node), costs)

    def _add_decode_worker(self, number: int, node: int) -> str:
        config, layout = self._config.cluster.decode, self._config.layout
        num_blocks = layout.blocks_in(config.kv_cache_bytes)
        make: Callable[[], AnyLogic]
        name = self._config.decode_name(number)
        cluster, true_costs = self._config.cluster, self._config.costs_of(name)
        costs = self._known(true_costs)
        measured = self._measured(name, true_costs, num_blocks, limits_of(config), cluster.batching)
        if self._config.is_colocated:
            make = partial(
                colocated_factory.make_colocated_logic,
                registered=colocated_factory.colocated_registration(
                    layout, num_blocks, config, pool_name=_pool(node), can_move=self._config.can_move
                ),
                memory=self._config.decode_memory,
                config=config,
                scheduling=cluster.scheduling,
                eos_token_ids=_EOS_TOKEN_IDS,
                costs=costs,
                measured=measured,
                prefix_cache=cluster.prefix_cache,
                prefix_pool=_pool(node) if cluster.prefix_cache.pool_bytes else None,
                num_layers=layout.num_layers,
                decode_pool=_pool(node) if config.pool_bytes else None,
            )
        else:
            make = partial(
                decode_factory.make_logic,
                registered=registration_of(
                    layout, num_blocks, config.max_running_requests, _pool(node), can_decode=True
                ),
                config=config,
                batching=cluster.batching,
                scheduling=cluster.scheduling,
                memory=self._config.decode_memory,
                eos_token_ids=_EOS_TOKEN_IDS,
                costs=costs,
                measured=measured,
            )
        return self._add_worker(name, Role.DECODE_WORKER, make, _pool(node), true_costs)

    def _known(self, costs: CostModel) -> CostModel | None:
        return None if self._config.learns_costs else costs

    def _measured(
        self,
        name: str,
        costs: CostModel,
        num_blocks: int,
        limits: IterationLimits,
        batching: BatchingConfig | None = None,
    ) -> tuple[Sample, ...]:
        """Return the iterations that a worker measures before it serves, to learn costs from.

        `batching`: of a decode worker.
        """
        config = self._config
        if not config.learns_costs:
            return ()
        if name in config.measured:
            return config.measured[name]
        has_hidden_cache = config.mechanisms.hidden_ratio is not None
        points = points_of(config.layout, limits, num_blocks=num_blocks, has_hidden_cache=has_hidden_cache)
        return calibrated(costs, points, calibration_s(config.cluster.engine, config.cluster.scheduling, batching))

    def _add_worker(self, name: str, role: Role, make: Callable[[], AnyLogic], pool: str, costs: CostModel) -> str:
        keeps_timeline = name == self._config.timeline_of
        engine = SimulatedEngine(
            costs, self._gateway.answers, self._config.decode_memory, keeps_timeline=keeps_timeline
        )
        copier = SimulatedCopier(name, pool, self._memory_links, is_through_host=self._config.can_move)
        component = self._add_component(name, role, make())
        self._workers[name] = SimulatedWorker(
            component,
            engine,
            copier,
            self._memory,
            self._event_queue,
            make_logic=make,
            num_layers=self._config.layout.num_layers,
            unmeasured_costs=self._config.unmeasured_costs,
        )
        return name

    def _add_node(self, node: int, prefillers: list[str], decoders: list[str]) -> None:
        for prefiller in prefillers:
            self._network.link(prefiller, _pool(node))
        for worker, other in combinations(decoders if self._config.can_move else (), 2):
            self._network.link(worker, other)
        pools = [_pool(node)] if self._config.cluster.node_pool is not None else []
        for decoder in decoders:
            for peer in pools + prefillers:
                self._network.link(decoder, peer)
        for name in pools + prefillers + decoders:
            self._network.link(name, _router(node % self._config.routers.count, self._config.routers.count))

    def _link_nodes(self) -> None:
        count, num_nodes = self._config.cluster.decode.count, self._config.num_pools
        for one, other in combinations(range(count), 2):
            if one % num_nodes != other % num_nodes:
                self._network.link(self._config.decode_name(one), self._config.decode_name(other))

    # --- losses

    def _lose(self, router: SimulatedRouter) -> None:
        router.lose()
        self._event_queue.after(self._config.routers.restart_s, self._restart, router)

    def _restart(self, router: SimulatedRouter) -> None:
        router.restart(self._router_logic())

    def _lose_worker(self, loss: SimWorkerLoss) -> None:
        worker = self._workers[loss.worker]
        worker.lose()
        self._event_queue.after(loss.restart_s, lambda _: worker.restart(), None)

    # --- the end

    def _settle(self) -> None:
        self._note_busy()
        self._event_queue.end_s = min(self._event_queue.end_s, self._event_queue.now + _SETTLE_S)

    def _note_busy(self) -> None:
        self._busy_s = [router.busy_s for router in self._routers.values()]

    def _report(self, progress: Progress) -> None:
        progress(self._event_queue.now - BEGIN_S, len(self._gateway.records))
        self._event_queue.after(_PROGRESS_S, self._report, progress)

    def _watch(self, misses: MissWatch) -> None:
        queue, gateway = self._event_queue, self._gateway
        if misses.is_over(gateway.records, gateway.open_requests(), queue.now):
            self._is_abandoned, queue.end_s = True, queue.now
        ends_when_settled = self._config.ends_when_settled and gateway.has_sent_all
        if ends_when_settled and misses.is_settled(gateway.open_requests(), queue.now):
            queue.end_s = queue.now
        queue.after(_WATCH_S, self._watch, misses)

    def _result(self, num_events: int) -> SimulationResult:
        gateway, status = self._gateway, total_of(self._gateway.statuses.values())
        ended_s = max((record.ended_s for record in gateway.records), default=BEGIN_S)
        duration_s = ended_s - BEGIN_S
        workers = self._workers.items()
        timelines = [worker.engine.timeline() for worker in self._workers.values()]
        return SimulationResult(
            duration_s=duration_s,
            is_abandoned=self._is_abandoned,
            classes=classes_of(gateway.records, gateway.gaps, duration_s, gateway.loaded_tokens_per_s),
            workers=tuple(worker_of(name, worker.engine, duration_s) for name, worker in workers),
            routers=tuple(map(RouterResult.of, self._routers.values(), self._busy_s, repeat(duration_s))),
            max_in_flight=gateway.max_open,
            num_preemptions=status.num_preemptions,
            num_evictions=status.num_evictions,
            num_handoffs_verified=status.num_handoffs_verified,
            num_handoffs_refused=status.num_handoffs_refused,
            num_reused_tokens=status.num_reused_tokens,
            num_recomputed_tokens=status.num_recomputed_tokens,
            num_pool_blocks_used=status.num_pool_blocks_used,
            num_worker_blocks_used=status.num_worker_blocks_used,
            iteration_log=status.iteration_log,
            lengths=status.lengths,
            num_decisions=sum(component.num_events for component in self._components),
            num_events=num_events,
            timeline=tuple(line for lines in timelines for line in lines),
        )


def _router(number: int, count: int) -> str:
    return "router" if count == 1 else f"router-{number}"


def _pool(node: int) -> str:
    return f"pool-{node}"

"""A whole simulated cluster: the live components' own logics on one event queue.

Links come up first, then requests are sent. After the last one has ended time continues for a little, so that the last
messages arrive and the counts are final.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations, repeat

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.messages.events import TICK_S
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.factory import calibration_s, limits_of
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.worker_core.router_link import registration_of
from decode_worker import factory as decode_factory
from kvpool import logic as pool_logic
from kvpool.state import SetBlockGeneration
from lab.sim.calibration import calibrated, points_of
from lab.sim.checks import check_fit, check_losses, check_policy
from lab.sim.components import AnyLogic, Network, SharedMemory, SimulatedComponent, SimulatedWorker
from lab.sim.config import SimConfig, SimWorkerLoss
from lab.sim.copies import MemoryLinks, SimulatedCopier
from lab.sim.engine import EOS, SimulatedEngine
from lab.sim.event_queue import EventQueue
from lab.sim.gateway import GATEWAY, SimulatedGateway
from lab.sim.misses import MissWatch
from lab.sim.prompts import SimulatedTexts
from lab.sim.records import GapSample, RequestRecord
from lab.sim.result import RouterResult, SimulationResult, classes_of, total_of, worker_of
from lab.sim.routers import RouterChoice, SimulatedRouter
from lab.sim.shared_cores import SharedCores
from lab.workload.requests import Workload
from prefill_worker import logic as prefill_logic
from router import logic as router_logic

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
                decode_factory.make_colocated_logic,
                registered=decode_factory.colocated_registration(
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
        for one, other in combinations(decoders if self._config.can_move else (), 2):
            self._network.link(one, other)
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

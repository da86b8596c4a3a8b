"""Recordings of logics that run without sockets, clocks or tensors."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from alignedserve.config.sections import (
    BatchingConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    PrefixCacheConfig,
    RecordingConfig,
    RouterConfig,
    SchedulingConfig,
)
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.handshake import Role
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.process.addresses import ROUTER
from alignedserve.process.recorder import Recorder, open_recorder
from alignedserve.process.recording import RUN_FILE, RunMetadata
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core import factory as colocated_factory
from decode_worker import factory as decode_factory
from kvpool import logic as pool_logic
from lab.replay.component_replay import ComponentReplay, recordings_in
from lab.sim.config import SimConfig
from lab.sim.result import SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload
from prefill_worker import logic as prefill_logic
from router import logic as router_logic
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import POOL, LogicCluster
from tests.support.token_engine import BLOCK_SIZE, EOS

PROMPT_TOKEN = 48_611  # as no other number of these runs
STOP_TOKEN = 7
_EOS_IDS = frozenset({EOS})


class Recorded:
    """A logic whose decisions go into a file."""

    def __init__(self, config: RecordingConfig, component: str, make: "partial[Any]") -> None:
        self._logic = make()
        recorder = open_recorder(config, component, make)
        assert recorder is not None
        self.recorder: Recorder = recorder

    def on_event(self, event: Any, now: float) -> Any:
        commands = self._logic.on_event(event, now)
        self.recorder.add(event, now, commands)
        self.recorder.write()
        return commands


class RecordedCluster(LogicCluster):
    """Components are built as live ones are, and recorded: each process of one in a file of its own."""

    def __init__(self, shape: Shape, seed: int, config: RecordingConfig) -> None:
        self._recording = config
        self._recorders: list[Recorder] = []
        super().__init__(shape, seed)

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()

    @override
    def _make(self, name: str) -> Any:
        _, role = super()._make(name)  # also makes the pool's arena
        recorded = Recorded(self._recording, name, self._maker(name, role))
        self._recorders.append(recorded.recorder)
        return recorded, role

    def _maker(self, name: str, role: Role) -> "partial[Any]":
        shape = self.shape
        batching = BatchingConfig(policy=shape.policy, min_requests=shape.min_requests, starvation_s=0.3)
        if name == ROUTER:
            config = RouterConfig(max_queued_requests=200, max_retries=50, max_candidate_requests=4)
            return partial(router_logic.make_logic, config=config, batching=batching)
        if name == POOL:
            return partial(
                pool_logic.make_logic,
                config=PoolConfig(lease_s=1e9),
                batching=batching,
                arena=ArenaOffered(list(self.offered)[-1], shape.pool_blocks, 64, ""),
                block_size=BLOCK_SIZE,
                first_lease=self.rng.randrange(1, 1 << 20),
            )
        is_prefill = role is Role.PREFILL_WORKER
        registered = WorkerRegistered(
            shape.worker_blocks, BLOCK_SIZE, shape.max_running_requests, POOL, is_prefill, not is_prefill
        )
        common: dict[str, Any] = {
            "registered": registered,
            "scheduling": SchedulingConfig(policy=shape.scheduling),
            "eos_token_ids": _EOS_IDS,
        }
        if is_prefill:
            prefill = PrefillWorkerConfig(max_running_requests=4, max_num_batched_tokens=10)
            return partial(prefill_logic.make_logic, config=prefill, **common)
        decode = DecodeWorkerConfig(max_running_requests=shape.max_running_requests, max_num_batched_tokens=12)
        memory = DeviceMemory(shape.worker_blocks, shape.worker_blocks, BLOCK_SIZE, shape.host_tokens)
        if shape.is_colocated:
            held = self._registered(name, colocated_factory.max_held(decode), can_prefill=True, can_decode=True)
            common |= {"registered": held, "prefix_cache": PrefixCacheConfig(enabled=shape.has_prefix_cache)}
            return partial(colocated_factory.make_colocated_logic, config=decode, memory=memory, **common)
        return partial(decode_factory.make_logic, config=decode, batching=batching, memory=memory, **common)


def random_run(config: RecordingConfig, seed: int, num_requests: int = 40, **changes: Any) -> None:
    """Play requests of all kinds, some given up by their clients; workers and pools die meanwhile."""
    rng = random.Random(seed)
    cluster = RecordedCluster(Shape(num_prefill=2, num_decode=2, **changes), seed, config)
    for number in range(num_requests):
        prompt = tuple(rng.choice((PROMPT_TOKEN, 1, 2)) for _ in range(rng.randrange(1, 30)))
        stops = (STOP_TOKEN,) if number % 3 == 0 else ()
        sampling = SamplingParams(max_tokens=rng.randrange(1, 16), stop_token_ids=stops)
        cluster.submit(Request(RequestId(f"r{number}"), prompt, sampling, "unix:gateway", cluster.now))
        for _ in range(rng.randrange(30)):
            cluster.step()
        if number % 7 == 0:
            cluster.abort(RequestId(f"r{rng.randrange(number + 1)}"))
        if number % 11 == 10:
            name = rng.choice(["prefill-0", "decode-1", "pool-0"])
            cluster.kill(name)
            cluster.start(name)
    cluster.run()
    cluster.close()


def recorded_simulation(folder: Path, config: SimConfig, workload: Workload) -> SimulationResult:
    """Build a simulation whose workers are made as live ones are, and recorded."""
    simulation = Simulation(config, workload)
    recorders = []
    for component in simulation._components:
        make = _worker_maker(config, component.logic, component.role)
        if make is not None:
            recorded = Recorded(RecordingConfig(folder=str(folder)), component.name, make)
            component.logic = recorded
            recorders.append(recorded.recorder)
    result = simulation.run()
    for recorder in recorders:
        recorder.close()
    return result


def _worker_maker(config: SimConfig, logic: Any, role: Role) -> "partial[Any] | None":
    cluster = config.cluster
    if role is Role.ROUTER:
        return partial(router_logic.make_logic, config=cluster.router, batching=cluster.batching)
    if role is Role.KV_POOL:
        return None
    common: dict[str, Any] = {
        "registered": logic._registered,
        "scheduling": cluster.scheduling,
        "eos_token_ids": logic._eos_token_ids,
    }
    if role is Role.PREFILL_WORKER:
        common |= {"prefix_cache": cluster.prefix_cache, "num_layers": config.layout.num_layers}
        return partial(prefill_logic.make_logic, config=cluster.prefill, **common)
    common |= {"memory": config.decode_memory, "config": cluster.decode}
    if config.is_colocated:
        return partial(colocated_factory.make_colocated_logic, num_layers=config.layout.num_layers, **common)
    return partial(decode_factory.make_logic, batching=cluster.batching, **common)


def replays(folder: Path) -> list[ComponentReplay]:
    """Replay every file of the folder to its end."""
    replayed = [ComponentReplay(path) for path in recordings_in(folder)]
    for component in replayed:
        for _ in component.decided():
            pass
    return replayed


def recorded_run_folder(folder: Path, config: SimConfig, workload: Workload) -> Path:
    """Record a simulation as a live run is recorded, with the file about the whole."""
    recorded_simulation(folder, config, workload)
    metadata = RunMetadata(config=config.cluster, layout=config.layout)
    (folder / RUN_FILE).write_bytes(msgspec.json.encode(metadata))
    return folder

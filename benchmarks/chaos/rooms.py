"""The rooms of one cluster as processes of their own, without Ray: real sockets, real signals, quick restarts."""

import contextlib
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from alignedserve.batch_worker.actor import BatchActor
from alignedserve.batches.location import RECORDS, BatchLocation, SharedState
from alignedserve.cluster.actor_factory import BATCHES, ActorClasses, ActorFactory, PreparedNode
from alignedserve.cluster.batch_storage import prepare_records
from alignedserve.cluster.placement import NodeCapacity, NodeShare
from alignedserve.config.sections import (
    MIB,
    BatchingConfig,
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    GatewayConfig,
    LinksConfig,
    ModelSectionConfig,
    PoolConfig,
    PrefillWorkerConfig,
    PrefixCacheConfig,
    RouterConfig,
    Topology,
)
from alignedserve.gateway.actor import GatewayActor
from alignedserve.process.addresses import ROUTER, AddressBook
from alignedserve.process.process_spec import POOL
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.scheduling.factory import resolve_policy
from benchmarks.chaos.room_process import RoomPlan, RoomProcess, forking, when_true
from benchmarks.chaos.schedules import Target
from benchmarks.chaos.seen import ask, tail_of
from benchmarks.measuring.server import free_port

MODEL = "model"
PEER_TIMEOUT_S = 1.5
_START_S = 90.0
_DISK = "48m"
_BALLAST = bytes(4096)
_NAMES = {
    Target.GATEWAY: "gateway-0",
    Target.DRIVER: BATCHES,
    Target.ROUTER: ROUTER,
    Target.PREFILL: "prefill-0",
    Target.DECODE: "decode-0",
    Target.POOL: POOL,
}
_OF_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class _Rooms(ActorFactory):
    """Plans the same processes as a cluster has, for a host without Ray."""

    def plans(self, node: PreparedNode, state: SharedState) -> list[RoomPlan]:
        planned = self._processes(node, state, drives_batches=True)
        return [
            RoomPlan(
                one.actor_class.__ray_metadata__.modified_class.__module__,
                one.actor_class.__ray_metadata__.class_name.rpartition(".")[2],
                one.arguments,
                self._spec(node, one.role, one.name),
            )
            for one in planned
        ]


def rooms_config(model: Path, port: int) -> ClusterConfig:
    return resolve_policy(
        ClusterConfig(
            topology=Topology.DISAGGREGATED,
            model=ModelSectionConfig(path=str(model), random_weights=True, served_model_name=MODEL, dtype="float32"),
            gateway=GatewayConfig(port=port),
            router=RouterConfig(max_retries=20),
            batching=BatchingConfig(min_requests=2, starvation_s=0.2),
            engine=EngineConfig(device="cpu", threads_per_worker=1, calibration_s=0.0),
            pool=PoolConfig(memory_bytes=8 * MIB),
            prefill=PrefillWorkerConfig(
                kv_cache_bytes=8 * MIB, candidate_buffer_bytes=4 * MIB, max_num_batched_tokens=64
            ),
            decode=DecodeWorkerConfig(kv_cache_bytes=8 * MIB, max_running_requests=8, swap_space_bytes=0),
            links=LinksConfig(peer_timeout_s=PEER_TIMEOUT_S),
            prefix_cache=PrefixCacheConfig(enabled=False),  # every load is to pass through every phase
        )
    )


class Rooms:
    """Router, pool, workers, gateway and batch driver."""

    model = MODEL

    def __init__(
        self, folder: Path, *, has_small_disks: bool = False, configure: Callable[[int], ClusterConfig] | None = None
    ) -> None:
        """`folder`: for sockets, logs and state; short, as Unix sockets have short names.

        `has_small_disks`: this program has a mount namespace of its own, so its disks may be small and be filled.
        `configure`: another cluster than `rooms_config`, for the gateway's port.
        """
        self.folder = folder
        self._configure = configure or self._small
        self.has_small_disks = has_small_disks
        self.state_folder = folder / "state"
        self.run_folder = folder / f"c{secrets.token_hex(3)}"
        self.log_folder = self.run_folder / "logs"
        for one in (self.state_folder, self.run_folder, self.log_folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        if has_small_disks:
            self.has_small_disks = all(mount_small(one, _DISK) for one in (self.state_folder, self.log_folder))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._processes: dict[str, RoomProcess] = {}

    def start(self) -> None:
        config = self._configure(self.port)
        prepare_records(self.state_folder / RECORDS)
        served = resolve_model(config.model, EngineConfig(kv_cache_dtype=config.engine.kv_cache_dtype))
        separate = config.prefill.count if config.chosen_topology.is_separate else 0
        share = NodeShare(
            "node-0",
            POOL,
            tuple(f"prefill-{number}" for number in range(separate)),
            tuple(f"decode-{number}" for number in range(config.decode.count)),
            gateways=(("gateway-0", self.port),),
            is_head=True,
        )
        node = PreparedNode(share, NodeCapacity("node-0", "", 1), config, AddressBook(self.run_folder))
        location = BatchLocation(config.batches, self.state_folder, None)
        factory = _Rooms(served, ActorClasses(GatewayActor, BatchActor))
        context = forking()
        for plan in factory.plans(node, SharedState(location, ("gateway-0",))):
            self._processes[plan.spec.name] = RoomProcess(context, plan)
        for process in self._processes.values():
            process.start()
        if not when_true(self.is_ready, _START_S):
            raise TimeoutError(f"the rooms were not ready in time; logs: {self.tail()}")

    def _small(self, port: int) -> ClusterConfig:
        return rooms_config(_write_model(self.folder / "served"), port)

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()
        for path in self.arenas():
            path.unlink(missing_ok=True)
        for folder in (self.state_folder, self.log_folder) if self.has_small_disks else ():
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)

    # --- processes

    def room(self, target: Target) -> RoomProcess | None:
        """Return the process of this role; None: there is none."""
        return self._processes.get(_NAMES[target])

    def pid(self, target: Target) -> int | None:
        """Return the id of the process of this role; None while there is none."""
        room = self.room(target)
        return None if room is None else room.pid

    def name(self, target: Target) -> str:
        return _NAMES[target]

    def socket_path(self, target: Target) -> Path:
        """Return where the process of this role listens, if it does."""
        return self.run_folder / f"{self.name(target)}.sock"

    def clock_path(self, target: Target) -> Path:
        """Return the file that says how far the clock of this process is off."""
        return self.run_folder / f"{self.name(target)}.clock"

    def drain(self, target: Target, *, begins: bool) -> None:
        """Let the process of this role drain, or no more: workers by their router, all else by the gateway's door."""
        if target in (Target.PREFILL, Target.DECODE, Target.POOL):
            self._processes[ROUTER].order("drain", [self.name(target)] if begins else [], [])
        else:
            self._processes["gateway-0"].order("drain", begins)

    # --- what is seen from outside

    def is_ready(self) -> bool:
        return ask(self.url, "/ready")[0] == 200

    def arenas(self) -> list[Path]:
        return sorted(arena_folder().glob(f"alignedserve-{self.run_folder.name}-*"))

    def tail(self) -> str:
        return tail_of(self.log_folder)


def _write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in _OF_MODEL:
        shutil.copy(pocket_folder() / name, folder / name)
    return folder


def mount_small(folder: Path, size: str) -> bool:
    """Mount a small file system in memory there; False where this process may not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def fill(ballast: Path) -> None:
    """Let this file grow until its file system is full to the last byte."""
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(_BALLAST)

"""A whole `alignedserve serve` as what schedules are run against: Ray's processes, Ray's restarts."""

from pathlib import Path

from alignedserve.process.addresses import ROUTER
from alignedserve.process.process_spec import POOL
from alignedserve.runtime.kv.arena_files import arena_folder
from benchmarks.chaos.schedules import Target
from benchmarks.measuring import kill_schedules
from benchmarks.measuring.kill_cluster import KillCluster

MODEL = "pocket"
_SETTINGS = (
    "topology=disaggregated",
    "model.dtype=float32",
    "engine.calibration_s=0",
    "router.max_retries=20",
    "batching.min_requests=2",
    "batching.starvation_s=0.2",
    "prefix_cache.enabled=false",
)
_SOCKETS = {Target.ROUTER: ROUTER, Target.POOL: POOL, Target.PREFILL: "prefill-0", Target.GATEWAY: "gateway-0"}


class RayCluster:
    """A Site. Its clocks cannot be set and its disks are not filled; it drains only when it ends."""

    model = MODEL
    has_small_disks = False

    def __init__(self, folder: Path) -> None:
        """`folder`: for sockets, logs and state; short, as Unix sockets have short names."""
        options = (argument for setting in _SETTINGS for argument in ("--set", setting))
        self._cluster = KillCluster(folder, tuple(options))
        self.state_folder = folder / "state"
        self._folder = folder

    @property
    def url(self) -> str:
        return self._cluster.url

    @property
    def run_folder(self) -> Path:
        return next((path.parent for path in self._folder.glob("run/*/router.sock")), self._folder / "run")

    @property
    def log_folder(self) -> Path:
        return self.run_folder / "logs"

    def start(self) -> None:
        self._cluster.start()

    def stop(self) -> None:
        self._cluster.stop()

    def pid(self, target: Target) -> int | None:
        found = self._cluster.processes(kill_schedules.Target(target.value))
        return found[-1].pid if found else None

    def socket_path(self, target: Target) -> Path:
        return self.run_folder / f"{_SOCKETS.get(target, target.value)}.sock"

    def clock_path(self, target: Target) -> Path | None:
        return None

    def drain(self, target: Target, *, begins: bool) -> None:
        """See Site."""

    def arenas(self) -> list[Path]:
        return sorted(arena_folder().glob(f"alignedserve-{self.run_folder.name}-*"))

    def tail(self) -> str:
        return tail_of(self.log_folder)


def tail_of(folder: Path) -> str:
    lines = []
    for path in sorted(folder.glob("*.log")):
        lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-6:]]
    return "\n".join(lines)

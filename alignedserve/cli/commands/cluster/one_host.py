"""`alignedserve status`, `logs` and `drain` of a cluster that serves on this host alone."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from alignedserve.cli.console import counted, print_json, printable, results
from alignedserve.cluster.deployments.admin_api import ask, find_cluster, show, show_status
from alignedserve.cluster.deployments.orders import (
    DeploymentReport,
    DrainNode,
    OrderDone,
    ProcessReport,
    StatusReport,
    UndoDrain,
)
from alignedserve.cluster.desired import MOVING_S
from alignedserve.config.sections import MIB, Topology
from alignedserve.core.errors import ResourceError
from alignedserve.core.metrics import in_percent
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.logs import LogPart, log_names, read_log


def load_line(load: ClusterStatus | None, topology: str) -> str:
    if load is None:
        return "Load: unknown, as no gateway has a router"
    pooled, workers = "", counted(load.num_decode_workers, f"{topology} worker")
    if topology == Topology.DISAGGREGATED.value:
        pooled = f"{load.num_pooled} pooled, "
        workers = f"{load.num_prefill_workers} prefill and {load.num_decode_workers} decode workers"
    if load.num_standby_workers:
        workers += f" ({load.num_standby_workers} standing by)"
    leans = "".join(f"; {lean.worker} leans {in_percent(lean.lean, 0)} to prompts" for lean in load.leans)
    prefixes = ""
    if load.prefixes.num_query_tokens:
        hit_rate = in_percent(load.prefixes.hit_rate, 0)
        prefixes = f"; prefix cache: {load.prefixes.num_blocks} blocks, {hit_rate} of tokens found"
    return (
        f"Load: {load.num_queued} queued, {load.num_prefilling} in prefill, {pooled}{load.num_decoding} decoding; "
        f"{workers}, {load.num_worker_blocks_used} of {load.num_worker_blocks} blocks used{prefixes}{leans}"
    )


TAIL_BYTES = 4096
_FOLLOW_S = 0.5
_DRAIN_ENDS_S = 20.0  # beyond what it was given


def show_log(name: str, read: Callable[[int], LogPart | None], *, follow: bool) -> None:
    """Print the end of a log, with `follow` also what comes. `read`: returns the part that begins at a byte; counted
    from the end, where it is negative. Raises ResourceError when there is no log of this name."""
    offset = -TAIL_BYTES
    while True:
        part = read(offset)
        if part is None:
            raise ResourceError(f"{name} has not written a log yet")
        print(part.text, end="", flush=True)
        offset = part.offset
        if not part.text:
            if not follow:
                return
            time.sleep(_FOLLOW_S)


def status(cluster: str | None, *, json_output: bool) -> bool:
    """Print models, load and processes; return whether all is up. Raises ResourceError or PeerLost."""
    report = show_status(find_cluster(cluster))
    if json_output:
        loads = {deployment_id: _counts(load) for deployment_id, load in report.loads.items()}
        print_json(msgspec.to_builtins(report) | {"loads": loads, "is_whole": report.is_whole})
        return report.is_whole
    results().print(report.url, soft_wrap=True)
    for deployment in report.deployments:
        results().print(_model_line(deployment, report), soft_wrap=True, markup=False)
    results().print(_process_table(report))
    taken = report.total_bytes - report.available_bytes
    together = sum(process.memory_bytes or 0 for process in report.processes)
    results().print(
        f"Memory: {together // MIB} MiB for these processes; {taken // MIB} of the host's {report.total_bytes // MIB} "
        "MiB are taken"
    )
    return report.is_whole


def logs(cluster: str | None, name: str | None, *, follow: bool) -> None:
    """Print the end of a process's log, or the names of those that have one; with `follow` also what comes. Raises
    ResourceError."""
    folder = find_cluster(cluster).parent
    names = log_names(folder)
    if name is None:
        results().print(", ".join(names), markup=False)
        return
    if name not in names:
        raise ResourceError(f"there is no log of {name}; there are {', '.join(names)}")
    show_log(name, lambda offset: read_log(folder, name, offset), follow=follow)


def drain(cluster: str | None, worker: str, within_s: float, *, waits: bool) -> None:
    """Drain a worker; with `waits` return when it has ended. Raises ResourceError when it may not be."""
    door = find_cluster(cluster)
    _give(door, DrainNode(worker, within_s))
    if waits:
        models = partial(show, partial(ask, door))
        wait_until_drained(worker, within_s, lambda: not any(worker in model.workers for model in models().deployments))


def wait_until_drained(name: str, within_s: float, has_drained: Callable[[], bool]) -> None:
    """Raises ResourceError if it takes too long."""
    ends_s = time.monotonic() + within_s + MOVING_S + _DRAIN_ENDS_S
    while not has_drained():
        if time.monotonic() > ends_s:
            raise ResourceError(f"{name} has not drained in time; see `alignedserve logs`")
        time.sleep(_FOLLOW_S)
    results().print(f"{name} has drained.")


def undo_drain(cluster: str | None, worker: str) -> None:
    """Use a worker again that drains. Raises ResourceError."""
    _give(find_cluster(cluster), UndoDrain(worker))


def _give(door: Path, order: DrainNode | UndoDrain) -> None:
    answer = ask(door, order, lambda text: None)
    if isinstance(answer, OrderDone):
        results().print(answer.text)


def _counts(load: ClusterStatus) -> dict[str, object]:
    counts = {name: value for name, value in msgspec.structs.asdict(load).items() if isinstance(value, int)}
    return counts | {"prefixes": msgspec.structs.asdict(load.prefixes)}


def _model_line(served: DeploymentReport, report: StatusReport) -> str:
    load = load_line(report.loads.get(served.deployment_id), served.topology)
    return f"{printable(served.name)} ({printable(served.path)}), {printable(served.state).rstrip('.')}. {load}"


def _process_table(report: StatusReport) -> Table:
    table = Table("process", "model", "state", "memory")
    model_of = {name: deployment.name for deployment in report.deployments for name in deployment.processes}
    for process in report.processes:
        memory = "-" if process.memory_bytes is None else f"{process.memory_bytes // MIB} MiB"
        model = printable(model_of.get(process.name, "-"))
        table.add_row(*(escape(cell) for cell in (process.name, model, _state_of(process), memory)))
    return table


def _state_of(process: ProcessReport) -> str:
    return f"{process.state}: {printable(process.problem)}" if process.problem else process.state

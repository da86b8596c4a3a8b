"""`alignedserve status`, `logs`, `drain`, `scale` and `stop`: the running cluster of hosts, from any of them."""

import time

from rich.markup import escape
from rich.table import Table

from alignedserve.cli.console import notes, print_json, results
from alignedserve.cluster.hosts.adoption import end_cluster
from alignedserve.cluster.hosts.client import call_actor, connected, lost_nodes, node_of, running_cluster
from alignedserve.cluster.hosts.operations.drain_rules import node_called
from alignedserve.cluster.hosts.operations.drains import MOVING_S
from alignedserve.cluster.hosts.operations.orders import DrainNode, ScaleWorkers, UndoDrain, give_order
from alignedserve.cluster.hosts.operations.resizing import parse_counts
from alignedserve.cluster.hosts.ray_storage import RayStorage, ray_storage, waiting_for_head
from alignedserve.cluster.hosts.record import DRAINED, ClusterRecord, ask_to_stop, recorded_id
from alignedserve.cluster.hosts.succession import has_driver
from alignedserve.cluster.hosts.supervisor import end_supervisor, running_supervisor
from alignedserve.config.environment import redis_authority_path, redis_url
from alignedserve.core.errors import PeerLost, ResourceError
from alignedserve.messages.gateways import ClusterStatus

_TAIL_BYTES = 4096
_FOLLOW_S = 0.5
_STOP_S = 60.0
_DRAIN_ENDS_S = 20.0  # beyond what it was given


def status(json_output: bool) -> bool:
    """Print nodes, actors, devices, load and versions; return whether the cluster is whole."""
    with connected():
        record = running_cluster()
        lost = lost_nodes(record)
        load = _load(record)
    if json_output:
        print_json(_as_document(record, lost, load))
    else:
        results().print(_nodes_table(record, lost))
        results().print(_load_line(load))
        results().print(record.version)
    return not lost and load is not None


def logs(actor: str | None, *, follow: bool) -> None:
    """Print the end of a process's log, or the names of those that have one; with `follow` also what comes."""
    with connected():
        record = running_cluster()
        if actor is None:
            for node in record.nodes:
                results().print(f"{node.hostname}: {', '.join(one.name for one in node.actors)}")
            return
        keeper, offset = node_of(record, actor).keeper, -_TAIL_BYTES
        while True:
            part = call_actor(keeper, "read_log", actor, offset)
            if part is None:
                raise ResourceError(f"{actor} has not written a log yet")
            print(part.text, end="", flush=True)
            offset = part.offset
            if not part.text:
                if not follow:
                    return
                time.sleep(_FOLLOW_S)


def stop() -> None:
    """Ask the driver to stop the cluster, and wait for it. Raises ResourceError when it does not."""
    with connected():
        found = recorded_id()
        if found is None:
            _stop_start()
            return
        ends_s = time.monotonic() + _STOP_S
        while found is not None:
            # Anew for each: a driver that has died may be replaced by one with a cluster of its own.
            ask_to_stop(found)
            if time.monotonic() > ends_s:
                _end_without_driver()
                break
            time.sleep(_FOLLOW_S)
            found = recorded_id()
    notes().print("Stopped the cluster.")


def drain(node: str, within_s: float, *, is_forced: bool, waits: bool) -> None:
    """Drain a node; with `waits` return when it has drained. Raises ResourceError when it may not be."""
    with connected():
        record = running_cluster()
        results().print(give_order(record.cluster_id, DrainNode(node, within_s, is_forced)).text)
        name = node_called(record.nodes, node).name
        ends_s = time.monotonic() + within_s + MOVING_S + _DRAIN_ENDS_S
        while waits:
            state = next((one.drain for one in running_cluster().nodes if one.name == name), DRAINED)
            if state == DRAINED:
                results().print(f"{name} has drained.")
                return
            if not state:
                raise ResourceError(f"the drain of {name} was undone")
            if time.monotonic() > ends_s:
                raise ResourceError(f"{name} has not drained in time; see `alignedserve logs driver`")
            time.sleep(_FOLLOW_S)


def scale(counts: list[str]) -> None:
    """Change the numbers of workers. Raises ConfigError, or ResourceError saying what would fit."""
    order = ScaleWorkers(parse_counts(counts))
    with connected():
        results().print(give_order(running_cluster().cluster_id, order).text)


def undo_drain(node: str) -> None:
    """Use a node again. Raises ResourceError when it neither drains nor has drained."""
    with connected():
        results().print(give_order(running_cluster().cluster_id, UndoDrain(node)).text)


def _end_without_driver() -> None:
    """End a cluster whose driver has died for good. Raises ResourceError when it lives, or processes do not end."""
    record = running_cluster()
    if has_driver(record):
        raise ResourceError(f"the cluster does not end within {_STOP_S:.0f} s; its driver is busy")
    end_cluster(record)


def _stop_start() -> None:
    """End a driver of this host that waits for nodes or examines them. Raises ResourceError when there is none."""
    if running_supervisor() is None:
        running_cluster()
    end_supervisor()
    notes().print("Stopped a cluster that was about to start.")


def print_ray_storage(name: str, *, is_worker: bool) -> None:
    """Print how `ray start` keeps its state in the Redis that is named, or waits for a head that does.

    Raises ConfigError for a URL that Ray cannot use.
    """
    url = redis_url()
    storage = RayStorage(waiting_for_head(url), ()) if is_worker else ray_storage(url, name, redis_authority_path())
    print(storage.shell())


def _load(record: ClusterRecord) -> ClusterStatus | None:
    """Return the router's last report, from the first gateway that has one."""
    for node in record.nodes:
        for actor in node.actors:
            if not actor.name.startswith("gateway-"):
                continue
            try:
                found: ClusterStatus | None = call_actor(actor.name, "cluster_status")
            except PeerLost:
                continue
            if found is not None:
                return found
    return None


def _nodes_table(record: ClusterRecord, lost: set[str]) -> Table:
    table = Table(title=f"{record.model}, {record.topology}", title_justify="left")
    for heading in ("node", "host", "state", "runs"):
        table.add_column(heading)
    for node in record.nodes:
        state = "lost" if node.node_id in lost else "refused" if node.problem else node.drain or "up"
        table.add_row(node.name or "-", f"{node.hostname}\n{node.address}", state, escape(node.summary))
    return table


def _load_line(load: ClusterStatus | None) -> str:
    if load is None:
        return "Load: unknown, as no gateway has a router"
    leans = "".join(f"; {one.worker} leans {one.lean:.0%} to prompts" for one in load.leans)
    return (
        f"Load: {load.num_queued} queued, {load.num_prefilling} in prefill, {load.num_pooled} pooled, "
        f"{load.num_decoding} decoding; {load.num_prefill_workers} prefill and {load.num_decode_workers} decode "
        f"workers, {load.num_worker_blocks_used} of {load.num_worker_blocks} blocks used{leans}"
    )


def _as_document(record: ClusterRecord, lost: set[str], load: ClusterStatus | None) -> dict[str, object]:
    counts = ("num_queued", "num_prefilling", "num_pooled", "num_decoding", "num_prefill_workers", "num_decode_workers")
    return {
        "model": record.model,
        "topology": record.topology,
        "version": record.version,
        "is_ready": record.is_ready,
        "nodes": [
            {
                "name": node.name,
                "hostname": node.hostname,
                "address": node.address,
                "is_lost": node.node_id in lost,
                "problem": node.problem,
                "drain": node.drain,
                "urls": list(node.urls),
                "actors": {actor.name: actor.device for actor in node.actors},
            }
            for node in record.nodes
        ],
        "load": {name: getattr(load, name) for name in counts} if load is not None else None,
        "leans": {one.worker: one.lean for one in load.leans} if load is not None else {},
    }

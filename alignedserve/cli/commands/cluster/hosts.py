"""`alignedserve status`, `logs`, `drain`, `scale` and `stop`: the running cluster of hosts, from any of them."""

import time
from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from alignedserve.cli.commands.cluster.one_host import TAIL_BYTES, load_line, show_log, wait_until_drained
from alignedserve.cli.console import notes, print_json, printable, results
from alignedserve.cluster.deployments.orders import DeploymentReport, DrainNode, NodeOrder, OrderDone, UndoDrain
from alignedserve.cluster.hosts.orders import (
    call_actor,
    connected,
    end_supervisor_of_head,
    give_order,
    lost_nodes,
    node_of,
    running_cluster,
)
from alignedserve.cluster.hosts.ray_directory import RayStorage, ray_storage, waiting_for_head
from alignedserve.cluster.hosts.record import (
    DRAINED,
    ClusterRecord,
    NodeRecord,
    ask_to_stop,
    own_versions,
    read_record,
    recorded_drain_s,
    recorded_id,
)
from alignedserve.cluster.hosts.resizing import node_called
from alignedserve.cluster.hosts.supervisor import SupervisorEnd
from alignedserve.cluster.nodes.agent import end_cluster, has_driver
from alignedserve.config.environment import redis_authority_path, redis_url
from alignedserve.core.errors import PeerLost, ProtocolError, ResourceError
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import is_gateway

_NUM_LAST_LINES = 6  # of a process that does not serve
_FOLLOW_S = 0.5
_STOP_S = 60.0  # for a driver to stop its cluster
_LEAVES_S = 30.0  # for a driver that has stopped it to end
_SILENT_S = 10.0  # after which a driver has died, or hangs
_PATIENCE_S = 30.0  # with one that is told to end


def status(json_output: bool) -> bool:
    """Print nodes, actors, devices, load and versions; return whether the cluster is whole."""
    with connected():
        record = running_cluster()
        lost = lost_nodes(record)
        is_own = record.version == own_versions()
        loads = _loads(record) if is_own else {}  # which only the same version can read
        words = _last_words(record)
    if json_output:
        print_json(_as_document(record, lost, loads, words))
    else:
        results().print(_nodes_table(record, lost))
        if len(record.models) > 1:
            results().print(_models_table(record))
        for name, lines in words.items():
            results().print(f"The end of `alignedserve logs {name}`:", *lines, sep="\n  ", markup=False)
        for report in _served(record) if is_own else ():
            name = f"{report.name}: " if len(record.models) > 1 else ""
            line = f"{name}{load_line(loads.get(report.deployment_id), report.topology)}"
            results().print(printable(line), markup=False)
        results().print(record.version)
        if not is_own:
            results().print(f"This command is of another version, and cannot tell the load: {own_versions()}")
    return not lost and not words and (not is_own or all(report.deployment_id in loads for report in _served(record)))


def logs(actor: str | None, *, follow: bool) -> None:
    """Print the end of a process's log, or the names of those that have one; with `follow` also what comes."""
    with connected():
        record = running_cluster()
        if actor is None:
            for node in record.nodes:
                results().print(f"{node.hostname}: {', '.join(actor.name for actor in node.actors)}")
            return
        agent = node_of(record, actor).agent
        show_log(actor, lambda offset: call_actor(agent, "read_log", actor, offset), follow=follow)


def stop(*, at_once: bool) -> None:
    """Stop the cluster, its driver and the driver's supervisor, also where these fail or hang. What is open is answered
    first, for as long as the cluster's configuration gives it, unless `at_once`. Raises ResourceError when there is
    nothing to stop, or a driver without a supervisor does not end."""
    with connected():
        has_record = recorded_id() is not None
        is_ended = _ask_driver_to_stop(at_once=at_once)
        leaves_s = _LEAVES_S if has_record and is_ended else 0.0
        ending = end_supervisor_of_head(leaves_s=leaves_s, patience_s=_PATIENCE_S)
        if not has_record and ending is SupervisorEnd.NOT_THERE:
            running_cluster()  # says that there is none
        is_left = _end_what_is_left(ending)
    notes().print(_stopped(ending, has_record=has_record, is_left=is_left), soft_wrap=True)


def _ask_driver_to_stop(*, at_once: bool) -> bool:
    began_s = heard_s = time.monotonic()
    patience_s = _STOP_S + (0.0 if at_once else recorded_drain_s())
    while (cluster_id := recorded_id()) is not None:
        # Anew for each: a driver that has died may be replaced by one with a cluster of its own.
        ask_to_stop(cluster_id, at_once=at_once)
        time.sleep(_FOLLOW_S)
        now = time.monotonic()
        if _is_looked_after():
            heard_s = now
        if now - heard_s > _SILENT_S or now - began_s > patience_s:
            return False
    return True


def _is_looked_after() -> bool:
    try:
        record = read_record()
    except ProtocolError:  # of another version; its driver knows the order to stop all the same
        return True
    return record is not None and has_driver(record)


def _end_what_is_left(ending: SupervisorEnd) -> bool:
    """End a cluster without a driver; return whether a cluster was left. Raises ResourceError, see `stop`. `ending`:
    of the supervisor, and so of its driver, which agents may have heard of a moment ago."""
    if recorded_id() is None:
        return False
    record = running_cluster()
    if ending is SupervisorEnd.NOT_THERE and has_driver(record):
        problem = f"the cluster does not end within {_STOP_S:.0f} s; its driver, which has no supervisor, is busy"
        raise ResourceError(f"{problem}: end its `alignedserve serve`")
    end_cluster(record)
    return True


def _stopped(ending: SupervisorEnd, *, has_record: bool, is_left: bool) -> str:
    if ending is SupervisorEnd.KILLED:
        return "Stopped the cluster; its driver did not end by itself and was killed with its supervisor."
    if is_left:
        return "Stopped the cluster, without its driver."
    return "Stopped the cluster." if has_record else "Stopped a cluster that was about to start."


def drain(node: str, within_s: float, *, is_forced: bool, waits: bool) -> None:
    """Drain a node; with `waits` return when it has drained. Raises ResourceError when it may not be."""
    with connected():
        record = running_cluster()
        _give(record.cluster_id, DrainNode(node, within_s, is_forced))
        name = node_called(record.nodes, node).name
        if waits:
            wait_until_drained(name, within_s, lambda: _has_drained(name))


def _has_drained(name: str) -> bool:
    state = next((node.drain for node in running_cluster().nodes if node.name == name), DRAINED)
    if not state:
        raise ResourceError(f"the drain of {name} was undone")
    return state == DRAINED


def undo_drain(node: str) -> None:
    """Use a node again. Raises ResourceError when it neither drains nor has drained."""
    with connected():
        _give(running_cluster().cluster_id, UndoDrain(node))


def _give(cluster_id: str, order: NodeOrder) -> None:
    answer = give_order(cluster_id, order)
    if isinstance(answer, OrderDone):
        results().print(answer.text)


def print_ray_storage(name: str, *, is_worker: bool) -> None:
    """Print how `ray start` keeps its state in the Redis that is named, or waits for a head that does. Raises
    ConfigError for a URL that Ray cannot use."""
    url = redis_url()
    storage = RayStorage(waiting_for_head(url), ()) if is_worker else ray_storage(url, name, redis_authority_path())
    print(storage.shell())


def _last_words(record: ClusterRecord) -> dict[str, list[str]]:
    words: dict[str, list[str]] = {}
    for node in record.nodes:
        for actor in node.failing:
            try:
                part = call_actor(node.agent, "read_log", actor.name, -TAIL_BYTES)
            except PeerLost as error:
                words[actor.name] = [str(error)]
                continue
            lines = part.text.splitlines() if part is not None else []
            words[actor.name] = [printable(line) for line in lines[-_NUM_LAST_LINES:]]
    return words


def _loads(record: ClusterRecord) -> dict[str, ClusterStatus]:
    for node in record.nodes:
        for actor in node.actors:
            if not is_gateway(actor.name):
                continue
            try:
                statuses: dict[str, ClusterStatus] = call_actor(actor.name, "cluster_statuses")
            except PeerLost:
                continue
            if statuses:
                return statuses
    return {}


def _served(record: ClusterRecord) -> list[DeploymentReport]:
    return [model for model in record.models if model.phase == "serving"]


def _nodes_table(record: ClusterRecord, lost: set[str]) -> Table:
    table = Table(title=f"{record.model}, {record.topology}", title_justify="left")
    for heading in ("node", "host", "state", "runs"):
        table.add_column(heading)
    for node in record.nodes:
        state = "lost" if node.node_id in lost else _state_of(node)
        table.add_row(node.name or "-", f"{node.hostname}\n{node.address}", state, escape(node.summary))
    return table


def _models_table(record: ClusterRecord) -> Table:
    table = Table("model", "state", "workers")
    for model in record.models:
        table.add_row(printable(model.name), escape(printable(model.state)), ", ".join(model.workers))
    return table


def _state_of(node: NodeRecord) -> str:
    if node.problem:
        return "refused"
    return node.drain or ("up in part" if node.failing else "up")


def _as_document(
    record: ClusterRecord, lost: set[str], loads: Mapping[str, ClusterStatus], words: Mapping[str, list[str]]
) -> dict[str, object]:
    load = next((loads[report.deployment_id] for report in _served(record) if report.deployment_id in loads), None)
    counts = ("num_queued", "num_prefilling", "num_pooled", "num_decoding", "num_prefill_workers", "num_decode_workers")
    return {
        "model": record.model,
        "topology": record.topology,
        "models": [
            {
                "name": model.name,
                "state": model.phase,
                "failing": dict(model.failing),
                "path": model.path,
                "workers": list(model.workers),
                "load": {name: getattr(loads[model.deployment_id], name) for name in counts}
                if model.deployment_id in loads
                else None,
            }
            for model in record.models
        ],
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
                "failing": {actor.name: {"problem": actor.problem, "log": words[actor.name]} for actor in node.failing},
            }
            for node in record.nodes
        ],
        "load": {name: getattr(load, name) for name in counts} if load is not None else None,
        "leans": {lean.worker: lean.lean for lean in load.leans} if load is not None else {},
    }

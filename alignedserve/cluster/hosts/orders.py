"""The orders to a cluster of hosts, from commands on any node, and its answers: in Ray's key-value store."""

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from alignedserve.cluster.deployments.admin_api import Ask, ask, find_cluster
from alignedserve.cluster.deployments.orders import AdminRequest, Answer, NodeOrder, OrderRefused, Remark, ShowModels
from alignedserve.cluster.hosts import ray_directory
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.record import DRAINED, ClusterRecord, NodeRecord, read_record, recorded_id
from alignedserve.cluster.hosts.supervisor import SupervisorEnd, end_supervisor
from alignedserve.cluster.nodes.ray_nodes import alive_nodes
from alignedserve.cluster.ray_node import address_here, answer_of, join_ray
from alignedserve.config.environment import ray_address
from alignedserve.core.errors import PeerLost, ResourceError

_ORDERS, _ANSWERS, _REMARKS = "order/", "answer/", "remark/"
_POLL_S = 0.2
_ANSWER_S = 30.0
_LOOK_S = 5.0  # between looks whether the cluster is still there
_MAX_REMARKS = 1000  # of an order


def give_order(cluster_id: str, order: AdminRequest, on_remark: Callable[[str], None] = lambda text: None) -> Answer:
    """Give an order and return its last answer; meanwhile the driver may be another. Raises ResourceError with the
    reason for which it is refused, or PeerLost when the cluster ends, or does not answer what it answers at once."""
    name, num_said = secrets.token_hex(8), 0
    ray_directory.put(f"{cluster_id}/{_ORDERS}{name}", msgspec.json.encode(order))
    answer_key, remarks_key = f"{cluster_id}/{_ANSWERS}{name}", f"{cluster_id}/{_REMARKS}{name}"
    begun_s = looked_s = time.monotonic()
    while True:
        answered = ray_directory.get(answer_key)
        remarks = msgspec.json.decode(ray_directory.get(remarks_key) or b"[]", type=list[str])
        for remark in remarks[num_said:]:
            on_remark(remark)
        num_said = max(num_said, len(remarks))
        if answered is not None:
            break
        if time.monotonic() - looked_s > _LOOK_S:
            looked_s = time.monotonic()
            if recorded_id() != cluster_id:
                raise PeerLost("the cluster has ended before the order was carried out")
        if isinstance(order, ShowModels | NodeOrder) and time.monotonic() - begun_s > _ANSWER_S:
            ray_directory.delete(f"{cluster_id}/{_ORDERS}{name}")
            raise PeerLost(f"the driver of the cluster has not answered for {_ANSWER_S:.0f} s; see its log")
        time.sleep(_POLL_S)
    ray_directory.delete(answer_key)
    ray_directory.delete(remarks_key)
    try:
        answer: Answer = msgspec.json.decode(answered, type=Answer)
    except msgspec.MsgspecError as error:
        raise PeerLost("the cluster is of another version") from error
    if isinstance(answer, OrderRefused):
        raise ResourceError(answer.reason)
    return answer


class StoredOrders:
    """An OrderChannel through Ray's store. An order stays there until it is carried out, for the next driver too."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._taken: set[str] = set()  # that are still in the store
        self._answers: deque[tuple[str, Answer]] = deque()  # that are to be written

    def take(self) -> list[tuple[str, AdminRequest]]:
        """See OrderChannel; an order that cannot be read is refused. Raises PeerLost when Ray's head does not answer.
        What could not be said before is said first."""
        self._write()
        orders = []
        for key in ray_directory.keys(f"{self._cluster_id}/{_ORDERS}"):
            name = key.rpartition("/")[2]
            encoded = ray_directory.get(f"{self._cluster_id}/{_ORDERS}{name}")
            if encoded is None or name in self._taken:
                continue
            self._taken.add(name)
            try:
                orders.append((name, msgspec.json.decode(encoded, type=AdminRequest)))
            except msgspec.MsgspecError as error:
                self.answer(name, OrderRefused(f"an order that cannot be read: {error}"))
        return orders

    def answer(self, order_id: str, answer: Answer) -> None:
        self._answers.append((order_id, answer))
        with contextlib.suppress(PeerLost):
            self._write()

    def close(self) -> None:
        """Do nothing: what is in the store is the next driver's."""

    def _write(self) -> None:
        while self._answers:
            name, answer = self._answers[0]
            if isinstance(answer, Remark):
                key = f"{self._cluster_id}/{_REMARKS}{name}"
                said = msgspec.json.decode(ray_directory.get(key) or b"[]", type=list[str])
                ray_directory.put(key, msgspec.json.encode([*said, answer.text][-_MAX_REMARKS:]))
            else:
                ray_directory.put(f"{self._cluster_id}/{_ANSWERS}{name}", msgspec.json.encode(answer))
                ray_directory.delete(f"{self._cluster_id}/{_ORDERS}{name}")
                self._taken.discard(name)
            self._answers.popleft()


_CALL_S = 10.0
_TASK_S = 30.0  # for Ray to start a process there on a busy host, and for what was killed to be gone


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Join Ray during a command. Raises ResourceError when none runs here."""
    join_ray(ray_address() or address_here(), NAMESPACE)
    try:
        yield
    finally:
        ray.shutdown()


def running_cluster() -> ClusterRecord:
    """Return the record of the cluster that runs. Raises ResourceError when none does."""
    record = read_record()
    if record is None:
        raise ResourceError("no cluster serves on these hosts; start one with `alignedserve up`")
    return record


@contextlib.contextmanager
def found_cluster(cluster_id: str | None) -> Iterator[Ask]:
    """Find the cluster of this host, or of the Ray cluster around it; yield a function that gives orders. `cluster_id`:
    name of the run folder, or id in the record; None: only one runs. Hosts come first where RAY_ADDRESS is set. Raises
    ResourceError naming those that there are."""
    try:
        door = find_cluster(cluster_id) if ray_address() is None else None
        missing = None
    except ResourceError as error:
        door, missing = None, error
    if door is not None:
        yield partial(ask, door)
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(connected())
            known = running_cluster().cluster_id
        except ResourceError:
            if missing is not None:
                raise missing from None
            raise
        if cluster_id not in (None, known):
            raise missing or ResourceError(f"no cluster {cluster_id} serves on these hosts; it is {known}")
        yield partial(give_order, known)


def lost_nodes(record: ClusterRecord) -> set[str]:
    """Return the ids of recorded nodes that Ray no longer has; drained nodes may be gone."""
    alive = {node.node_id for node in alive_nodes()}
    return {node.node_id for node in record.nodes if node.drain != DRAINED} - alive


def call_actor(name: str, method: str, *arguments: object) -> Any:
    """Call a method of a named actor. Raises PeerLost when it is not there or does not answer."""
    try:
        reference = getattr(ray.get_actor(name, NAMESPACE), method).remote(*arguments)
    except (RayError, ValueError) as error:
        raise PeerLost(f"{name} does not answer: {str(error).splitlines()[0]}") from error
    return answer_of(name, reference, _CALL_S)


def node_of(record: ClusterRecord, actor: str) -> NodeRecord:
    """Return the node on which this process runs. Raises ResourceError listing the nodes."""
    for node in record.nodes:
        if any(process.name == actor for process in node.actors):
            return node
    known = ", ".join(process.name for node in record.nodes for process in node.actors)
    raise ResourceError(f"there is no {actor} in this cluster; there are {known}")


def end_supervisor_of_head(*, leaves_s: float, patience_s: float) -> SupervisorEnd:
    """End the supervisor of the driver, which is on the head, from any node; return how. See `end_supervisor`. Raises
    PeerLost when the head does not answer."""
    head = alive_nodes()[0]
    if head.node_id == ray.get_runtime_context().get_node_id():
        return end_supervisor(leaves_s=leaves_s, patience_s=patience_s)
    task: Any = ray.remote(end_supervisor)
    call = task.options(num_cpus=0, max_retries=0, **head.options).remote(leaves_s=leaves_s, patience_s=patience_s)
    answered: SupervisorEnd = answer_of(head, call, leaves_s + patience_s + _TASK_S)
    return answered

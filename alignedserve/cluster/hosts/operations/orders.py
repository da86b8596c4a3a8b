"""Orders to the driver of a running cluster, from commands on any node, and its answers: in Ray's key-value store."""

import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from alignedserve.cluster.deployments.orders import AdminRequest, Refused, Remark, ShowModels
from alignedserve.cluster.deployments.orders import Answer as ModelAnswer
from alignedserve.cluster.hosts import ray_directory
from alignedserve.cluster.hosts.record import recorded_id
from alignedserve.core.errors import PeerLost, ResourceError

_ORDERS, _ANSWERS, _REMARKS = "order/", "answer/", "remark/"
_POLL_S = 0.2
_ANSWER_S = 30.0
_LOOK_S = 5.0  # between looks whether the cluster is still there
_MAX_REMARKS = 1000  # of an order


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """Order: let the work of a node finish or go elsewhere, then end its processes and use it no more."""

    node: str  # its name, host name or address
    within_s: float  # in which requests may finish where they are
    is_forced: bool = False  # also the last one of its kind


class UndoDrain(msgspec.Struct, frozen=True, tag=True):
    """Order: use a node again that drains or has drained."""

    node: str


class ScaleWorkers(msgspec.Struct, frozen=True, tag=True):
    """Order: have so many workers of these kinds in the whole cluster."""

    counts: Mapping[str, int]
    model: str | None = None  # by its name for clients; None: there is one


Order = DrainNode | UndoDrain | ScaleWorkers | AdminRequest


class Answer(msgspec.Struct, frozen=True):
    """The driver's answer to an order."""

    text: str
    is_refused: bool = False


def give_order(cluster_id: str, order: Order) -> Answer:
    """Give an order to the driver of this cluster and wait for its answer.

    Raises ResourceError with the reason for which it is refused, or PeerLost when the driver does not answer.
    """
    name = secrets.token_hex(8)
    ray_directory.put(f"{cluster_id}/{_ORDERS}{name}", msgspec.json.encode(order))
    answer_key = f"{cluster_id}/{_ANSWERS}{name}"
    ends_s = time.monotonic() + _ANSWER_S
    while (found := ray_directory.get(answer_key)) is None:
        if time.monotonic() > ends_s:
            ray_directory.delete(f"{cluster_id}/{_ORDERS}{name}")
            raise PeerLost(f"the driver of the cluster has not answered for {_ANSWER_S:.0f} s; see its log")
        time.sleep(_POLL_S)
    ray_directory.delete(answer_key)
    answer = msgspec.json.decode(found, type=Answer)
    if answer.is_refused:
        raise ResourceError(answer.text)
    return answer


def give_model_order(cluster_id: str, order: AdminRequest, on_remark: Callable[[str], None]) -> ModelAnswer:
    """Give an order about models, and return its last answer; meanwhile the driver may be another.

    Raises ResourceError with the reason for which it is refused, or PeerLost when the cluster ends.
    """
    name, num_said = secrets.token_hex(8), 0
    ray_directory.put(f"{cluster_id}/{_ORDERS}{name}", msgspec.json.encode(order))
    answer_key, remarks_key = f"{cluster_id}/{_ANSWERS}{name}", f"{cluster_id}/{_REMARKS}{name}"
    begun_s = looked_s = time.monotonic()
    while True:
        found = ray_directory.get(answer_key)
        remarks = msgspec.json.decode(ray_directory.get(remarks_key) or b"[]", type=list[str])
        for remark in remarks[num_said:]:
            on_remark(remark)
        num_said = max(num_said, len(remarks))
        if found is not None:
            break
        if time.monotonic() - looked_s > _LOOK_S:
            looked_s = time.monotonic()
            if recorded_id() != cluster_id:
                raise PeerLost("the cluster has ended before the order was carried out")
        if isinstance(order, ShowModels) and time.monotonic() - begun_s > _ANSWER_S:
            ray_directory.delete(f"{cluster_id}/{_ORDERS}{name}")
            raise PeerLost(f"the driver of the cluster has not answered for {_ANSWER_S:.0f} s; see its log")
        time.sleep(_POLL_S)
    ray_directory.delete(answer_key)
    ray_directory.delete(remarks_key)
    try:
        answer: ModelAnswer = msgspec.json.decode(found, type=ModelAnswer)
    except msgspec.MsgspecError as error:
        raise PeerLost("the cluster is of another version") from error
    if isinstance(answer, Refused):
        raise ResourceError(answer.reason)
    return answer


def answer_model_order(cluster_id: str, name: str, answer: ModelAnswer) -> None:
    """Answer an order about models; any but a Remark is the last answer, and the order is gone then.

    May be repeated. Raises PeerLost when Ray's head does not answer.
    """
    if isinstance(answer, Remark):
        key = f"{cluster_id}/{_REMARKS}{name}"
        said = msgspec.json.decode(ray_directory.get(key) or b"[]", type=list[str])
        ray_directory.put(key, msgspec.json.encode([*said, answer.text][-_MAX_REMARKS:]))
        return
    ray_directory.put(f"{cluster_id}/{_ANSWERS}{name}", msgspec.json.encode(answer))
    ray_directory.delete(f"{cluster_id}/{_ORDERS}{name}")


def take_orders(cluster_id: str) -> list[tuple[str, Order]]:
    """Return the orders that wait, with their names; one that cannot be read is refused.

    Each is answered once by `answer_order`. Raises PeerLost when Ray's head does not answer.
    """
    orders = []
    for key in ray_directory.keys(f"{cluster_id}/{_ORDERS}"):
        name = key.rpartition("/")[2]
        found = ray_directory.get(f"{cluster_id}/{_ORDERS}{name}")
        if found is None:
            continue
        try:
            orders.append((name, msgspec.json.decode(found, type=Order)))
        except msgspec.MsgspecError as error:
            answer_order(cluster_id, name, Answer(f"an order that cannot be read: {error}", is_refused=True))
    return orders


def answer_order(cluster_id: str, name: str, answer: Answer) -> None:
    """Answer an order, which is gone then. Raises PeerLost when Ray's head does not answer."""
    ray_directory.put(f"{cluster_id}/{_ANSWERS}{name}", msgspec.json.encode(answer))
    ray_directory.delete(f"{cluster_id}/{_ORDERS}{name}")

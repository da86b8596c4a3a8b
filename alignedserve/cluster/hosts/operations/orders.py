"""Orders to the driver of a running cluster, from commands on any node, and its answers: in Ray's key-value store."""

import secrets
import time
from collections.abc import Mapping

import msgspec

from alignedserve.cluster.hosts import ray_directory
from alignedserve.core.errors import PeerLost, ResourceError

_ORDERS, _ANSWERS = "order/", "answer/"
_POLL_S = 0.2
_ANSWER_S = 30.0


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """Order: let the work of a node finish or go elsewhere, then end its processes and use it no more."""

    node: str  # its name, host name or address
    within_s: float  # in which requests may finish where they are
    is_forced: bool = False  # also the last one of its kind


class UndoDrain(msgspec.Struct, frozen=True, tag=True):
    """Order: use a node again that drains or has drained."""

    node: str


class ScaleWorkers(msgspec.Struct, frozen=True, tag=True):
    """Order: have so many workers or gateways of these kinds in the whole cluster."""

    counts: Mapping[str, int]


Order = DrainNode | UndoDrain | ScaleWorkers


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

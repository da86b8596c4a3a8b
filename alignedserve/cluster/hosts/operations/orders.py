"""The orders to a cluster of hosts, from commands on any node, and its answers: in Ray's key-value store."""

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable

import msgspec

from alignedserve.cluster.deployments.orders import AdminRequest, Answer, NodeOrder, Refused, Remark, ShowModels
from alignedserve.cluster.hosts import ray_directory
from alignedserve.cluster.hosts.record import recorded_id
from alignedserve.core.errors import PeerLost, ResourceError

_ORDERS, _ANSWERS, _REMARKS = "order/", "answer/", "remark/"
_POLL_S = 0.2
_ANSWER_S = 30.0
_LOOK_S = 5.0  # between looks whether the cluster is still there
_MAX_REMARKS = 1000  # of an order


def give_order(cluster_id: str, order: AdminRequest, on_remark: Callable[[str], None] = lambda text: None) -> Answer:
    """Give an order and return its last answer; meanwhile the driver may be another.

    Raises ResourceError with the reason for which it is refused, or PeerLost when the cluster ends, or does not answer
    what it answers at once.
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
        if isinstance(order, ShowModels | NodeOrder) and time.monotonic() - begun_s > _ANSWER_S:
            ray_directory.delete(f"{cluster_id}/{_ORDERS}{name}")
            raise PeerLost(f"the driver of the cluster has not answered for {_ANSWER_S:.0f} s; see its log")
        time.sleep(_POLL_S)
    ray_directory.delete(answer_key)
    ray_directory.delete(remarks_key)
    try:
        answer: Answer = msgspec.json.decode(found, type=Answer)
    except msgspec.MsgspecError as error:
        raise PeerLost("the cluster is of another version") from error
    if isinstance(answer, Refused):
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

        What could not be said before is said first.
        """
        self._write()
        orders = []
        for key in ray_directory.keys(f"{self._cluster_id}/{_ORDERS}"):
            name = key.rpartition("/")[2]
            found = ray_directory.get(f"{self._cluster_id}/{_ORDERS}{name}")
            if found is None or name in self._taken:
                continue
            self._taken.add(name)
            try:
                orders.append((name, msgspec.json.decode(found, type=AdminRequest)))
            except msgspec.MsgspecError as error:
                self.answer(name, Refused(f"an order that cannot be read: {error}"))
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

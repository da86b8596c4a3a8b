"""Gives orders about models to a running cluster: on this host by its door, of hosts through Ray."""

import contextlib
from collections.abc import Callable, Iterator

from alignedserve.cluster.deployments import client as door_client
from alignedserve.cluster.deployments.orders import AdminRequest, Answer, Models, ShowModels
from alignedserve.cluster.hosts.client import connected, running_cluster
from alignedserve.cluster.hosts.operations.orders import give_model_order
from alignedserve.config.environment import ray_address
from alignedserve.core.errors import PeerLost, ResourceError

OnRemark = Callable[[str], None]
Ask = Callable[[AdminRequest, OnRemark], Answer]  # raises ResourceError with the reason of a refusal, or PeerLost


@contextlib.contextmanager
def found_cluster(cluster_id: str | None) -> Iterator[Ask]:
    """Find the cluster that runs on this host, or on the hosts that it belongs to; yield what asks it.

    `cluster_id`: of its run folder, or of the record of its hosts; None: there is one. Hosts come first where
    RAY_ADDRESS is set. Raises ResourceError naming those that there are.
    """
    try:
        door = door_client.find_cluster(cluster_id) if ray_address() is None else None
        missing = None
    except ResourceError as error:
        door, missing = None, error
    if door is not None:
        found = door
        yield lambda request, on_remark: door_client.ask(found, request, on_remark)
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
        yield lambda request, on_remark: give_model_order(known, request, on_remark)


def show(ask: Ask) -> Models:
    """Return the models of a cluster. Raises PeerLost."""
    answer = ask(ShowModels(), lambda text: None)
    if not isinstance(answer, Models):
        raise PeerLost("the cluster is of another version")
    return answer

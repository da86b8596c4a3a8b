"""The nodes that may be drained, and the reasons why others may not."""

from collections.abc import Sequence

from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.placement import NodeShare
from alignedserve.core.errors import ResourceError


def node_called(nodes: Sequence[NodeRecord], name: str) -> NodeRecord:
    """Return the node of this name, host name or address. Raises ResourceError naming those that there are."""
    found = [node for node in nodes if node.name == name] or [node for node in nodes if node.is_called(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node.name or 'one not used'} ({node.hostname}, {node.address})" for node in nodes)
    problem = "more than one node is called" if found else "there is no node"
    raise ResourceError(f"{problem} {name}; there are {known}")


def require_drainable(
    node: NodeRecord, share: NodeShare | None, others: Sequence[NodeShare], *, is_forced: bool
) -> None:
    """Raise ResourceError when this node cannot be drained.

    `share`: what runs there; None: nothing does. `others`: of the nodes that neither drain nor have drained.
    """
    if node.drain == DRAINED:
        raise ResourceError(f"{node.name} has drained already")
    if share is None:
        raise ResourceError(f"{node.hostname} is not used: {node.problem}")
    if share.is_head:
        raise ResourceError(
            f"{node.name} is the head: the router, the driver of batches and the driver of the cluster run there and "
            "nowhere else; `alignedserve stop` ends the cluster"
        )
    for kind in ("decode", "prefill"):
        if getattr(share, kind) and not any(getattr(other, kind) for other in others) and not is_forced:
            raise ResourceError(
                f"{node.name} has the last {kind} workers: nothing would be served until another node has some; "
                "--force drains it all the same"
            )

"""The nodes that may be drained, and the reasons why others may not."""

from collections.abc import Sequence

from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.placement import NodeShare
from alignedserve.core.errors import ResourceError


def node_called(nodes: Sequence[NodeRecord], name: str) -> NodeRecord:
    """Return the node of this name, host name or address. Raises ResourceError listing the nodes."""
    found = [node for node in nodes if node.name == name] or [node for node in nodes if node.is_called(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node.name or 'one not used'} ({node.hostname}, {node.address})" for node in nodes)
    problem = "more than one node is called" if found else "there is no node"
    raise ResourceError(f"{problem} {name}; there are {known}")


def require_drainable(
    node: NodeRecord,
    shares: Sequence[NodeShare] | None,
    others: Sequence[Sequence[NodeShare]],
    *,
    is_forced: bool,
) -> None:
    """Raise ResourceError when this node cannot be drained.

    `shares`: what runs there, of each deployment, that with the gateways first; None: nothing does. `others`: of the
    nodes that neither drain nor have drained.
    """
    if node.drain == DRAINED:
        raise ResourceError(f"{node.name} has drained already")
    if shares is None:
        raise ResourceError(f"{node.hostname} is not used: {node.problem}")
    if shares[0].is_head:
        raise ResourceError(
            f"{node.name} is the head: the router, the driver of batches and the driver of the cluster run there and "
            "nowhere else; `alignedserve stop` ends the cluster"
        )
    left = {(share.deployment_id, kind) for other in others for share in other for kind in _kinds_of(share)}
    for share in shares:
        last = next((kind for kind in _kinds_of(share) if (share.deployment_id, kind) not in left), None)
        if last is not None and not is_forced:
            named = ", ".join(getattr(share, last))
            raise ResourceError(
                f"{node.name} has the last {last} workers ({named}): nothing of their model would be served until "
                "another node has some; --force drains it all the same"
            )


def _kinds_of(share: NodeShare) -> list[str]:
    return [kind for kind in ("decode", "prefill") if getattr(share, kind)]

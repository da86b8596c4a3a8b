"""Plans how the numbers of workers change while a cluster serves: pure, by what runs where.

A node keeps one worker of each kind that it has: its pool's batches need a decode worker beside it, and its sizes were
chosen for workers of those kinds. Whole nodes are drained instead.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alignedserve.cluster.hosts.record import DRAINED, NodeRecord
from alignedserve.cluster.placement import NodeCapacity, NodeShare
from alignedserve.core.errors import ConfigError, ResourceError

KINDS = ("prefill", "decode")
_MAX_COUNT = 10_000


class RunningNode(NamedTuple):
    """A node that serves and does not drain, without the workers that do."""

    share: NodeShare
    capacity: NodeCapacity


class Resize(NamedTuple):
    """The changes: kinds of workers and nodes, one for each worker."""

    added: tuple[tuple[str, str], ...] = ()
    removed: tuple[tuple[str, str], ...] = ()


def parse_counts(arguments: Sequence[str]) -> dict[str, int]:
    """Parse arguments such as `decode=4`. Raises ConfigError naming the one that is wrong."""
    counts: dict[str, int] = {}
    for text in arguments:
        kind, _, number = text.partition("=")
        if kind not in KINDS or not number.isascii() or not number.isdigit() or len(number) > len(str(_MAX_COUNT)):
            raise ConfigError(
                f"{text[:64]!r} is no number of workers; say decode=N or prefill=N (gateways follow nodes)"
            )
        if kind in counts:
            raise ConfigError(f"{kind} is given twice")
        counts[kind] = int(number)
    if not counts:
        raise ConfigError("say how many workers there are to be: decode=N, prefill=N")
    return counts


def plan_resize(nodes: Sequence[RunningNode], wanted: Mapping[str, int], *, is_separate: bool) -> Resize:
    """Return what to add and to remove. Raises ConfigError or ResourceError, in one sentence, when it cannot be."""
    changes = [_plan_kind(kind, nodes, count, is_separate=is_separate) for kind, count in wanted.items()]
    return Resize(*(tuple(pair for change in changes for pair in change[index]) for index in range(2)))


def _plan_kind(kind: str, nodes: Sequence[RunningNode], wanted: int, *, is_separate: bool) -> Resize:
    if kind not in KINDS or not 0 <= wanted <= _MAX_COUNT:
        raise ConfigError(f"{kind}={wanted} is no number of workers; say decode=N or prefill=N")
    if kind == "prefill" and not is_separate:
        raise ConfigError(
            f"prefill={wanted}: the workers of this cluster do both phases and are scaled by decode=N alone; separate "
            "prefill workers are those of topology=disaggregated"
        )
    able = [node for node in nodes if getattr(node.share, kind)]
    counts = {node.share.node: len(getattr(node.share, kind)) for node in able}
    least = len(counts)
    if wanted < least:
        raise ResourceError(
            f"{least} nodes keep one {kind} worker each ({', '.join(counts)}), so {kind}={wanted} is not possible; "
            "`alignedserve drain NODE` takes a whole node out"
            if least > 1
            else f"one {kind} worker stays, so {kind}={wanted} is not possible"
        )
    weights = {node.share.node: node.capacity.weight for node in able}
    added: list[tuple[str, str]] = []
    removed: list[tuple[str, str]] = []
    while sum(counts.values()) < wanted:
        free = [node.share.node for node in able if _has_device(node, added, kind)]
        if not free:
            raise ResourceError(f"every GPU of the nodes with {kind} workers has a worker; {kind}={wanted} needs more")
        name = max(free, key=lambda name: (weights[name] / (counts[name] + 1), -counts[name]))
        counts[name] += 1
        added.append((kind, name))
    while sum(counts.values()) > wanted:
        name = min((name for name in counts if counts[name] > 1), key=lambda name: weights[name] / counts[name])
        counts[name] -= 1
        removed.append((kind, name))
    return Resize(tuple(added), tuple(removed))


def _has_device(node: RunningNode, added: Sequence[tuple[str, str]], kind: str) -> bool:
    """Return whether a worker more can compute there: on the cores, or on a GPU that has none. The GPUs of a node go to
    prefill workers first, so that one more of those would get a decode worker's."""
    if not node.capacity.gpus:
        return True
    num_workers = node.share.num_workers + sum(name == node.share.node for _, name in added)
    return kind == "decode" and num_workers < len(node.capacity.gpus)


def node_called(nodes: Sequence[NodeRecord], name: str) -> NodeRecord:
    """Return the node of this name, host name or address. Raises ResourceError listing the nodes."""
    matching = [node for node in nodes if node.name == name] or [node for node in nodes if node.is_called(name)]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(f"{node.name or 'one not used'} ({node.hostname}, {node.address})" for node in nodes)
    problem = "more than one node is called" if matching else "there is no node"
    raise ResourceError(f"{problem} {name}; there are {known}")


def require_drainable(
    node: NodeRecord, shares: Sequence[NodeShare] | None, others: Sequence[Sequence[NodeShare]], *, is_forced: bool
) -> None:
    """Raise ResourceError when this node cannot be drained. `shares`: what runs there, of each deployment, that with
    the gateways first; None: nothing does. `others`: of the nodes that neither drain nor have drained."""
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

"""Decides which nodes belong to a running cluster: events in, commands out.

The life of a node:
1. NodesSeen has one that is new: PrepareNode. It is examined, gets a share of the cluster, and actors.
2. NodeJoined: it is a member. NodeRefused: it is left alone, for as long as it lives. NodePostponed: it is prepared
   anew when it is seen next.
3. NodesSeen lacks it: a member is lost, ForgetNode. Its share stays vacant until a node of that host comes.

Announce follows whatever a command on any node is to see.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """Event: these nodes are alive."""

    node_ids: tuple[str, ...]  # Ray's, in the order in which they are to join


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Event: a node that was prepared has its actors."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """Event: a node cannot be used."""

    node_id: str
    problem: str


@dataclass(frozen=True, slots=True)
class NodePostponed:
    """Event: a node cannot be used yet."""

    node_id: str


@dataclass(frozen=True, slots=True)
class PrepareNode:
    """Command: examine this node and give it its actors. Answered by NodeJoined, NodeRefused or NodePostponed."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ForgetNode:
    """Command: forget the actors of this node, which is gone."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Command: write the record of the cluster."""


MembershipEvent = NodesSeen | NodeJoined | NodeRefused | NodePostponed
MembershipCommand = PrepareNode | ForgetNode | Announce


class Membership:
    """The state machine over the nodes of one cluster."""

    def __init__(self, members: tuple[str, ...]) -> None:
        """`members`: with which it was started, the head first."""
        self._members = dict.fromkeys(members)
        self._preparing: dict[str, None] = {}
        self._refused: dict[str, str] = {}

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes that have their actors, in the order in which they came."""
        return tuple(self._members)

    @property
    def refused(self) -> Mapping[str, str]:
        """Nodes that are not used, and why."""
        return self._refused

    def refuse(self, node_id: str, problem: str) -> None:
        """Note a node that was refused before the cluster was started."""
        self._refused[node_id] = problem

    def on_event(self, event: MembershipEvent) -> list[MembershipCommand]:
        """Return the commands that follow. Touches nothing outside self."""
        match event:
            case NodesSeen(node_ids):
                return self._seen(node_ids)
            case NodeJoined(node_id):
                self._preparing.pop(node_id)
                self._members[node_id] = None
                return [Announce()]
            case NodeRefused(node_id, problem):
                self._preparing.pop(node_id)
                self._refused[node_id] = problem
                return [Announce()]
            case NodePostponed(node_id):
                self._preparing.pop(node_id)
                return []

    def _seen(self, node_ids: tuple[str, ...]) -> list[MembershipCommand]:
        alive = frozenset(node_ids)  # membership only
        lost = [node_id for node_id in self._members if node_id not in alive]
        left = [node_id for node_id in self._refused if node_id not in alive]
        for known in (self._members, self._preparing, self._refused):
            for node_id in [one for one in known if one not in alive]:
                del known[node_id]
        commands: list[MembershipCommand] = [ForgetNode(node_id) for node_id in lost]
        if lost or left:
            commands.append(Announce())
        for node_id in node_ids:
            if not any(node_id in known for known in (self._members, self._preparing, self._refused)):
                self._preparing[node_id] = None
                commands.append(PrepareNode(node_id))
        return commands

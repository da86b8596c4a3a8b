"""Decides which nodes belong to a running cluster: events in, commands out.

The life of a node:
1. NodesSeen has one that is new: PrepareNode. It is examined, gets a share of the cluster, and actors.
2. NodeJoined: it is a member. NodeRefused: the node stays out while it lives. NodePostponed: it is prepared
   anew after a pause, which doubles with every time.
3. NodesSeen lacks it: a member is lost, ForgetNode; preparations end, CancelPreparation. Its share stays vacant until
   a node of that host comes.
4. DrainAsked: a member drains. NodeDrained: EndNode, and its host stays out, also when it comes back under another id,
   until DrainUndone. A node given back to Ray stays out while it lives.

Announce follows whatever a command on any node is to see.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Host = tuple[str, str]  # its name and address; nodes of a test may share one

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """Event: these nodes are alive."""

    hosts: Mapping[str, Host]  # by Ray's id, in the order in which they are to join


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
    """Event: a node could not be prepared now, and perhaps can be later."""

    node_id: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Event: a member is to drain."""

    node_id: str
    is_given_back: bool = False  # to Ray, as it is not needed


@dataclass(frozen=True, slots=True)
class NodeDrained:
    """Event: nothing is left on a member that drains, or its time is over."""

    node_id: str


@dataclass(frozen=True, slots=True)
class DrainUndone:
    """Event: a node that drains, or has drained, is to be used again."""

    node_id: str  # that it has, or had, as a member


@dataclass(frozen=True, slots=True)
class PrepareNode:
    """Command: examine this node and give it its actors. Answered by NodeJoined, NodeRefused or NodePostponed."""

    node_id: str


@dataclass(frozen=True, slots=True)
class CancelPreparation:
    """Command: end what was begun by PrepareNode; the node is gone. Answered by nothing."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ForgetNode:
    """Command: forget the actors of this node, which is gone."""

    node_id: str


@dataclass(frozen=True, slots=True)
class EndNode:
    """Command: end the actors of this node, which has drained."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Command: write the record of the cluster."""


MembershipEvent = NodesSeen | NodeJoined | NodeRefused | NodePostponed | DrainAsked | NodeDrained | DrainUndone
MembershipCommand = PrepareNode | CancelPreparation | ForgetNode | EndNode | Announce


@dataclass(slots=True)
class _Postponed:
    pause_s: float
    until_s: float


@dataclass(slots=True)
class _Drained:
    host: Host
    node_id: str  # that it has now


class Membership:
    """The state machine over the nodes of one cluster."""

    def __init__(self, members: Mapping[str, Host]) -> None:
        self._members = dict.fromkeys(members)
        self._preparing: dict[str, None] = {}
        self._postponed: dict[str, _Postponed] = {}  # also while it is prepared anew
        self._refused: dict[str, str] = {}
        self._draining: dict[str, bool] = {}  # members; True: to be given back
        self._given_back: dict[str, None] = {}
        self._drained: dict[str, _Drained] = {}  # by the id of the member
        self._hosts = members  # of the nodes that are alive

    @property
    def draining(self) -> tuple[str, ...]:
        return tuple(self._draining)

    @property
    def drained(self) -> tuple[str, ...]:
        return tuple(self._drained)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def refused(self) -> Mapping[str, str]:
        return self._refused

    @property
    def released(self) -> tuple[str, ...]:
        return (*self._given_back, *(node_id for node_id, is_given_back in self._draining.items() if is_given_back))

    def refuse(self, node_id: str, problem: str) -> None:
        self._refused[node_id] = problem

    def keep_out(self, node_id: str, host: Host) -> None:
        self._drained[node_id] = _Drained(host, node_id)

    def on_event(self, event: MembershipEvent, now: float) -> list[MembershipCommand]:
        match event:
            case NodesSeen(hosts):
                commands = self._forget_missing(hosts)
                self._hosts = hosts
                self._keep_out(hosts)
                return [*commands, *self._prepare_new(hosts, now)]
            case DrainAsked(node_id, is_given_back):
                self._draining[node_id] = is_given_back
                return [Announce()]
            case NodeDrained(node_id):
                del self._members[node_id]
                if self._draining.pop(node_id):
                    self._given_back[node_id] = None
                else:
                    self._drained[node_id] = _Drained(self._hosts[node_id], node_id)
                return [EndNode(node_id), Announce()]
            case DrainUndone(node_id):
                self._draining.pop(node_id, None)
                self._drained.pop(node_id, None)
                self._given_back.pop(node_id, None)
                return [Announce()]
            case NodeJoined(node_id):
                del self._preparing[node_id]
                self._postponed.pop(node_id, None)
                self._members[node_id] = None
                return [Announce()]
            case NodeRefused(node_id, problem):
                del self._preparing[node_id]
                self._postponed.pop(node_id, None)
                self._refused[node_id] = problem
                return [Announce()]
            case NodePostponed(node_id):
                del self._preparing[node_id]
                former = self._postponed.get(node_id)
                pause_s = min(2 * former.pause_s, _LONGEST_PAUSE_S) if former is not None else _FIRST_PAUSE_S
                self._postponed[node_id] = _Postponed(pause_s, now + pause_s)
                return []

    def _keep_out(self, hosts: Mapping[str, Host]) -> None:
        for drained in self._drained.values():
            if drained.node_id in hosts:
                continue
            same = (node_id for node_id, host in hosts.items() if host == drained.host and not self._is_known(node_id))
            drained.node_id = next(same, drained.node_id)

    def _is_known(self, node_id: str) -> bool:
        is_drained = any(drained.node_id == node_id for drained in self._drained.values())
        known = (self._members, self._preparing, self._refused, self._given_back)
        return is_drained or any(node_id in ids for ids in known)

    def _forget_missing(self, alive: Mapping[str, Host]) -> list[MembershipCommand]:
        lost = [node_id for node_id in self._members if node_id not in alive]
        cancelled = [node_id for node_id in self._preparing if node_id not in alive]
        left = [node_id for node_id in (*self._refused, *self._given_back) if node_id not in alive]
        for node_id in [node_id for node_id in self._draining if node_id not in alive]:  # it was to go
            if not self._draining.pop(node_id):
                self._drained[node_id] = _Drained(self._hosts[node_id], node_id)
        for node_id in (*lost, *cancelled, *left, *(node for node in list(self._postponed) if node not in alive)):
            for known in (self._members, self._preparing, self._refused, self._given_back, self._postponed):
                known.pop(node_id, None)
        commands: list[MembershipCommand] = [CancelPreparation(node_id) for node_id in cancelled]
        commands += [ForgetNode(node_id) for node_id in lost]
        return [*commands, *([Announce()] if lost or left else [])]

    def _prepare_new(self, hosts: Mapping[str, Host], now: float) -> list[MembershipCommand]:
        commands: list[MembershipCommand] = []
        for node_id in hosts:
            if self._is_known(node_id):
                continue
            postponed = self._postponed.get(node_id)
            if postponed is None or now >= postponed.until_s:
                self._preparing[node_id] = None
                commands.append(PrepareNode(node_id))
        return commands

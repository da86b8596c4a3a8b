"""Compares what is wanted of a running cluster with what its processes report: pure, rows and reports in, steps out.

A row of `WantedCluster` is a wish that has not come true yet; the rows outlive their driver.
1. Every node that is alive is to serve: it is prepared. A refused node stays out while it lives, and a node that could
   not be prepared is tried again after a pause, which doubles each time. A lost node is forgotten.
2. A node or a worker that drains finishes its requests; what is left after a while is moved, and a little later it
   ends. A drained host stays out, also when it comes back under another id; a node given back to Ray stays out while it
   lives.
3. Workers start anew one after the other: each drains, ends, and is registered at its router before the next drains.
4. A process that does not serve is started again after a pause, which doubles with every failed start. A process that
   has ended is Ray's to start again, at once.
A step is given until reports show it: a failed step, or a driver that died, costs one more look.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from alignedserve.process.addresses import router_of

Host = tuple[str, str]  # its name and address; nodes of a test may share one

MOVING_S = 5.0  # between the move of what is left and the end
RETURN_S = 600.0  # for a worker to load its model and serve again
_FIRST_POSTPONED_S = 1.0
_LONGEST_POSTPONED_S = 30.0
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 160.0
SETTLED_S = 60.0  # after which a process has served, and its next failure is a first one
STARTS_AGAIN = "its process has ended and starts again"
_FEW_FAILURES = 1  # failed starts, after which the next one may well succeed
_MAX_DOUBLINGS = 16  # more than the longest pause has; no power of thousands of failed starts


class Act(Enum):
    """Kinds of steps."""

    PREPARE = auto()  # examine a node and give it its actors
    CANCEL = auto()  # end what PREPARE began: the node is gone
    FORGET = auto()  # forget the actors of a node that is gone
    END_NODE = auto()  # end the actors of a node that has drained
    END_WORKER = auto()  # end a worker that has drained
    RESTART = auto()  # end a worker's process, which Ray starts again
    START_AGAIN = auto()  # start a process anew that serves nothing
    SAY = auto()  # tell the giver of an order what is being done
    DONE = auto()  # tell the giver that the order was carried out
    REFUSE = auto()  # tell the giver why it was not


class ClusterStep(NamedTuple):
    """One step; it may be repeated."""

    act: Act
    subject: str  # a node by Ray's id, a process by its name, or an order by its id
    text: str = ""  # for the giver of the order


@dataclass(frozen=True, slots=True)
class ProcessDrain:
    """The processes that drain together, of a node or of one worker."""

    workers: tuple[str, ...]  # with the pool of a whole node
    gateways: tuple[str, ...]
    moves_s: float  # when what is left is moved
    is_given_back: bool = False  # the node, to Ray
    starts_again: bool = False  # the worker, in its turn

    @property
    def ends_s(self) -> float:
        return self.moves_s + MOVING_S

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.workers, *self.gateways)


@dataclass(slots=True)
class DrainedNode:
    """A node whose processes have ended, and that stays out."""

    name: str  # in the cluster
    host: Host
    node_id: str  # that the host has now


@dataclass(slots=True)
class RollingRestart:
    """Workers that start anew, one after another."""

    order_id: str
    waiting: list[str]
    within_s: Mapping[str, float]  # in which requests of each may finish there
    current: str = ""
    has_drained: bool = False  # `current`
    former: str | None = None  # registration of `current` before it drained
    since_s: float = 0.0  # when `current` had drained
    num_restarted: int = 0


class SeenNode(NamedTuple):
    """A node of the cluster."""

    name: str
    host: Host
    workers: tuple[str, ...] = ()


class ProcessState(Enum):
    """The state of a process by its last answer."""

    STARTING = auto()  # no answer since it was created, or started again
    UP = auto()
    FAILED = auto()  # it answers with the reason for which it serves nothing
    ENDED = auto()  # Ray starts it again
    DEAD = auto()  # Ray does not


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a process."""

    state: ProcessState = ProcessState.STARTING
    problem: str = ""  # for which it does not start, in one line


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """What nodes and processes report."""

    hosts: Mapping[str, Host]  # of the nodes that are alive, by Ray's id, in the order in which they are to join
    members: Mapping[str, SeenNode]  # of the cluster, by Ray's id
    preparing: Collection[str] = ()  # nodes
    left: Mapping[str, int] = field(default_factory=dict)  # requests of each process that has answered since its drain
    healths: Mapping[str, Health] = field(default_factory=dict)  # of all processes that there are
    registrations: Mapping[str, str] = field(default_factory=dict)  # of workers at their routers
    routers: Collection[str] = ()  # a model that sleeps or is removed has none


@dataclass(slots=True)
class _Postponed:
    pause_s: float
    until_s: float


class Failures:
    """The processes of one cluster that do not serve."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}

    @property
    def problems(self) -> Mapping[str, str]:
        return {name: _said(trouble) for name, trouble in self._troubles.items() if trouble.up_s is None}

    @property
    def failing(self) -> frozenset[str]:
        troubles = self._troubles.items()
        return frozenset(name for name, fault in troubles if fault.up_s is None and fault.num_failed > _FEW_FAILURES)

    def look(self, healths: Mapping[str, Health], now: float) -> list[str]:
        """Return the processes that are to be started again now; each counts as starting from then on. `healths`: of
        all processes that there are."""
        self._troubles = {name: fault for name, fault in self._troubles.items() if name in healths}
        for name, health in healths.items():
            self._note(name, health, now)
        due = [name for name, fault in self._troubles.items() if fault.due_s is not None and now >= fault.due_s]
        for name in due:
            self._troubles[name].start()
        return due

    def _note(self, name: str, health: Health, now: float) -> None:
        trouble = self._troubles.get(name)
        if health.state in (ProcessState.STARTING, ProcessState.UP):
            if trouble is not None:
                trouble.start()
                if health.state is ProcessState.UP:
                    trouble.up_s = now if trouble.up_s is None else trouble.up_s
                    if now - trouble.up_s >= SETTLED_S:
                        del self._troubles[name]
            return
        if trouble is None:
            trouble = self._troubles[name] = _Trouble()
        trouble.up_s = None
        trouble.problem = health.problem or trouble.problem
        if health.state is ProcessState.ENDED:
            trouble.due_s = None  # Ray's to start again
        elif not trouble.is_noted or trouble.due_s is None:
            trouble.num_failed += not trouble.is_noted
            num_doublings = min(trouble.num_failed - 1, _MAX_DOUBLINGS)
            trouble.pause_s = min(FIRST_PAUSE_S * 2**num_doublings, LONGEST_PAUSE_S)
            trouble.is_noted, trouble.due_s = True, now + trouble.pause_s


@dataclass(slots=True)
class _Trouble:
    num_failed: int = 0
    problem: str = ""
    is_noted: bool = False  # it has not started again since
    due_s: float | None = None
    pause_s: float = 0.0
    up_s: float | None = None  # since when it is up

    def start(self) -> None:
        self.due_s, self.is_noted = None, False


def _said(trouble: _Trouble) -> str:
    if not trouble.num_failed:
        return STARTS_AGAIN
    times = "1 failed start" if trouble.num_failed == 1 else f"{trouble.num_failed} failed starts"
    if trouble.due_s is None:
        return f"starts again after {times}: {trouble.problem}"
    return f"{times}, the next {trouble.pause_s:.0f} s after the last: {trouble.problem}"


@dataclass(slots=True)
class WantedCluster:
    """The wishes of one cluster. The first four fields outlive a driver; the next driver sees the others anew."""

    drains: dict[str, ProcessDrain] = field(default_factory=dict)  # by the name of their node or worker
    drained: dict[str, DrainedNode] = field(default_factory=dict)  # by the id as a member
    restart: RollingRestart | None = None
    seen_s: float = 0.0  # the last look
    refused: dict[str, str] = field(default_factory=dict)  # nodes that cannot be used, and why
    given_back: dict[str, None] = field(default_factory=dict)  # nodes that have drained, as the load does not need them
    postponed: dict[str, _Postponed] = field(default_factory=dict)  # nodes, also while they are prepared anew
    failures: Failures = field(default_factory=Failures)

    @property
    def workers(self) -> tuple[str, ...]:
        """Return what drains beside gateways."""
        return tuple(name for drain in self.drains.values() for name in drain.workers)

    @property
    def gateways(self) -> tuple[str, ...]:
        return tuple(name for drain in self.drains.values() for name in drain.gateways)

    def due_to_move(self, now: float) -> tuple[str, ...]:
        return tuple(name for drain in self.drains.values() if now >= drain.moves_s for name in drain.workers)

    def finished(self, now: float, left: Mapping[str, int]) -> list[str]:
        """Return the drains that are over. `left`: the requests of each process that has answered since its drain."""
        return [
            name
            for name, drain in self.drains.items()
            if now >= drain.ends_s or all(left.get(process) == 0 for process in drain.names)
        ]

    def resume(self, now: float) -> None:
        """Go on in another process. Where `now` is less than before, its host, and so the clock, was started anew."""
        lost_s, self.seen_s = max(0.0, self.seen_s - now), now
        self.drains = {name: replace(drain, moves_s=drain.moves_s - lost_s) for name, drain in self.drains.items()}
        if self.restart is not None:
            self.restart.since_s -= lost_s

    def joined(self, node_id: str) -> None:
        self.postponed.pop(node_id, None)

    def refuse(self, node_id: str, problem: str) -> None:
        self.postponed.pop(node_id, None)
        self.refused[node_id] = problem

    def postpone(self, node_id: str, now: float) -> None:
        former = self.postponed.get(node_id)
        pause_s = min(2 * former.pause_s, _LONGEST_POSTPONED_S) if former is not None else _FIRST_POSTPONED_S
        self.postponed[node_id] = _Postponed(pause_s, now + pause_s)

    def use_again(self, node_id: str, name: str | None) -> None:
        """Use a node again that drains or has drained. `name`: in the cluster, where it is known."""
        self.drained.pop(node_id, None)
        self.given_back.pop(node_id, None)
        if name is not None:
            self.drains.pop(name, None)

    def end_node(self, node_id: str, node: SeenNode) -> None:
        """Note that a node is no member any more: its drain has ended, or the node is lost."""
        drain = self.drains.pop(node.name, None)
        for worker in node.workers:
            self.drains.pop(worker, None)
        if drain is not None and drain.is_given_back:
            self.given_back[node_id] = None
        elif drain is not None:
            self.drained[node_id] = DrainedNode(node.name, node.host, node_id)


def reconcile(wanted: WantedCluster, seen: SeenCluster, now: float) -> list[ClusterStep]:
    """Return the next steps. Notes in the rows how far each wish has come; touches nothing else."""
    wanted.seen_s = now
    steps = [*_of_nodes(wanted, seen, now)]
    over = wanted.finished(now, seen.left)
    steps += _of_drains(wanted, seen, over)
    steps += _of_restart(wanted, seen, over, now)
    return [*steps, *(ClusterStep(Act.START_AGAIN, name) for name in wanted.failures.look(seen.healths, now))]


def _of_nodes(wanted: WantedCluster, seen: SeenCluster, now: float) -> Iterator[ClusterStep]:
    yield from (ClusterStep(Act.CANCEL, node_id) for node_id in seen.preparing if node_id not in seen.hosts)
    for node_id, node in seen.members.items():
        if node_id not in seen.hosts:
            wanted.end_node(node_id, node)
            yield ClusterStep(Act.FORGET, node_id)
    for rows in (wanted.refused, wanted.given_back, wanted.postponed):
        for node_id in [node_id for node_id in rows if node_id not in seen.hosts]:
            del rows[node_id]
    for drained in wanted.drained.values():
        if drained.node_id not in seen.hosts:
            twins = (node_id for node_id, host in seen.hosts.items() if host == drained.host)
            drained.node_id = next((twin for twin in twins if not _is_known(twin, wanted, seen)), drained.node_id)
    for node_id in seen.hosts:
        postponed = wanted.postponed.get(node_id)
        if not _is_known(node_id, wanted, seen) and (postponed is None or now >= postponed.until_s):
            yield ClusterStep(Act.PREPARE, node_id)


def _is_known(node_id: str, wanted: WantedCluster, seen: SeenCluster) -> bool:
    drained = [row.node_id for row in wanted.drained.values()]
    return any(node_id in ids for ids in (drained, seen.members, seen.preparing, wanted.refused, wanted.given_back))


def _of_drains(wanted: WantedCluster, seen: SeenCluster, over: Sequence[str]) -> Iterator[ClusterStep]:
    node_ids = {node.name: node_id for node_id, node in seen.members.items()}
    for name in over:
        if name in node_ids:
            wanted.end_node(node_ids[name], seen.members[node_ids[name]])
            yield ClusterStep(Act.END_NODE, node_ids[name])
        elif name in wanted.drains and not wanted.drains[name].starts_again:
            del wanted.drains[name]
            yield ClusterStep(Act.END_WORKER, name)


def _of_restart(wanted: WantedCluster, seen: SeenCluster, over: Sequence[str], now: float) -> Iterator[ClusterStep]:
    restart = wanted.restart
    if restart is None:
        return
    name, registration = restart.current, seen.registrations.get(restart.current)
    if name and router_of(name) not in seen.routers:
        wanted.drains.pop(name, None)
        yield ClusterStep(Act.SAY, restart.order_id, f"{name} is gone with its model")
    elif name and not restart.has_drained:
        restart.former = registration or restart.former
        if name not in wanted.workers:  # its node is lost
            yield _given_up(wanted, restart, f"{name} drains no more")
        elif name in over:
            del wanted.drains[name]
            restart.has_drained, restart.since_s = True, now
            yield ClusterStep(Act.RESTART, name)
        return
    elif name and registration in (None, restart.former):
        if now - restart.since_s > RETURN_S:
            yield _given_up(wanted, restart, f"{name} does not serve again")
        return
    elif name:
        restart.num_restarted += 1
        yield ClusterStep(Act.SAY, restart.order_id, f"{name} serves again after {now - restart.since_s:.1f} s")
    staying = [node for key, node in seen.members.items() if key in seen.hosts and node.name not in over]
    workers = {worker for node in staying for worker in node.workers if router_of(worker) in seen.routers}
    restart.waiting = [waiting for waiting in restart.waiting if waiting in workers]
    if not restart.waiting:
        wanted.restart = None
        few = {0: "No worker was restarted: their models have ended.", 1: "1 worker was restarted."}
        several = f"{restart.num_restarted} workers were restarted, one after the other."
        yield ClusterStep(Act.DONE, restart.order_id, few.get(restart.num_restarted, several))
        return
    name = restart.current = restart.waiting.pop(0)
    restart.has_drained, restart.former = False, None
    wanted.drains[name] = ProcessDrain((name,), (), now + restart.within_s[name], starts_again=True)
    yield ClusterStep(Act.SAY, restart.order_id, f"{name} drains")


def _given_up(wanted: WantedCluster, restart: RollingRestart, problem: str) -> ClusterStep:
    wanted.restart = None
    return ClusterStep(Act.REFUSE, restart.order_id, f"{problem}; the others were left as they are")

"""Decides how deployments of a running cluster come and go: events in, commands out, no clock.

The life of a deployment that is ordered while the cluster serves:
1. Preparing: its model is fetched, its sizes follow from what the machine has left, its configuration is checked.
2. Starting: its router, pool and workers come up beside the serving models.
3. Proving: gateways and batch worker connect to it, load its tokenizer and wait for a token through its own workers.
4. Serving: one list announces it to all gateways; in the same list the replaced deployment begins to drain.
5. Draining: it takes no new requests and finishes the open ones.
6. Ending: its processes end and their memory is free.
Whatever fails up to 3 ends what was started, and the others go on untouched. Orders are carried out one after the
other; a draining deployment holds up none.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from alignedserve.cluster.deployments.orders import AddModel, ModelOrder, RemoveModel, ReplaceModel
from alignedserve.config.model_settings import MAX_MODELS


class DeploymentStage(Enum):
    """Phases of a deployment, in their order."""

    PREPARING = "preparing"
    STARTING = "starting"
    PROVING = "proving"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"


# --- events


@dataclass(frozen=True, slots=True)
class Ordered:
    """A user has given an order."""

    order_id: str
    order: ModelOrder


@dataclass(frozen=True, slots=True)
class Prepared:
    """A deployment has its configuration, and fits."""

    deployment_id: str
    name: str  # of its model, for clients
    remarks: tuple[str, ...] = ()  # for the giver of the order


@dataclass(frozen=True, slots=True)
class ProcessesUp:
    """All processes of a deployment are up."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A deployment cannot be prepared or started."""

    deployment_id: str
    problem: str
    is_full: bool = False  # for want of memory


@dataclass(frozen=True, slots=True)
class View:
    """A deployment as all gateways and the batch worker together see it."""

    missing: str | None  # why one of them gets no token from it; None: all have had one
    num_open: int  # open requests; a lost process counts as one request
    num_documents: int = 0  # lines of batches among num_open
    has_lines: bool = False  # lines of batches wait for its model
    idle_s: float | None = None  # since its last request; None: it had none
    keep_alive_s: float | None = None  # that this one asked for
    waited_s: float | None = None  # how long a real-time request has waited for it to be loaded; None: none waits
    documents_waited_s: float | None = None  # the same of best effort, lines of batches apart
    is_hopeless: bool = False  # what is missing does not come by waiting


@dataclass(frozen=True, slots=True)
class Viewed:
    """All gateways and the batch worker have answered since the last AnnounceDeployments, or are lost."""

    views: Mapping[str, View]  # by deployment


@dataclass(frozen=True, slots=True)
class ProcessesGone:
    """No process of a deployment is left."""

    deployment_id: str


Event = Ordered | Prepared | ProcessesUp | Failed | Viewed | ProcessesGone

# --- commands


@dataclass(frozen=True, slots=True)
class Prepare:
    """Fetch and size a new deployment; Prepared or Failed follows."""

    deployment_id: str
    order: AddModel | ReplaceModel
    replaced: str | None  # the deployment whose settings it inherits


@dataclass(frozen=True, slots=True)
class StartProcesses:
    """Create its processes; ProcessesUp or Failed follows."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget what was prepared of a deployment that is not started after all."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class AnnounceDeployments:
    """Tell gateways and batch worker which deployments there are now; Viewed follows, again and again."""


@dataclass(frozen=True, slots=True)
class SettleAdapters:
    """Let a replacement have no adapter that was unloaded since it was prepared, and say which it lacks."""

    order_id: str
    replaced: str
    deployment_id: str


@dataclass(frozen=True, slots=True)
class EndProcesses:
    """End its processes; ProcessesGone follows."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the giver of an order what is being done."""

    order_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """Tell the giver of an order how it has ended."""

    order_id: str
    text: str
    is_refused: bool = False
    is_full: bool = False  # for want of memory


Command = Prepare | StartProcesses | Discard | SettleAdapters | AnnounceDeployments | EndProcesses | Say | Conclude


@dataclass(frozen=True, slots=True)
class LeftDeployment:
    """A deployment in the record for the next driver."""

    deployment_id: str
    name: str
    phase: DeploymentStage
    order_id: str | None = None
    drains_within_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeploymentStanding:
    """A deployment as it stands now."""

    deployment_id: str
    name: str
    phase: DeploymentStage
    num_open: int | None


PROVING_S = 120.0  # for a token through a deployment whose processes are up


@dataclass(slots=True)
class _Deployment:
    name: str
    phase: DeploymentStage
    order_id: str | None = None  # waiting for the next phases
    replaces: str | None = None  # id of the replaced deployment
    drains_within_s: float | None = None
    since_s: float = 0.0  # when its phase began
    num_open: int | None = None


class DeploymentsLogic:
    """The deployments of one cluster."""

    def __init__(self, first: Iterable[LeftDeployment], num_named: int) -> None:
        self._deployments = {
            deployment.deployment_id: _Deployment(
                deployment.name, deployment.phase, deployment.order_id, drains_within_s=deployment.drains_within_s
            )
            for deployment in first
        }
        self.num_named = num_named
        self.may_be_empty = False  # the last model may be removed, as others can be loaded
        self._waiting: deque[Ordered] = deque()
        self._current: str | None = None  # the order that no other may overtake

    @property
    def standings(self) -> tuple[DeploymentStanding, ...]:
        return tuple(DeploymentStanding(key, it.name, it.phase, it.num_open) for key, it in self._deployments.items())

    @classmethod
    def of_start(cls, names: Mapping[str, str]) -> "DeploymentsLogic":
        """Return that of a new cluster. `names`: of the models that serve from its start, by deployment."""
        return cls([LeftDeployment(key, name, DeploymentStage.SERVING) for key, name in names.items()], len(names))

    @property
    def left(self) -> tuple[LeftDeployment, ...]:
        return tuple(
            LeftDeployment(key, it.name, it.phase, it.order_id, it.drains_within_s)
            for key, it in self._deployments.items()
        )

    def knows(self, order_id: str) -> bool:
        is_waiting = any(order.order_id == order_id for order in self._waiting)
        return is_waiting or any(deployment.order_id == order_id for deployment in self._deployments.values())

    def resume(self, now: float) -> list[Command]:
        """Go on in another process, for which `now` may be of another clock. Deployments that did not serve yet end;
        their orders and waiting orders are forgotten, and clients repeat them. Drains go on with their time."""
        self._waiting.clear()
        self._current = None
        commands: list[Command] = []
        for deployment_id, deployment in tuple(self._deployments.items()):
            deployment.since_s = now
            if deployment.phase is DeploymentStage.PREPARING:
                del self._deployments[deployment_id]
            elif deployment.phase in (DeploymentStage.STARTING, DeploymentStage.PROVING):
                deployment.phase, deployment.order_id = DeploymentStage.ENDING, None
            if deployment.phase is DeploymentStage.ENDING:
                commands.append(EndProcesses(deployment_id))
        return [AnnounceDeployments(), *commands]

    def on_event(self, event: Event, now: float) -> list[Command]:
        commands: list[Command]
        match event:
            case Ordered():
                self._waiting.append(event)
                is_next = self._current is None
                commands = [] if is_next else [Say(event.order_id, "waits for the order before it")]
            case Prepared():
                commands = self._on_prepared(event, now)
            case ProcessesUp(deployment_id):
                commands = self._enter(deployment_id, DeploymentStage.PROVING, now)
            case Failed(deployment_id, problem, is_full):
                commands = self._give_up(deployment_id, problem, is_full=is_full)
            case Viewed(views):
                commands = self._on_views(views, now)
            case ProcessesGone(deployment_id):
                commands = self._on_ended(deployment_id)
        while self._current is None and self._waiting:
            commands += self._begin(self._waiting.popleft(), now)
        return commands

    def _begin(self, ordered: Ordered, now: float) -> list[Command]:
        order_id, order = ordered.order_id, ordered.order
        target = None if isinstance(order, AddModel) else self._serving(order.name)
        problem = self._problem_of(order, target)
        if problem is not None:
            return [Conclude(order_id, problem, is_refused=True)]
        if isinstance(order, RemoveModel):
            assert target is not None, "a removal without a model"
            return self._drain(target, order_id, order.drains_within_s, now)
        self.num_named += 1
        deployment_id, self._current = str(self.num_named), order_id
        within_s = order.drains_within_s if isinstance(order, ReplaceModel) else None
        new = _Deployment(order.name or order.path, DeploymentStage.PREPARING, order_id, target, within_s, now)
        self._deployments[deployment_id] = new
        return [Say(order_id, f"preparing {order.path}"), Prepare(deployment_id, order, target)]

    def _problem_of(self, order: ModelOrder, target: str | None) -> str | None:
        if isinstance(order, AddModel):
            is_full = len(self._deployments) >= MAX_MODELS
            return f"a cluster serves {MAX_MODELS} models at most" if is_full else self._taken(order.name)
        if target is None:
            served = ", ".join(
                deployment.name
                for deployment in self._deployments.values()
                if deployment.phase is DeploymentStage.SERVING
            )
            return f"no model is served as {order.name}; there are {served}"
        if isinstance(order, RemoveModel) and self._num_serving == 1 and not self.may_be_empty:
            return f"{order.name} is the only model; stop the cluster instead"
        return None

    def _taken(self, name: str | None) -> str | None:
        if name is None or self._serving(name) is None:
            return None
        return f"a model is served as {name} already; replace it, or give another name"

    def _serving(self, name: str) -> str | None:
        matching = (
            key for key, it in self._deployments.items() if it.phase is DeploymentStage.SERVING and it.name == name
        )
        return next(matching, None)

    @property
    def _num_serving(self) -> int:
        return sum(deployment.phase is DeploymentStage.SERVING for deployment in self._deployments.values())

    def _on_prepared(self, prepared: Prepared, now: float) -> list[Command]:
        deployment_id, name = prepared.deployment_id, prepared.name
        new = self._deployments[deployment_id]
        if new.replaces is None and (problem := self._taken(name)) is not None:
            return self._give_up(deployment_id, problem)
        if new.replaces is not None and name != new.name:
            return self._give_up(deployment_id, f"the model would be served as {name}; a replacement keeps the name")
        new.name = name
        assert new.order_id is not None, "a preparation without an order"
        remarks = [Say(new.order_id, remark) for remark in prepared.remarks]
        return [*remarks, *self._enter(deployment_id, DeploymentStage.STARTING, now), StartProcesses(deployment_id)]

    def _enter(self, deployment_id: str, phase: DeploymentStage, now: float) -> list[Command]:
        new = self._deployments[deployment_id]
        new.phase, new.since_s = phase, now
        assert new.order_id is not None, "a start without an order"
        said = (
            "starting its processes"
            if phase is DeploymentStage.STARTING
            else "its processes are up; waiting for a token"
        )
        return [Say(new.order_id, said), *([AnnounceDeployments()] if phase is DeploymentStage.PROVING else [])]

    def _give_up(self, deployment_id: str, problem: str, *, is_full: bool = False) -> list[Command]:
        new = self._deployments[deployment_id]
        commands: list[Command] = []
        if new.order_id is not None:
            commands.append(Conclude(new.order_id, problem, is_refused=True, is_full=is_full))
        new.order_id = self._current = None
        if new.phase is DeploymentStage.PREPARING:
            del self._deployments[deployment_id]
            return [*commands, Discard(deployment_id)]
        was_announced, new.phase = new.phase is DeploymentStage.PROVING, DeploymentStage.ENDING
        return [*commands, *([AnnounceDeployments()] if was_announced else []), EndProcesses(deployment_id)]

    def _on_views(self, views: Mapping[str, View], now: float) -> list[Command]:
        # Phases before these views: a deployment that begins to drain now has not been asked since.
        phases = {key: it.phase for key, it in self._deployments.items() if key in views}
        commands: list[Command] = []
        for deployment_id, phase in phases.items():
            view = views[deployment_id]
            self._deployments[deployment_id].num_open = view.num_open
            if phase is DeploymentStage.PROVING:
                commands += self._on_proof(deployment_id, view, now)
            elif phase is DeploymentStage.DRAINING:
                commands += self._on_drained(deployment_id, view.num_open, now)
        return commands

    def _on_drained(self, deployment_id: str, num_open: int, now: float) -> list[Command]:
        old = self._deployments[deployment_id]
        is_over = old.drains_within_s is not None and now - old.since_s >= old.drains_within_s
        if num_open and not is_over:
            return []
        old.phase = DeploymentStage.ENDING
        return [AnnounceDeployments(), EndProcesses(deployment_id)]

    def _on_proof(self, deployment_id: str, view: View, now: float) -> list[Command]:
        new = self._deployments[deployment_id]
        if view.missing is not None:
            if view.is_hopeless:
                return self._give_up(deployment_id, f"no token can come through it: {view.missing}")
            if now - new.since_s < PROVING_S:
                return []
            return self._give_up(deployment_id, f"no token has come through it for {PROVING_S:.0f} s: {view.missing}")
        order_id, self._current = new.order_id, None
        assert order_id is not None, "a proof that nothing waits for"
        new.phase, new.since_s, new.order_id = DeploymentStage.SERVING, now, None
        if new.replaces is None:
            return [AnnounceDeployments(), Conclude(order_id, f"{new.name} is served")]
        drained = self._drain(new.replaces, order_id, new.drains_within_s, now, successor=deployment_id)
        return [SettleAdapters(order_id, new.replaces, deployment_id), *drained]

    def _drain(
        self, deployment_id: str, order_id: str, within_s: float | None, now: float, *, successor: str | None = None
    ) -> list[Command]:
        old = self._deployments[deployment_id]
        old.phase, old.order_id, old.drains_within_s, old.since_s = DeploymentStage.DRAINING, order_id, within_s, now
        said = f"{old.name} takes no new requests"
        if successor is not None:
            self._move_up(deployment_id, successor)
            said = f"new requests go to the new {old.name}; the old one finishes its own"
        return [AnnounceDeployments(), Say(order_id, said)]

    def _move_up(self, old: str, successor: str) -> None:
        others = {key: it for key, it in self._deployments.items() if key != successor}
        new = self._deployments[successor]
        self._deployments = {}
        for key, it in others.items():
            if key == old:
                self._deployments[successor] = new
            self._deployments[key] = it

    def _on_ended(self, deployment_id: str) -> list[Command]:
        old = self._deployments.pop(deployment_id)
        if old.order_id is None:
            return []
        is_replaced = self._serving(old.name) is not None
        text = f"the old {old.name} has ended" if is_replaced else f"{old.name} is removed"
        return [Conclude(old.order_id, text)]

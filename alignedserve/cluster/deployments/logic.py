"""Decides how deployments of a running cluster come and go: rows and reports in, steps out, no clock.

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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from alignedserve.cluster.deployments.orders import AddModel, ModelOrder, RemoveModel, ReplaceModel
from alignedserve.config.model_settings import MAX_MODELS

PROVING_S = 120.0  # for a token through a deployment whose processes are up


class DeploymentStage(Enum):
    """Phases of a deployment, in their order."""

    PREPARING = "preparing"
    STARTING = "starting"
    PROVING = "proving"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"


@dataclass(slots=True)
class Deployment:
    """A row: a deployment that is there, or wished for."""

    deployment_id: str
    name: str  # of its model, for clients
    phase: DeploymentStage = DeploymentStage.SERVING
    order_id: str | None = None  # waiting for the next phases
    drains_within_s: float | None = None
    replaces: str | None = None  # id of the replaced deployment
    since_s: float = 0.0  # when its phase began
    num_open: int | None = None  # requests


class Prepared(NamedTuple):
    """A deployment has its configuration, and fits."""

    name: str  # of its model, for clients
    remarks: tuple[str, ...] = ()  # for the giver of the order


class Failed(NamedTuple):
    """A deployment cannot be prepared or started."""

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
class SeenModels:
    """Reports on deployments since the last look, by id."""

    prepared: Mapping[str, Prepared] = field(default_factory=dict)
    up: Collection[str] = ()  # whose processes are all up
    failed: Mapping[str, Failed] = field(default_factory=dict)
    # Where all gateways and the batch worker have answered since the last announcement, or are lost.
    views: Mapping[str, View] = field(default_factory=dict)
    gone: Collection[str] = ()  # of which no process is left


class ModelAct(Enum):
    """Kinds of steps."""

    PREPARE = auto()  # fetch and size a new deployment: Prepared or Failed follows
    START = auto()  # create its processes: they are up, or Failed follows
    DISCARD = auto()  # forget what was prepared of a deployment that is not started after all
    SETTLE = auto()  # let a replacement have no adapter that was unloaded since it was prepared
    ANNOUNCE = auto()  # tell gateways and batch worker which deployments there are now: views follow, again and again
    END = auto()  # end its processes: they are gone later
    SAY = auto()  # tell the giver of an order what is being done
    DONE = auto()  # tell the giver that the order was carried out
    REFUSE = auto()  # tell the giver why it was not


class ModelStep(NamedTuple):
    """One step."""

    act: ModelAct
    subject: str = ""  # a deployment, or an order, by its id
    text: str = ""  # for the giver of the order
    order: AddModel | ReplaceModel | None = None  # to prepare for
    replaced: str | None = None  # the deployment whose settings it inherits
    is_full: bool = False  # refused for want of memory


_ANNOUNCE = ModelStep(ModelAct.ANNOUNCE)


class DeploymentsLogic:
    """The deployments of one cluster."""

    def __init__(self, first: Iterable[Deployment], num_named: int) -> None:
        self._rows = {row.deployment_id: replace(row) for row in first}
        self.num_named = num_named
        self.may_be_empty = False  # the last model may be removed, as others can be loaded
        self._waiting: deque[tuple[str, ModelOrder]] = deque()
        self._current: str | None = None  # the order that no other may overtake

    @classmethod
    def of_start(cls, names: Mapping[str, str]) -> "DeploymentsLogic":
        """Return that of a new cluster. `names`: of the models that serve from its start, by deployment."""
        return cls([Deployment(key, name) for key, name in names.items()], len(names))

    @property
    def rows(self) -> tuple[Deployment, ...]:
        return tuple(self._rows.values())

    @property
    def serving(self) -> dict[str, str]:
        """Return the ids of the deployments that serve, by the names of their models."""
        return {row.name: row.deployment_id for row in self.rows if row.phase is DeploymentStage.SERVING}

    @property
    def left(self) -> tuple[Deployment, ...]:
        """Return the rows for the next driver, which sees anew what changes from second to second."""
        return tuple(replace(row, since_s=0.0, num_open=None) for row in self.rows)

    def of(self, deployment_id: str) -> Deployment:
        return self._rows[deployment_id]

    def knows(self, order_id: str) -> bool:
        return order_id in {*(waiting for waiting, _ in self._waiting), *(row.order_id for row in self.rows)}

    def resume(self, now: float) -> list[ModelStep]:
        """Go on in another process, for which `now` may be of another clock. Deployments that did not serve yet end;
        their orders and waiting orders are forgotten, and clients repeat them. Drains go on with their time."""
        self._waiting.clear()
        self._current = None
        steps: list[ModelStep] = []
        for row in self.rows:
            row.since_s = now
            if row.phase is DeploymentStage.PREPARING:
                del self._rows[row.deployment_id]
            elif row.phase in (DeploymentStage.STARTING, DeploymentStage.PROVING):
                row.phase, row.order_id = DeploymentStage.ENDING, None
            if row.phase is DeploymentStage.ENDING:
                steps.append(ModelStep(ModelAct.END, row.deployment_id))
        return [_ANNOUNCE, *steps]

    def order(self, order_id: str, order: ModelOrder, now: float) -> list[ModelStep]:
        """Take an order; return the first steps, unless it has to wait for another one."""
        self._waiting.append((order_id, order))
        if self._current is not None:
            return [ModelStep(ModelAct.SAY, order_id, "waits for the order before it")]
        return self._begin_next(now)

    def reconcile(self, seen: SeenModels, now: float) -> list[ModelStep]:
        """Return the next steps. The same rows, reports and `now` always give the same ones."""
        steps: list[ModelStep] = []
        for deployment_id, prepared in seen.prepared.items():
            steps += self._on_prepared(self._rows[deployment_id], prepared, now)
        for deployment_id, failed in seen.failed.items():
            steps += self._give_up(self._rows[deployment_id], failed)
        for deployment_id in seen.up:
            new = self._rows[deployment_id]
            new.phase, new.since_s = DeploymentStage.PROVING, now
            steps += [_say(new, "its processes are up; waiting for a token"), _ANNOUNCE]
        # Phases before these views: a deployment that begins to drain now has not been asked since.
        for row, phase in [(row, row.phase) for row in self.rows if row.deployment_id in seen.views]:
            view = seen.views[row.deployment_id]
            row.num_open = view.num_open
            if phase is DeploymentStage.PROVING:
                steps += self._on_proof(row, view, now)
            elif phase is DeploymentStage.DRAINING:
                is_over = row.drains_within_s is not None and now - row.since_s >= row.drains_within_s
                if is_over or not view.num_open:
                    row.phase = DeploymentStage.ENDING
                    steps += [_ANNOUNCE, ModelStep(ModelAct.END, row.deployment_id)]
        for deployment_id in seen.gone:
            old = self._rows.pop(deployment_id)
            if old.order_id is not None:
                text = f"the old {old.name} has ended" if old.name in self.serving else f"{old.name} is removed"
                steps.append(ModelStep(ModelAct.DONE, old.order_id, text))
        return [*steps, *self._begin_next(now)]

    def _begin_next(self, now: float) -> list[ModelStep]:
        steps: list[ModelStep] = []
        while self._current is None and self._waiting:
            steps += self._begin(*self._waiting.popleft(), now)
        return steps

    def _begin(self, order_id: str, order: ModelOrder, now: float) -> list[ModelStep]:
        target = None if isinstance(order, AddModel) else self.serving.get(order.name)
        problem = self._problem_of(order, target)
        if problem is not None:
            return [ModelStep(ModelAct.REFUSE, order_id, problem)]
        if isinstance(order, RemoveModel):
            assert target is not None, "a removal without a model"
            return self._drain(target, order_id, order.drains_within_s, now)
        self.num_named += 1
        deployment_id, self._current = str(self.num_named), order_id
        within_s = order.drains_within_s if isinstance(order, ReplaceModel) else None
        stage = DeploymentStage.PREPARING
        self._rows[deployment_id] = Deployment(deployment_id, order.subject, stage, order_id, within_s, target, now)
        prepare = ModelStep(ModelAct.PREPARE, deployment_id, order=order, replaced=target)
        return [ModelStep(ModelAct.SAY, order_id, f"preparing {order.path}"), prepare]

    def _problem_of(self, order: ModelOrder, target: str | None) -> str | None:
        if isinstance(order, AddModel):
            is_full = len(self._rows) >= MAX_MODELS
            return f"a cluster serves {MAX_MODELS} models at most" if is_full else self._taken(order.name)
        if target is None:
            return f"no model is served as {order.name}; there are {', '.join(self.serving)}"
        if isinstance(order, RemoveModel) and len(self.serving) == 1 and not self.may_be_empty:
            return f"{order.name} is the only model; stop the cluster instead"
        return None

    def _taken(self, name: str | None) -> str | None:
        is_taken = name in self.serving
        return f"a model is served as {name} already; replace it, or give another name" if is_taken else None

    def _on_prepared(self, new: Deployment, prepared: Prepared, now: float) -> list[ModelStep]:
        name = prepared.name
        if new.replaces is None and (problem := self._taken(name)) is not None:
            return self._give_up(new, Failed(problem))
        if new.replaces is not None and name != new.name:
            return self._give_up(new, Failed(f"the model would be served as {name}; a replacement keeps the name"))
        new.name, new.phase, new.since_s = name, DeploymentStage.STARTING, now
        remarks = [_say(new, remark) for remark in prepared.remarks]
        return [*remarks, _say(new, "starting its processes"), ModelStep(ModelAct.START, new.deployment_id)]

    def _give_up(self, new: Deployment, failed: Failed) -> list[ModelStep]:
        steps: list[ModelStep] = []
        if new.order_id is not None:
            steps.append(ModelStep(ModelAct.REFUSE, new.order_id, failed.problem, is_full=failed.is_full))
        new.order_id = self._current = None
        if new.phase is DeploymentStage.PREPARING:
            del self._rows[new.deployment_id]
            return [*steps, ModelStep(ModelAct.DISCARD, new.deployment_id)]
        was_announced, new.phase = new.phase is DeploymentStage.PROVING, DeploymentStage.ENDING
        return [*steps, *([_ANNOUNCE] if was_announced else []), ModelStep(ModelAct.END, new.deployment_id)]

    def _on_proof(self, new: Deployment, view: View, now: float) -> list[ModelStep]:
        if view.missing is not None:
            if view.is_hopeless:
                return self._give_up(new, Failed(f"no token can come through it: {view.missing}"))
            if now - new.since_s < PROVING_S:
                return []
            return self._give_up(new, Failed(f"no token has come through it for {PROVING_S:.0f} s: {view.missing}"))
        order_id, self._current = new.order_id, None
        assert order_id is not None, "a proof that nothing waits for"
        new.phase, new.since_s, new.order_id = DeploymentStage.SERVING, now, None
        if new.replaces is None:
            return [_ANNOUNCE, ModelStep(ModelAct.DONE, order_id, f"{new.name} is served")]
        drained = self._drain(new.replaces, order_id, new.drains_within_s, now, successor=new)
        return [ModelStep(ModelAct.SETTLE, new.deployment_id, replaced=new.replaces), *drained]

    def _drain(
        self, deployment_id: str, order_id: str, within_s: float | None, now: float, successor: Deployment | None = None
    ) -> list[ModelStep]:
        old = self._rows[deployment_id]
        old.phase, old.order_id, old.drains_within_s, old.since_s = DeploymentStage.DRAINING, order_id, within_s, now
        said = f"{old.name} takes no new requests"
        if successor is not None:  # which moves to the place before the old one
            others = [row for row in self.rows if row is not successor]
            others.insert(others.index(old), successor)
            self._rows = {row.deployment_id: row for row in others}
            said = f"new requests go to the new {old.name}; the old one finishes its own"
        return [_ANNOUNCE, ModelStep(ModelAct.SAY, order_id, said)]


def _say(new: Deployment, text: str) -> ModelStep:
    assert new.order_id is not None, "a start without an order"
    return ModelStep(ModelAct.SAY, new.order_id, text)

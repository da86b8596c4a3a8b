"""Has models on demand loaded and put to sleep, by orders as users give them: what OnDemandLogic decides."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from alignedserve.cluster.deployments.logic import View
from alignedserve.cluster.deployments.orders import (
    AddModel,
    Answer,
    DeploymentReport,
    ModelOrder,
    OrderRefused,
    RemoveModel,
)
from alignedserve.cluster.deployments.preparing import Asleep
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.config.overrides import written_override
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.model.served_model import DeploymentPhase, ServedDeployment, ServedModel

TURN_S = 30.0  # that a model has at least, while another one waits for its memory
DOCUMENTS_TURN_S = 600.0  # the same where documents wait and chat is answered
RETRY_S = 30.0  # after which a model that could not be loaded is tried again


@dataclass(frozen=True, slots=True)
class ModelUse:
    """How a model that is awake is used, by all gateways and batches together."""

    num_open: int = 0  # open requests
    num_documents: int = 0  # lines of batches among num_open
    is_promised: bool = False  # lines of batches wait for it
    idle_s: float = 0.0  # since its last request, or since it was loaded
    keep_alive_s: float | None = None  # by its last request; None: unset

    @property
    def is_idle(self) -> bool:
        return self.num_open == 0 and not self.is_promised

    @property
    def has_documents_alone(self) -> bool:
        return self.num_open == self.num_documents


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """For how long requests to a model that sleeps have waited, in seconds. None: there are none."""

    real_time_s: float | None = None
    documents_s: float | None = None

    @property
    def rank(self) -> tuple[bool, float]:
        return self.real_time_s is None, -(self.real_time_s or self.documents_s or 0.0)

    @property
    def waited_s(self) -> float:
        return -self.rank[1]


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Command: load this model; `on_refused` follows, or its use."""

    name: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Command: give this model no more requests, and end it when its open requests are answered."""

    name: str


class OnDemandLogic:
    """The on-demand models of one cluster. Names are those of models, as clients call them."""

    def __init__(self) -> None:
        self._awake_since: dict[str, float] = {}
        self._no_room: set[str] = set()  # that wait for another one to leave
        self._problems: dict[str, tuple[str, float]] = {}  # why one cannot be loaded, and when it is tried again

    def problem(self, name: str, now: float) -> str | None:
        """Return why a model cannot be loaded at present; None: nothing is known to keep it."""
        problem, until_s = self._problems.get(name, ("", now))
        return problem if now < until_s else None

    def on_refused(self, name: str, problem: str, now: float, *, is_full: bool) -> None:
        """Note that a model was not loaded. `is_full`: for want of memory, which another one may leave."""
        if is_full and self._awake_since:
            self._no_room.add(name)
        else:
            self._problems[name] = problem, now + RETRY_S

    def look(
        self,
        awake: Mapping[str, tuple[ModelUse, float]],
        demands: Mapping[str, ModelDemand],
        now: float,
        *,
        is_changing: bool,
    ) -> Sequence[LoadModel | UnloadModel]:
        """Return what is to be done now. `awake`: use and `keep_alive` of every on-demand model that serves. `demands`:
        of those that sleep. `is_changing`: one comes or goes already, and the next waits for it."""
        self._awake_since = {name: self._awake_since.get(name, now) for name in awake}
        self._no_room &= demands.keys()
        self._problems = {name: problem for name, problem in self._problems.items() if now < problem[1]}
        if is_changing:
            return ()
        return self._for_demands(awake, demands, now) or self._for_keep_alive(awake)

    def _for_demands(
        self, awake: Mapping[str, tuple[ModelUse, float]], demands: Mapping[str, ModelDemand], now: float
    ) -> Sequence[LoadModel | UnloadModel]:
        for name in sorted(demands, key=lambda model: (*demands[model].rank, model)):
            if name in self._problems:
                continue
            if name not in self._no_room:
                return (LoadModel(name),)
            victim = self._victim(demands[name], awake, now)
            if victim is not None:
                self._no_room.clear()  # all of them are tried again once it has left
                return (UnloadModel(victim),)
            if not awake:
                self._no_room.discard(name)
        return ()

    def _for_keep_alive(self, awake: Mapping[str, tuple[ModelUse, float]]) -> Sequence[UnloadModel]:
        for name, (use, keep_alive_s) in awake.items():
            keep_s = keep_alive_s if use.keep_alive_s is None else use.keep_alive_s
            if use.is_idle and use.idle_s >= keep_s:
                return (UnloadModel(name),)
        return ()

    def _victim(self, demand: ModelDemand, awake: Mapping[str, tuple[ModelUse, float]], now: float) -> str | None:
        able = [name for name, (use, _) in awake.items() if use.is_idle]
        if not able:
            able = [name for name, (use, _) in awake.items() if self._is_turn_over(name, use, demand, now)]
        return max(able, key=lambda name: (awake[name][0].idle_s, name), default=None)

    def _is_turn_over(self, name: str, use: ModelUse, demand: ModelDemand, now: float) -> bool:
        is_chat = demand.real_time_s is not None
        if is_chat and use.has_documents_alone:
            return True
        turn_s = TURN_S if is_chat or use.has_documents_alone else DOCUMENTS_TURN_S
        return min(demand.waited_s, now - self._awake_since[name]) >= turn_s


_OWN_ORDER = "on demand: "  # how ids of its orders begin, which no client waits for
_SLEEPING = "sleeping: "  # and ids of what has no processes, among deployments


class ModelOnDemand(NamedTuple):
    """A model that is loaded when a request names it."""

    order: AddModel  # loads the model
    deployed: ServedDeployment  # for gateways, while the model sleeps
    keep_alive_s: float  # `inf`: it leaves only for others

    @classmethod
    def of(cls, plan: ClusterPlan, config: ClusterConfig, sections: Mapping[str, Any]) -> "ModelOnDemand":
        """Return the model of a plan. `config`: with its sizes. `sections`: its own of the settings."""
        served = plan.served
        keep_alive_s = config.model.keep_alive_s
        assert keep_alive_s is not None, "a model that is not on demand"
        deployed = ServedDeployment(
            served,
            config.engine.block_size,
            config.prefix_cache,
            deployment_id=_SLEEPING + served.name,
            phase=DeploymentPhase.SLEEPING,
        )
        # With the planned context: a model that does not fit is refused, never shortened.
        settings = (*_settings(sections), f"model.max_context_len={served.max_context_len}")
        return cls(AddModel(config.model.path, served.name, settings), deployed, keep_alive_s)


class _Left(NamedTuple):
    deployment_id: str
    adapters: tuple[LoraAdapter, ...]  # beside those of the configuration


class OnDemandModels:
    """The models on demand of one cluster. All methods on one thread."""

    def __init__(self, models: Iterable[ModelOnDemand] = ()) -> None:
        self._models = {model.order.subject: model for model in models}
        self._logic = OnDemandLogic()
        self._since: dict[str, float] = {}  # when each that is awake was first seen so
        self._lines_since: dict[str, float] = {}  # when lines of batches were first seen to wait for one that sleeps
        self._leaving_s: dict[str, float] = {}  # until one that is idle leaves
        self._ordered: set[str] = set()  # names whose orders are carried out
        self._left: dict[str, _Left] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._models

    @property
    def may_be_alone(self) -> bool:
        return bool(self._models)

    def note(self, model: ModelOnDemand) -> None:
        self._models.setdefault(model.order.subject, model)

    def forget(self, name: str) -> None:
        self._models.pop(name, None)
        self._left.pop(name, None)

    def note_left(self, name: str, deployment_id: str, adapters: tuple[LoraAdapter, ...]) -> None:
        self._left[name] = _Left(deployment_id, adapters)

    def beside(self, order: ModelOrder, serving: Collection[str]) -> Asleep:
        ordered = next((name for name, model in self._models.items() if model.order == order), None)
        others = (name for name in self._models if name not in serving and name != ordered)
        left = None if ordered is None else self._left.get(ordered)
        return Asleep(tuple(self._served(name) for name in others), None if left is None else left.deployment_id)

    def _served(self, name: str) -> ServedModel:
        served, left = self._models[name].deployed.served, self._left.get(name)
        return served if left is None else replace(served, adapters=(*served.adapters, *left.adapters))

    def sleeping(self, serving: Collection[str]) -> tuple[ServedDeployment, ...]:
        """Return the models for gateways. `serving`: names of those that are awake."""
        now = time.monotonic()
        return tuple(
            replace(model.deployed, served=self._served(name), problem=self._logic.problem(name, now) or "")
            for name, model in self._models.items()
            if name not in serving
        )

    def look(
        self, views: Mapping[str, View], serving: Mapping[str, str], *, is_changing: bool
    ) -> Iterator[tuple[str, ModelOrder]]:
        """Yield the orders that are due, each with its id. `views`: by deployment, sleeping ones included. `serving`:
        ids of deployments by name. `is_changing`: one of them comes or goes."""
        if not self._models:
            return
        now = time.monotonic()
        awake_ids = {name: deployment_id for name, deployment_id in serving.items() if name in self._models}
        self._since = {name: self._since.get(name, now) for name in awake_ids}
        awake = {
            name: (_use(views[deployment_id], now - self._since[name]), self._models[name].keep_alive_s)
            for name, deployment_id in awake_ids.items()
            if deployment_id in views
        }
        self._leaving_s = {name: _leaving_s(use, keep_s) for name, (use, keep_s) in awake.items() if use.is_idle}
        demands = self._demands(
            {name: views.get(_SLEEPING + name) for name in self._models if name not in serving}, now
        )
        is_changing |= bool(self._ordered)
        for command in self._logic.look(awake, demands, now, is_changing=is_changing):
            self._ordered.add(command.name)
            order = self._models[command.name].order if isinstance(command, LoadModel) else RemoveModel(command.name)
            yield _OWN_ORDER + command.name, order

    def _demands(self, asleep: Mapping[str, View | None], now: float) -> dict[str, ModelDemand]:
        seen = {name: view for name, view in asleep.items() if view is not None}
        self._lines_since = {name: self._lines_since.get(name, now) for name, view in seen.items() if view.has_lines}
        demands = {name: ModelDemand(view.waited_s, self._documents_s(name, view, now)) for name, view in seen.items()}
        return {name: demand for name, demand in demands.items() if demand != ModelDemand()}

    def _documents_s(self, name: str, view: View, now: float) -> float | None:
        waits_s = (view.documents_waited_s, now - self._lines_since[name] if name in self._lines_since else None)
        return max((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def takes(self, order_id: str, answer: Answer, *, is_full: bool) -> bool:
        """Take the last answer to an order of its own; False: it is a user's."""
        name = order_id.removeprefix(_OWN_ORDER)
        if name == order_id:
            return False
        self._ordered.discard(name)
        if isinstance(answer, OrderRefused):
            self._logic.on_refused(name, answer.reason, time.monotonic(), is_full=is_full)
        return True

    def is_own(self, order_id: str) -> bool:
        return order_id.startswith(_OWN_ORDER)

    def leaves_in_s(self, name: str) -> float | None:
        """Return when a model leaves if nobody asks for it; None: it is in use, or does not leave by itself."""
        left_s = self._leaving_s.get(name)
        return left_s if left_s is not None and left_s < float("inf") else None

    def reports(self, known: Collection[str]) -> Iterator[DeploymentReport]:
        """Yield what is said of models that have no deployment. `known`: names of the others."""
        for name, model in self._models.items():
            if name not in known:
                problem = self._logic.problem(name, time.monotonic()) or ""
                yield DeploymentReport("", name, model.order.path, "asleep", None, problem=problem)


def _use(view: View, awake_s: float) -> ModelUse:
    idle_s = awake_s if view.idle_s is None else min(view.idle_s, awake_s)
    return ModelUse(view.num_open, view.num_documents, view.has_lines, idle_s, view.keep_alive_s)


def _leaving_s(use: ModelUse, keep_alive_s: float) -> float:
    return max((keep_alive_s if use.keep_alive_s is None else use.keep_alive_s) - use.idle_s, 0.0)


def _settings(sections: Mapping[str, Any]) -> Iterator[str]:
    for section, fields in sections.items():
        if not isinstance(fields, Mapping):
            yield written_override(section, fields)
            continue
        for name, value in fields.items():
            if (section, name) not in _NAMED:
                yield written_override(f"{section}.{name}", value)


_NAMED = {("model", "path"), ("model", "served_model_name"), ("model", "max_context_len")}

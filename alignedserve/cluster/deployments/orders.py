"""Orders to the driver of a running cluster, as commands give them, and its answers.

One host takes them at the door in its private folder, several take them from Ray's key-value store.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from alignedserve.messages.gateways import ClusterStatus

MAX_NAME_LEN = 256  # characters, of a model as clients call it
_MAX_PATH_LEN = 4096
_MAX_SETTINGS = 64
_MAX_SETTING_LEN = 4096


class AddModel(msgspec.Struct, frozen=True, tag=True):
    """Order: serve one more model."""

    path: str  # folder or GGUF file, absolute; ORG/NAME on a hub; or the name of a built-in model
    name: str | None = None  # by which clients call it; None: as `serve` would name it
    settings: tuple[str, ...] = ()  # section.field=value, for this model alone

    @property
    def subject(self) -> str:
        return self.name or self.path


class ReplaceModel(msgspec.Struct, frozen=True, tag=True):
    """Order: serve another model under a name that is served, without losing a request."""

    name: str
    path: str  # as of AddModel
    settings: tuple[str, ...] = ()
    drains_within_s: float | None = None  # after which requests of the old one fail; None: it finishes all

    @property
    def subject(self) -> str:
        return self.name


class RemoveModel(msgspec.Struct, frozen=True, tag=True):
    """Order: serve a model no more, once its requests have ended."""

    name: str
    drains_within_s: float | None = None  # as of ReplaceModel

    @property
    def subject(self) -> str:
        return self.name


class ShowModels(msgspec.Struct, frozen=True, tag=True):
    """Question: which models does the cluster have."""


class ShowStatus(msgspec.Struct, frozen=True, tag=True):
    """Question: what do the cluster's processes and models do now."""


class RestartWorkers(msgspec.Struct, frozen=True, tag=True):
    """Order: start every worker anew, one after the other, without losing a request."""

    model: str | None = None  # by its name for clients; None: those of all models
    drains_within_s: float = 60.0  # in which requests of each may finish there, where another worker serves meanwhile

    @property
    def subject(self) -> str:
        return self.model or "restart"


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """Order: let the work of a node finish or go elsewhere, then end its processes and use it no more."""

    node: str  # its name, host name or address; on one host the name of a worker
    within_s: float  # in which requests may finish where they are
    is_forced: bool = False  # also the last one of its kind


class UndoDrain(msgspec.Struct, frozen=True, tag=True):
    """Order: use a node again that drains or has drained, or a worker of one host that drains."""

    node: str


class ScaleWorkers(msgspec.Struct, frozen=True, tag=True):
    """Order: have these numbers of workers in the whole cluster, by kind."""

    counts: Mapping[str, int]
    model: str | None = None  # by its name for clients; None: there is one

    @property
    def subject(self) -> str:
        return self.model or "scale"


ModelOrder = AddModel | ReplaceModel | RemoveModel
NodeOrder = DrainNode | UndoDrain | ScaleWorkers
AdminRequest = ModelOrder | NodeOrder | RestartWorkers | ShowModels | ShowStatus


class DeploymentReport(msgspec.Struct, frozen=True):
    """One deployment of a running cluster."""

    deployment_id: str  # "": the first
    name: str  # by which clients call its model
    path: str
    phase: str  # see Phase of events.py
    num_open: int | None  # requests; None: not reported yet
    workers: tuple[str, ...] = ()  # names of the workers
    processes: tuple[str, ...] = ()  # names of all processes of the deployment
    topology: str = ""
    problem: str = ""  # why a model that sleeps cannot be loaded at present
    leaves_in_s: float | None = None  # until a model on demand leaves, if nobody asks for it
    failing: Mapping[str, str] = {}  # those of its processes that do not serve, and why

    @property
    def state(self) -> str:
        if self.problem:
            return f"{self.phase}: {self.problem}"
        if self.phase != "serving":
            return self.phase
        if not self.workers:
            return "not serving: it has no workers"
        if not self.failing:
            return self.phase
        state = "not serving" if self._lacks_a_kind else "degraded"
        num_workers, num_failing = len(self.workers), sum(name in self.failing for name in self.workers)
        name, why = next(iter(self.failing.items()))
        return f"{state}: {num_workers - num_failing} of {num_workers} workers serve; {name}: {why}"

    @property
    def _lacks_a_kind(self) -> bool:
        kinds = {_kind_of(name) for name in (*self.workers, *self.processes)}
        return kinds != {_kind_of(name) for name in (*self.workers, *self.processes) if name not in self.failing}


class Remark(msgspec.Struct, frozen=True, tag=True):
    """Answer: what is being done; more answers follow."""

    text: str


class OrderDone(msgspec.Struct, frozen=True, tag="OrderDone"):
    """Last answer to an order that was carried out."""

    text: str


class OrderRefused(msgspec.Struct, frozen=True, tag="OrderRefused"):
    """Last answer to an order that was not carried out: everything is as it was before."""

    reason: str


class Models(msgspec.Struct, frozen=True, tag=True):
    """Answer to ShowModels."""

    url: str  # of the first gateway
    deployments: tuple[DeploymentReport, ...]


class ProcessReport(msgspec.Struct, frozen=True):
    """One process of a running cluster."""

    name: str
    state: str  # up, starting, starting again, fails
    problem: str  # for which it does not serve; empty: none is known
    memory_bytes: int | None  # its part of shared pages included; None: it has not answered


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """Answer to ShowStatus."""

    url: str  # of the first gateway
    deployments: tuple[DeploymentReport, ...]
    loads: dict[str, ClusterStatus]  # by deployment, whose router reports
    processes: tuple[ProcessReport, ...]
    total_bytes: int  # memory of the host
    available_bytes: int  # of that, left

    @property
    def is_whole(self) -> bool:
        loads = [
            self.loads.get(deployment.deployment_id) for deployment in self.deployments if deployment.phase == "serving"
        ]
        has_workers = all(load is not None and load.num_decode_workers > 0 for load in loads)
        return has_workers and all(process.state == "up" for process in self.processes)


Answer = Remark | OrderDone | OrderRefused | Models | StatusReport


def _kind_of(process: str) -> str:
    return process.partition(".")[0].partition("-")[0]


class OrderChannel(Protocol):
    """The way by which orders come to a driver. Nothing waits."""

    def take(self) -> list[tuple[str, AdminRequest]]:
        """Return the orders that have come since, each with an id to answer it by."""

    def answer(self, order_id: str, answer: Answer) -> None:
        """Answer an order; any answer but a Remark is the last one. May be repeated."""

    def close(self) -> None:
        """Take no more. May be repeated."""


def problem_of(order: AdminRequest) -> str | None:
    """Return why an order that was decoded cannot be meant; None: it may be."""
    if isinstance(order, ShowModels | ShowStatus | NodeOrder):
        return None
    if isinstance(order, AddModel | ReplaceModel):
        if not 0 < len(order.path) <= _MAX_PATH_LEN or "\0" in order.path:
            return "the path of the model is empty, too long or none"
        if len(order.settings) > _MAX_SETTINGS or any(len(setting) > _MAX_SETTING_LEN for setting in order.settings):
            return "too many settings, or one that is too long"
    name = order.model if isinstance(order, RestartWorkers) else order.name
    if name is not None and not (0 < len(name) <= MAX_NAME_LEN and name.isprintable()):
        return f"a model's name has 1 to {MAX_NAME_LEN} printable characters"
    within_s = None if isinstance(order, AddModel) else order.drains_within_s
    if within_s is not None and not 0.0 <= within_s < float("inf"):
        return "the time for the old requests must be a number of seconds"
    return None

"""What the logic of deployments hears and says: their phases, events, commands, and how one stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from alignedserve.cluster.deployments.orders import AddModel, ModelOrder, ReplaceModel


class Phase(Enum):
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
class Started:
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
    num_open: int  # requests that hold it; a process that is lost counts as one
    num_documents: int = 0  # of them, lines of batches
    has_lines: bool = False  # lines of batches wait for its model
    idle_s: float | None = None  # since its last request; None: it had none
    keep_alive_s: float | None = None  # that this one asked for
    waited_s: float | None = None  # how long a real-time request has waited for it to be loaded; None: none waits
    documents_waited_s: float | None = None  # the same of best effort, lines of batches apart
    is_hopeless: bool = False  # what is missing does not come by waiting


@dataclass(frozen=True, slots=True)
class Viewed:
    """All gateways and the batch worker have answered since the last Announce, or are lost."""

    views: Mapping[str, View]  # by deployment


@dataclass(frozen=True, slots=True)
class Ended:
    """No process of a deployment is left."""

    deployment_id: str


Event = Ordered | Prepared | Started | Failed | Viewed | Ended

# --- commands


@dataclass(frozen=True, slots=True)
class Prepare:
    """Fetch and size a new deployment; Prepared or Failed follows."""

    deployment_id: str
    order: AddModel | ReplaceModel
    replaced: str | None  # the deployment whose settings it inherits


@dataclass(frozen=True, slots=True)
class Start:
    """Create its processes; Started or Failed follows."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget what was prepared of a deployment that is not started after all."""

    deployment_id: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell gateways and batch worker which deployments there are now; Viewed follows, again and again."""


@dataclass(frozen=True, slots=True)
class SettleAdapters:
    """Let a replacement have no adapter that was unloaded since it was prepared, and say which it lacks."""

    order_id: str
    replaced: str
    deployment_id: str


@dataclass(frozen=True, slots=True)
class End:
    """End its processes; Ended follows."""

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


Command = Prepare | Start | Discard | SettleAdapters | Announce | End | Say | Conclude


@dataclass(frozen=True, slots=True)
class LeftDeployment:
    """A deployment as a driver leaves it to the next one."""

    deployment_id: str
    name: str
    phase: Phase
    order_id: str | None = None
    drains_within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """A deployment as it stands now."""

    deployment_id: str
    name: str
    phase: Phase
    num_open: int | None

"""A model version that a cluster serves with a router, workers and a pool of its own, as gateways are told of it."""

from dataclasses import dataclass
from enum import Enum

from alignedserve.config.sections import PrefixCacheConfig
from alignedserve.process.addresses import ROUTER
from alignedserve.runtime.model.served_model import ServedModel


class DeploymentPhase(Enum):
    """What a deployment may be asked for."""

    PREPARING = "preparing"  # nothing yet: gateways connect to it, load its tokenizer and wait for a token
    SERVING = "serving"  # requests that name its model; of one name at most one serves
    DRAINING = "draining"  # no more requests; those that it has are finished
    SLEEPING = "sleeping"  # it has no processes: requests that name its model wait until it is loaded


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """One deployment. Plain values, so that every actor can receive it."""

    served: ServedModel
    block_size: int  # of its workers' blocks, which requests may share
    prefix_cache: PrefixCacheConfig
    deployment_id: str = ""  # as in the names of its processes; empty: the first of a cluster
    router: str = ROUTER  # its router's name
    phase: DeploymentPhase = DeploymentPhase.SERVING
    problem: str = ""  # of one that sleeps: why it cannot be loaded at present
    is_failing: bool = False  # those of its workers that do not serve have failed to start again and again


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A deployment as one gateway, or the batch worker, sees it."""

    deployment_id: str
    missing: str | None  # why no request could be answered from here; None: a token has come through
    num_open: int  # requests that hold it here, from when their model was looked up to their last token
    num_documents: int = 0  # of them, lines of batches
    has_lines: bool = False  # batches have lines for its model that wait
    idle_s: float | None = None  # since its last request here; None: there was none
    keep_alive_s: float | None = None  # that its last request asked for; None: it did not
    waited_s: float | None = None  # how long a real-time request has waited for it here; None: none waits
    documents_waited_s: float | None = None  # the same of best effort
    is_hopeless: bool = False  # what is missing does not come by waiting

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


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """One deployment. Plain values, so that every actor can receive it."""

    served: ServedModel
    block_size: int  # of its workers' blocks, which requests may share
    prefix_cache: PrefixCacheConfig
    deployment_id: str = ""  # as in the names of its processes; empty: the first of a cluster
    router: str = ROUTER  # its router's name
    phase: DeploymentPhase = DeploymentPhase.SERVING


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A deployment as one gateway, or the batch worker, sees it."""

    deployment_id: str
    missing: str | None  # why no request could be answered from here; None: a token has come through
    num_open: int  # requests that hold it here, from when their model was looked up to their last token

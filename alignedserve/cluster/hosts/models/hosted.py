"""The models of a cluster of hosts, as its drivers hand them on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.cluster.deployments.division import Holding, holding_of
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.plan import ClusterPlan
from alignedserve.runtime.model.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One deployment, beside what its nodes have of it (see Member)."""

    plan: ClusterPlan
    own: Mapping[str, Any]  # sections of its settings, which win over those of all models
    digest: str | None  # of the head's copy

    @property
    def served(self) -> ServedModel:
        """Return the model, with the context that fits every node."""
        return self.plan.served

    @property
    def folder(self) -> Path:
        """Return the folder or file of the model, the same on every node."""
        return self.plan.served.folder


def holdings_of(members: Iterable[Member], models: Mapping[str, HostedModel]) -> dict[str, list[Holding]]:
    """Return what the workers of each node have reserved, by the node's name."""
    return {
        member.name: [
            holding_of(part.share.config_of(part.config), models[deployment_id].served, part.capacity.gpus)
            for deployment_id, part in member.models.items()
            if part.share.num_workers and deployment_id in models
        ]
        for member in members
    }

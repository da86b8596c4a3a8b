"""This host as the only node of a cluster: examined by this process, without Ray, other hosts or TLS."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.gpu_claims import GpuClaims
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.nodes.report import NodeReport, Surveyor
from alignedserve.cluster.machine import with_gpus
from alignedserve.core.errors import AlignedServeError
from alignedserve.runtime.model.served_model import ServedModel


class OwnHost:
    """What Admission is for the nodes of a cluster of hosts. Raises what it finds, without a node's name."""

    def __init__(self, claims: GpuClaims) -> None:
        """`claims`: the GPUs of this host that are the cluster's."""
        self.node = RayNode("", "", socket.gethostname(), is_head=True, num_gpus=len(claims.gpus))
        self._claims = claims
        self._surveyor = Surveyor()

    def __enter__(self) -> "OwnHost":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no process was started."""

    def reports_that_come(self, device: str, models: Sequence[Path]) -> dict[RayNode, NodeReport]:
        """Return the report of this host. Raises ConfigError for a device that is not there."""
        report = self._surveyor.report(device, models)
        _require(report.problem)
        assert report.machine is not None, "a report without a machine"
        used = tuple(gpu for gpu in report.gpus if gpu in self._claims.gpus)
        return {self.node: replace(report, machine=with_gpus(report.machine, report.gpus, used), gpus=used)}

    def check(self, nodes: Mapping[RayNode, PreparedNode], served: ServedModel) -> None:
        """Check memory and ports. Raises the error that is found."""
        for prepared in nodes.values():
            ports = [port for _, port in prepared.share.gateways]
            _require(self._surveyor.check(prepared.config, served, ports))


def _require(failure: AlignedServeError | None) -> None:
    if failure is not None:
        raise failure

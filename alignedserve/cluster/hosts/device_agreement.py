"""The one device that engine.device=auto means on all nodes, so that every worker has the same weights and dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.nodes.report import NodeReport
from alignedserve.runtime.device.devices import AUTO, CPU, CUDA
from alignedserve.runtime.device_check.choice import DeviceChoice


def agreed_device(device: str, reports: Mapping[RayNode, NodeReport]) -> tuple[DeviceChoice, dict[RayNode, NodeReport]]:
    """Return the device of all nodes and what they have for it: GPUs only if every usable node has some.

    `reports`: by engine.device, of which a node's own `auto` is part.
    """
    usable = {node: report for node, report in reports.items() if report.problem is None}
    if device != AUTO:
        return DeviceChoice(device), dict(reports)
    without = [node for node, report in usable.items() if not report.gpus]
    if not without and usable:
        return DeviceChoice(CUDA, "engine.device=auto takes the GPUs of every node: the self-check has passed"), dict(
            reports
        )
    remarks = [f"{node}: {report.device_remark}" for node, report in usable.items() if report.device_remark]
    if len(without) < len(usable):
        remarks.append(f"{', '.join(str(node) for node in without)} would compute on a CPU, so all nodes do")
    on_cpus = {node: _without_gpus(report) for node, report in reports.items()}
    return DeviceChoice(CPU, "; ".join(remarks), is_warning=bool(remarks)), on_cpus


@dataclass(frozen=True, slots=True)
class JoiningDevice:
    """The device of nodes that join a running cluster."""

    device: str  # of the cluster, never auto
    is_checked: bool = False  # engine.device was auto: a node's GPUs have to pass the self-check, as the others' have

    @property
    def asked(self) -> str:
        """Return the engine.device that a node's report is about."""
        return AUTO if self.is_checked else self.device

    def refusal(self, report: NodeReport) -> str | None:
        """Return why a node cannot join that has reported so; None: its device is that of the others."""
        if not self.is_checked or report.problem is not None or report.gpus:
            return None
        reason = report.device_remark or "no NVIDIA GPU is visible there"
        return f"the cluster computes on GPUs that have passed the self-check, this node would not: {reason}"


def joining_device(asked: str, choice: DeviceChoice) -> JoiningDevice:
    """Return the device of nodes that join later. `asked`: engine.device; `choice`: what the first nodes agreed on."""
    return JoiningDevice(choice.device, asked == AUTO and choice.device != CPU)


def _without_gpus(report: NodeReport) -> NodeReport:
    machine = report.machine
    if machine is not None:
        machine = replace(machine, gpu_bytes=(), has_float8=False)
    return replace(report, machine=machine, gpus=())

"""Admission of nodes to a cluster: they report, are compared with the head, and get a agent."""

import hashlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from alignedserve.cluster import preflight
from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.hosts.ray_directory import RayDirectory
from alignedserve.cluster.hosts.record import own_versions
from alignedserve.cluster.machine import GpuClaims, this_machine, with_gpus
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.agent import NodeActor
from alignedserve.cluster.nodes.plan import NodePart
from alignedserve.cluster.nodes.ray_nodes import RayNode, gpu_options
from alignedserve.cluster.ray_node import answer_of, kill_actors
from alignedserve.config.sections import ClusterConfig, LinksConfig
from alignedserve.core.errors import AlignedServeError, PeerLost, ResourceError
from alignedserve.process.addresses import AddressBook
from alignedserve.runtime.device.devices import AUTO, CPU, CUDA, gpu_names
from alignedserve.runtime.device_check.choice import DeviceChoice, choose_device
from alignedserve.runtime.model.served_model import ServedModel

_CONNECT_S = 5.0
_MAX_AT_ONCE = 64

Place = tuple[str, int]  # address and port


def open_port(address: str) -> socket.socket:
    """Listen at any free port of this address. Raises OSError when this host does not have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def unreached(places: Mapping[str, Place]) -> dict[str, str]:
    if not places:
        return {}
    with ThreadPoolExecutor(min(len(places), _MAX_AT_ONCE)) as pool:
        problems = zip(places, pool.map(_problem, places.values()), strict=True)
        return {name: problem for name, problem in problems if problem is not None}


def _problem(endpoint: Place) -> str | None:
    try:
        socket.create_connection(endpoint, _CONNECT_S).close()
    except TimeoutError:
        return f"no answer in {_CONNECT_S:.0f} s: a firewall on the way?"
    except OSError as error:
        return error.strerror or str(error)
    return None


_DIGESTED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.index.json")
_WEIGHTS = ("*.safetensors", "*.gguf")
_HEADER_BYTES = 1 << 20  # of a GGUF file: its configuration and the names of its tensors


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node's report."""

    versions: str
    machine: Machine | None = None
    gpus: tuple[str, ...] = ()
    digests: tuple[str | None, ...] = ()  # of the models that it was asked for; None: the model is not there
    problem: AlignedServeError | None = None  # for which it cannot be used
    unix_s: float | None = None  # its clock when it reported
    device_remark: str = ""  # why engine.device=auto does not take its GPUs, if it has some


def model_digest(path: Path) -> str | None:
    """Return a digest of configuration, tokenizer and index, with names and sizes of weight files; None: no model.
    Weights are not read: they may be hundreds of gigabytes."""
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
        digest.update(str(path.stat().st_size).encode())
        return digest.hexdigest()
    described = sorted(entry for pattern in _DIGESTED for entry in path.glob(pattern))
    if not described:
        return None
    for entry in described:
        digest.update(entry.name.encode() + hashlib.sha256(entry.read_bytes()).digest())
    for entry in sorted(entry for pattern in _WEIGHTS for entry in path.glob(pattern)):
        digest.update(f"{entry.name} {entry.stat().st_size}".encode())
    return digest.hexdigest()


class Surveyor:
    """Examines the node it runs on."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []  # until this process ends

    def open_port(self, address: str) -> int | AlignedServeError:
        try:
            self._listening.append(open_port(address))
        except OSError as error:
            return ResourceError(f"it cannot listen at {address}, the address that Ray gives it: {error.strerror}")
        port: int = self._listening[-1].getsockname()[1]
        return port

    def unreached(self, places: Mapping[str, Place]) -> dict[str, str]:
        return unreached(places)

    def report(self, device: str, models: Sequence[Path]) -> NodeReport:
        versions, digests = own_versions(), tuple(model_digest(model) for model in models)
        try:
            choice = choose_device(device)
            machine = this_machine(choice.device)
            gpus = gpu_names(choice.device)
        except AlignedServeError as error:
            return NodeReport(versions, digests=digests, problem=error)
        remark = choice.remark if choice.is_warning else ""
        return NodeReport(versions, machine, gpus, digests, unix_s=time.time(), device_remark=remark)

    def check(self, config: ClusterConfig, served: ServedModel, ports: Sequence[int]) -> AlignedServeError | None:
        """Return why this node has no room for its workers or its gateways; None: it has."""
        try:
            preflight.check_machine(config, served, ports)
        except AlignedServeError as error:
            return error
        return None


NodeSurveyor: Any = ray.remote(Surveyor)


logger = logging.getLogger(__name__)

_CLOCKS_APART_S = 30.0
NODE_ANSWER_S = 420.0  # of a node that loads PyTorch from a cold disk and compiles kernels for the self-check


@dataclass(frozen=True, slots=True)
class Agent:
    """The NodeActor of one node, with the address book of its processes."""

    actor: Any  # None: on a single host the driver does an agent's work
    book: AddressBook


class NodeAdmission:
    """Nodes under examination, each by a process on the node. A context manager: those processes end with it. They load
    PyTorch, which no node has to keep in memory for this."""

    def __init__(self, nodes: Sequence[RayNode]) -> None:
        self._surveyors = {
            node: NodeSurveyor.options(num_cpus=0, **node.options, **gpu_options(node.num_gpus)).remote()
            for node in nodes
        }

    def __enter__(self) -> "NodeAdmission":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_actors(self._surveyors.values())

    def ask_report(self, node: RayNode, device: str, models: Sequence[Path]) -> Any:
        return self._surveyors[node].report.remote(device, tuple(models))

    def reports(self, device: str, models: Sequence[Path]) -> dict[RayNode, NodeReport]:
        """Ask every node at once and wait. Raises PeerLost naming the node that does not answer."""
        asked_s = time.time()
        calls = {node: self.ask_report(node, device, models) for node in self._surveyors}
        reports: dict[RayNode, NodeReport] = {
            node: answer_of(node, reference, NODE_ANSWER_S) for node, reference in calls.items()
        }
        warn_of_clocks(reports, asked_s, time.time())
        return reports

    def reports_that_come(self, device: str, models: Sequence[Path]) -> dict[RayNode, NodeReport]:
        """Ask every node at once and wait; leave those out that do not answer, as they may be about to be lost."""
        calls = {node: self.ask_report(node, device, models) for node in self._surveyors}
        reports: dict[RayNode, NodeReport] = {}
        for node, reference in calls.items():
            try:
                reports[node] = answer_of(node, reference, NODE_ANSWER_S)
            except PeerLost as error:
                logger.warning("%s", error)
        return reports

    def apart(self) -> dict[RayNode, str]:
        """Let all nodes connect to each other; return the reasons of nodes that cannot. Raises PeerLost."""
        calls = {node: surveyor.open_port.remote(node.address) for node, surveyor in self._surveyors.items()}
        ports = {node: answer_of(node, reference, NODE_ANSWER_S) for node, reference in calls.items()}
        refused = {node: str(port) for node, port in ports.items() if not isinstance(port, int)}
        places = {node: (node.address, port) for node, port in ports.items() if isinstance(port, int)}
        tries = {
            node: self._surveyors[node].unreached.remote(
                {other.node_id: endpoint for other, endpoint in places.items() if other is not node}
            )
            for node in places
        }
        return refused | apart(
            places, {node: answer_of(node, reference, NODE_ANSWER_S) for node, reference in tries.items()}
        )

    def ask_check(self, node: RayNode, prepared: PreparedNode, served: ServedModel) -> Any:
        """Ask a node to check its memory and ports; return Ray's reference to the error found, or None."""
        ports = [port for _, port in prepared.share.gateways]
        return self._surveyors[node].check.remote(prepared.config, served, ports)

    def check(self, nodes: Mapping[RayNode, PreparedNode], served: ServedModel) -> None:
        """Check memory and ports on the nodes themselves. Raises the first error found there, or PeerLost."""
        calls = [
            (node, self.ask_check(node, prepared, served))
            for node, prepared in nodes.items()
            if prepared.share.num_workers
        ]
        for node, reference in calls:
            require(node, answer_of(node, reference, NODE_ANSWER_S))


def apart(nodes: Mapping[RayNode, Place], problems: Mapping[RayNode, Mapping[str, str]]) -> dict[RayNode, str]:
    """Return which nodes do not reach a node before them, or are not reached by one, and why. `nodes`: the head first,
    which is never refused for another; nor is a node for one that is refused. `problems`: what `unreached` returned on
    each node, by node ids."""
    refused: dict[RayNode, str] = {}
    used: list[RayNode] = []
    for node, endpoint in nodes.items():
        for other in used:
            way = problems[other].get(node.node_id)
            if way is not None:
                refused[node] = _sentence(other, node, endpoint, way)
                break
            back = problems[node].get(other.node_id)
            if back is not None:
                refused[node] = _sentence(node, other, nodes[other], back)
                break
        else:
            used.append(node)
    return refused


def _sentence(source: RayNode, target: RayNode, endpoint: Place, problem: str) -> str:
    return f"no connection from {source} to {target}, TCP port {endpoint[1]} ({problem})"


def warn_of_clocks(reports: Mapping[RayNode, NodeReport], asked_s: float, answered_s: float) -> None:
    """Say which nodes' clocks are apart from this one's. They work: nothing here compares clocks of two hosts. Log
    files and times in answers differ, and certificates are refused by clocks that are a day apart."""
    for node, apart_s in clocks_apart(reports, asked_s, answered_s).items():
        logger.warning("the clock of %s is %.0f s %s", node, abs(apart_s), "ahead" if apart_s > 0 else "behind")


def clocks_apart(reports: Mapping[RayNode, NodeReport], asked_s: float, answered_s: float) -> dict[RayNode, float]:
    """Return by how much the clocks of these nodes are ahead, at least, where it is over half a minute. `asked_s`,
    `answered_s`: between which they have reported, by this host's clock."""
    apart_s = {}
    for node, report in reports.items():
        if report.unix_s is not None:
            ahead_s = max(report.unix_s - answered_s, 0.0) + min(report.unix_s - asked_s, 0.0)
            if abs(ahead_s) > _CLOCKS_APART_S:
                apart_s[node] = ahead_s
    return apart_s


def require(node: RayNode, failure: AlignedServeError | None) -> None:
    """Raise the error that this node has found, naming the node; None: it has found none."""
    if failure is not None:
        raise type(failure)(f"{node}: {failure}") from failure


def differences(reports: Mapping[RayNode, NodeReport], head: NodeReport) -> dict[RayNode, str]:
    problems = {}
    for node, report in reports.items():
        missing = missing_copies(report, head.digests)
        if report.problem is not None:
            problems[node] = str(report.problem)
        elif report.gpus and not node.num_gpus:
            problems[node] = f"Ray counts none of its {len(report.gpus)} GPUs; was it started there with --num-gpus=0?"
        elif report.versions != head.versions:
            problems[node] = f"it has {report.versions}, the head {head.versions}"
        elif len(missing) == len(head.digests):
            problems[node] = missing[0]
    return problems


def missing_copies(report: NodeReport, digests: Sequence[str | None]) -> dict[int, str]:
    """Return the places of models that a node lacks, and why; `digests`: of the head's models."""
    missing = {}
    for index, (digest, of_head) in enumerate(zip(report.digests, digests, strict=True)):
        if digest is None:
            missing[index] = "it has no copy of the model at the same path"
        elif digest != of_head:
            missing[index] = "its copy of the model is another one (configuration, tokenizer or index differ)"
    return missing


def start_agents(folder_names: Mapping[RayNode, str], cluster_id: str, links: LinksConfig) -> dict[RayNode, Agent]:
    """Start the agents of these folders, each on its node, and wait for them. Raises the error for which a folder
    cannot be made, or PeerLost; with none of them left then."""
    actors = {node: create_agent(node, name) for node, name in folder_names.items()}
    agents = {}
    try:
        for node, actor in actors.items():
            require(node, answer_of(node, actor.failure.remote(), NODE_ANSWER_S))
            agents[node] = agent_of(
                node, actor, answer_of(node, actor.folder.remote(), NODE_ANSWER_S), cluster_id, links
            )
    except BaseException:
        kill_actors(actors.values())
        raise
    return agents


def create_agent(node: RayNode, folder_name: str) -> Any:
    """Create the agent of this folder on this node; it comes up by itself."""
    options = {"name": agent_name(folder_name), "lifetime": "detached", **node.options}
    return NodeActor.options(num_cpus=0, max_restarts=-1, **options).remote(folder_name)


def agent_of(node: RayNode, actor: Any, folder: Path, cluster_id: str, links: LinksConfig) -> Agent:
    book = AddressBook(folder, node.node_id, node.address, RayDirectory(cluster_id), has_tls=links.tls)
    return Agent(actor, book)


def agent_name(folder_name: str) -> str:
    return f"agent-{folder_name}"


class OwnHost:
    """What Admission is for the nodes of a cluster of hosts. Raises what it finds, without a node's name."""

    def __init__(self, claims: GpuClaims) -> None:
        self.node = RayNode("", "", socket.gethostname(), is_head=True, num_gpus=len(claims.gpus))
        self._claims = claims
        self._surveyor = Surveyor()

    def __enter__(self) -> "OwnHost":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def reports_that_come(self, device: str, models: Sequence[Path]) -> dict[RayNode, NodeReport]:
        """Return the report of this host. Raises ConfigError for a device that is not there."""
        report = self._surveyor.report(device, models)
        _require(report.problem)
        assert report.machine is not None, "a report without a machine"
        used = tuple(gpu for gpu in report.gpus if gpu in self._claims.gpus)
        return {self.node: replace(report, machine=with_gpus(report.machine, report.gpus, used), gpus=used)}

    def check(self, nodes: Mapping[RayNode, PreparedNode | NodePart], served: ServedModel) -> None:
        """Check memory and ports. Raises the error that is found."""
        for part in nodes.values():
            ports = [port for _, port in part.share.gateways]
            _require(self._surveyor.check(part.config, served, ports))


def _require(failure: AlignedServeError | None) -> None:
    if failure is not None:
        raise failure


def agreed_device(device: str, reports: Mapping[RayNode, NodeReport]) -> tuple[DeviceChoice, dict[RayNode, NodeReport]]:
    """Choose one device for all nodes, GPUs only if every usable node has some; return the reports for that device.
    `reports`: by engine.device, of which a node's own `auto` is part."""
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
        return AUTO if self.is_checked else self.device

    def refusal(self, report: NodeReport) -> str | None:
        """Return why a node cannot join that has reported so; None: its device is that of the others."""
        if not self.is_checked or report.problem is not None or report.gpus:
            return None
        reason = report.device_remark or "no NVIDIA GPU is visible there"
        return f"the cluster computes on GPUs that have passed the self-check, this node would not: {reason}"


def joining_device(wanted: str, choice: DeviceChoice) -> JoiningDevice:
    """Return the device of nodes that join later. `wanted`: engine.device; `choice`: what the first nodes agreed on."""
    return JoiningDevice(choice.device, wanted == AUTO and choice.device != CPU)


def _without_gpus(report: NodeReport) -> NodeReport:
    machine = report.machine
    if machine is not None:
        machine = replace(machine, gpu_bytes=(), has_float8=False)
    return replace(report, machine=machine, gpus=())

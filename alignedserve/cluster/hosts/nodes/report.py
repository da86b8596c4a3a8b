"""Reports a node before it is used: its resources, its software and its copies of the models."""

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from alignedserve.cluster import preflight
from alignedserve.cluster.hosts.nodes.versions import own_versions
from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.memory_planner import Machine
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import AlignedServeError, ResourceError
from alignedserve.runtime.device.devices import gpu_names
from alignedserve.runtime.device_check.choice import choose_device
from alignedserve.runtime.model.served_model import ServedModel

_CONNECT_S = 5.0
_MAX_AT_ONCE = 64

Place = tuple[str, int]  # address and port


def open_port(address: str) -> socket.socket:
    """Listen at any free port of this address. Raises OSError when this host does not have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def unreached(places: Mapping[str, Place]) -> dict[str, str]:
    """Try to connect to every place; return why for the names of those to which there is no connection."""
    if not places:
        return {}
    with ThreadPoolExecutor(min(len(places), _MAX_AT_ONCE)) as pool:
        found = zip(places, pool.map(_problem, places.values()), strict=True)
        return {name: problem for name, problem in found if problem is not None}


def _problem(place: Place) -> str | None:
    try:
        socket.create_connection(place, _CONNECT_S).close()
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

    Weights are not read: they may be hundreds of gigabytes.
    """
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
        digest.update(str(path.stat().st_size).encode())
        return digest.hexdigest()
    described = sorted(found for pattern in _DIGESTED for found in path.glob(pattern))
    if not described:
        return None
    for found in described:
        digest.update(found.name.encode() + hashlib.sha256(found.read_bytes()).digest())
    for found in sorted(found for pattern in _WEIGHTS for found in path.glob(pattern)):
        digest.update(f"{found.name} {found.stat().st_size}".encode())
    return digest.hexdigest()


class Surveyor:
    """Examines the node it runs on."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []  # until this process ends

    def open_port(self, address: str) -> int | AlignedServeError:
        """Listen for others at this address of the node; return the port, or why there is none."""
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

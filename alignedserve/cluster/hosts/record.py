"""The record of a running cluster, by which commands on any of its nodes find it."""

import platform
from importlib.metadata import version

import msgspec

from alignedserve.cluster.deployments.orders import DeploymentReport
from alignedserve.cluster.hosts import ray_directory
from alignedserve.core.errors import ProtocolError
from alignedserve.messages.wire import PROTOCOL_VERSION

DRAINING, DRAINED = "draining", "drained"
_RECORD_KEY = "cluster"
_STOP_KEY = "stop"


class ActorRecord(msgspec.Struct, frozen=True):
    """One process of a node."""

    name: str
    device: str = ""  # of a worker, with its threads where it computes on the CPU
    problem: str = ""  # for which it does not serve


class NodeRecord(msgspec.Struct, frozen=True):
    """One node and what runs there."""

    name: str
    node_id: str  # Ray's
    address: str
    hostname: str
    agent: str = ""  # the actor that reads its logs
    actors: tuple[ActorRecord, ...] = ()
    urls: tuple[str, ...] = ()  # of its gateways
    problem: str = ""  # reason for a refusal
    drain: str = ""  # "draining" or "drained"

    def is_called(self, name: str) -> bool:
        return name in (self.name, self.hostname, self.address)

    @property
    def summary(self) -> str:
        if self.problem:
            return f"not used: {self.problem}"
        if self.drain == DRAINED:
            return f"nothing; `alignedserve drain {self.name} --undo` uses it again"
        named = [f"{actor.name} ({actor.device})" if actor.device else actor.name for actor in self.actors]
        failing = [f"{actor.name} does not serve: {actor.problem}" for actor in self.failing]
        return "\n".join((", ".join((*named, *self.urls)), *failing))

    @property
    def failing(self) -> tuple[ActorRecord, ...]:
        """Return the processes that do not serve; they are started again by themselves."""
        return tuple(actor for actor in self.actors if actor.problem)


class ClusterRecord(msgspec.Struct, frozen=True):
    """The whole cluster."""

    cluster_id: str
    version: str  # of AlignedServe, with that of Python
    model: str  # or several, with commas
    topology: str
    started: float  # Unix time
    is_ready: bool
    nodes: tuple[NodeRecord, ...]
    driver: str = ""  # drawn by each driver; a cluster may have several, one after the other
    models: tuple[DeploymentReport, ...] = ()
    drain_s: float = 0.0  # that its end may take, for answers that run

    @property
    def urls(self) -> list[str]:
        return [url for node in self.nodes for url in node.urls]


class _Identity(msgspec.Struct, frozen=True):
    cluster_id: str
    driver: str = ""
    drain_s: float = 0.0


def write_record(record: ClusterRecord) -> None:
    """Replace the record. Raises PeerLost when Ray's head does not answer."""
    ray_directory.put(_RECORD_KEY, msgspec.json.encode(record))


def read_record() -> ClusterRecord | None:
    """Return the record; None: no cluster runs here. Raises PeerLost, or ProtocolError for one of another version."""
    encoded = ray_directory.get(_RECORD_KEY)
    if encoded is None:
        return None
    try:
        return msgspec.json.decode(encoded, type=ClusterRecord)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the running cluster is of another version: {error}") from error


def recorded_id() -> str | None:
    """Return the id of the cluster that the record names, also one of another version; None: there is none. Raises
    PeerLost when Ray's head does not answer."""
    identity = _identity()
    return identity.cluster_id if identity is not None else None


def recorded_driver() -> tuple[str, str] | None:
    """Return that id with its driver's: the next driver may go on with the same cluster. Raises as `recorded_id`."""
    identity = _identity()
    return (identity.cluster_id, identity.driver) if identity is not None else None


def recorded_drain_s() -> float:
    """Return the time that the running cluster, also one of another version, gives to what is open when it is to end.
    Raises PeerLost when Ray's head does not answer."""
    identity = _identity()
    return identity.drain_s if identity is not None else 0.0


def _identity() -> _Identity | None:
    encoded = ray_directory.get(_RECORD_KEY)
    try:
        return msgspec.json.decode(encoded, type=_Identity) if encoded is not None else None
    except msgspec.MsgspecError:
        return None  # it names no cluster that could be asked anything


def remove_record(cluster_id: str) -> None:
    """Remove the record and all addresses of a cluster that ends. Raises PeerLost when Ray's head does not answer."""
    ray_directory.delete(f"{cluster_id}/")
    ray_directory.delete(_RECORD_KEY)


def ask_to_stop(cluster_id: str, *, at_once: bool = False) -> None:
    """Ask the driver of this cluster to stop it: once what is open is answered, for a time, or at once. Raises PeerLost
    when Ray's head does not answer."""
    ray_directory.put(_STOP_KEY, _at_once(cluster_id) if at_once else cluster_id.encode())


def is_asked_to_stop(cluster_id: str) -> bool:
    """Return whether this cluster is to stop. Raises PeerLost when Ray's head does not answer."""
    return ray_directory.get(_STOP_KEY) in (cluster_id.encode(), _at_once(cluster_id))


def is_asked_to_stop_at_once(cluster_id: str) -> bool:
    """Return whether this cluster is to stop without waiting for anything. Raises as `is_asked_to_stop`."""
    return ray_directory.get(_STOP_KEY) == _at_once(cluster_id)


def _at_once(cluster_id: str) -> bytes:
    return f"{cluster_id} at once".encode()


def own_versions() -> str:
    return f"AlignedServe {version('alignedserve')} (protocol {PROTOCOL_VERSION}), Python {platform.python_version()}"

"""Hands a driver's state to the next one, so that a cluster goes on while its driver is started again.

Every node's agent has a copy, in its memory alone: the cluster's secret and its certificate authority are in it. A
driver hands it over when it has changed, and otherwise says about once a second that it lives; a agent that has been
started anew answers that it lacks the copy, and gets it. The next driver takes the latest copy of those that are left,
from agents that the cluster's record names, over Ray's authenticated channel.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import ClusterSecrets, PreparedNode
from alignedserve.cluster.deployments.logic import Deployment, DeploymentsLogic
from alignedserve.cluster.desired import DrainedNode, Host, ProcessDrain, RollingRestart, WantedCluster
from alignedserve.cluster.hosts.ray_directory import HEAD_RETURNS_S
from alignedserve.cluster.hosts.record import ClusterRecord, own_versions
from alignedserve.cluster.memory_planner import Machine, SizeChoice
from alignedserve.cluster.nodes.admission import JoiningDevice, agent_of
from alignedserve.cluster.nodes.agent import SILENT_S, KeptState, kept_by
from alignedserve.cluster.nodes.joining import Joining, Shares
from alignedserve.cluster.nodes.members import HostedModel, Member
from alignedserve.cluster.nodes.plan import ClusterPlan
from alignedserve.cluster.nodes.ray_nodes import RayNode, WorkerShare
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, NodeShare, PlacedCounts
from alignedserve.cluster.ray_node import answers_so_far
from alignedserve.config.environment import api_keys, redis_url
from alignedserve.config.sections import ClusterConfig
from alignedserve.config.unset_sizes import DefaultSize, from_mapping
from alignedserve.core.errors import AlignedServeError, ProtocolError, ResourceError
from alignedserve.core.seeing import decode_seeing
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.served_model import ServedModel

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All that the next driver of a cluster has to know."""

    asked: str  # what it serves, by `succession.digest_of`
    started: float  # Unix time
    secrets: ClusterSecrets
    joining: Joining  # with the plan
    members: tuple[Member, ...]  # the head first; decoded ones without their agents' actors and placement groups
    number: int = 0  # counts what was handed over; beside the record


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True): ...


_Places = tuple[int, ...]  # of a ClusterConfig's sections among those of the record: most nodes share most of them


class _Plan(_Struct, frozen=True):
    config: _Places
    served: msgspec.Raw
    is_encoder: bool  # the model: its config is of either kind
    deployment_id: str
    counts: PlacedCounts
    shares: tuple[NodeShare, ...]
    sizes: dict[str, _Places]  # the configuration of each node with workers
    capacities: tuple[NodeCapacity, ...]


class _Model(_Struct, frozen=True):
    plan: _Plan | None  # None: it is the first deployment
    own: dict[str, Any]
    digest: str | None


class _Part(_Struct, frozen=True):
    share: NodeShare
    capacity: NodeCapacity
    config: _Places
    num_far_decode: int
    joins_others: bool


class _Member(_Struct, frozen=True):
    ray_node: RayNode
    folder: str  # private, on that node
    parts: tuple[_Part, ...]  # that with the gateways first
    placed: dict[str, WorkerShare]


class _Handover(_Struct, frozen=True):
    version: int
    asked: str
    started: float
    secret: bytes
    authority: tuple[bytes, bytes] | None
    cluster_id: str
    sections: tuple[msgspec.Raw, ...]  # null where a size is unset
    first: _Plan
    models: dict[str, _Model]
    device: JoiningDevice
    deployments: tuple[Deployment, ...]
    num_named: int
    wholes: dict[str, Machine]
    num_nodes: int
    num_folders: int
    vacant: tuple[tuple[Host, tuple[Shares, ...]], ...]
    drains: dict[str, ProcessDrain]
    drained: dict[str, DrainedNode]
    restart: RollingRestart | None
    seen_s: float
    members: tuple[_Member, ...]


def encode(state: ClusterState) -> bytes:
    """Return the record of a state; the same bytes while nothing of it changes."""
    joining, wanted, authority = state.joining, state.joining.wanted, state.secrets.authority
    first, sections = joining.plan.deployment_id, _Sections()
    plans = {key: _plan_record(model.plan, sections) for key, model in joining.models.items() if key != first}
    first_plan = _plan_record(joining.plan, sections)
    members = tuple(_member_record(member, sections) for member in state.members)
    return _plain(
        _Handover(
            version=_VERSION,
            asked=state.asked,
            started=state.started,
            secret=state.secrets.secret,
            authority=authority.pem if authority is not None else None,
            cluster_id=joining.cluster_id,
            sections=sections.records,
            first=first_plan,
            models={
                key: _Model(plans.get(key), dict(model.own), model.digest) for key, model in joining.models.items()
            },
            device=joining.device,
            deployments=joining.logic.left,
            num_named=joining.logic.num_named,
            wholes=joining.wholes,
            num_nodes=joining.num_nodes,
            num_folders=joining.num_folders,
            vacant=tuple((host, tuple(shares)) for host, shares in joining.vacant.items()),
            drains=wanted.drains,
            drained=wanted.drained,
            restart=wanted.restart,
            seen_s=wanted.seen_s if wanted.drains or wanted.restart is not None else 0.0,
            members=members,
        )
    )


def decode(encoded: bytes) -> ClusterState:
    """Return the state that a record describes. Raises ProtocolError when it is of another version, or no record."""
    try:
        record = msgspec.msgpack.decode(encoded, type=_Handover)
        state = _state_of(record)
        # Fields that a Struct refuses are passed over where a dataclass is read; they are not in what it says again.
        if record.version != _VERSION or msgspec.msgpack.decode(encoded) != msgspec.msgpack.decode(encode(state)):
            raise ProtocolError("it is of another version")
        return state
    except (msgspec.MsgspecError, AlignedServeError, ValueError, TypeError, LookupError) as error:
        raise ProtocolError(f"what the former driver has left cannot be read: {error}") from error


def _state_of(record: _Handover) -> ClusterState:
    first = _plan_of(record.first, record.sections)
    models = {
        key: HostedModel(
            first if model.plan is None else _plan_of(model.plan, record.sections), model.own, model.digest
        )
        for key, model in record.models.items()
    }
    joining = Joining(first, models, record.cluster_id, record.num_nodes)
    joining.device = record.device
    joining.logic = DeploymentsLogic(record.deployments, record.num_named)
    joining.wholes = record.wholes
    joining.num_folders = record.num_folders
    joining.vacant = {host: list(shares) for host, shares in record.vacant}
    joining.wanted = WantedCluster(record.drains, record.drained, record.restart, record.seen_s)
    authority = CertificateAuthority.from_pem(*record.authority) if record.authority is not None else None
    return ClusterState(
        asked=record.asked,
        started=record.started,
        secrets=ClusterSecrets(record.secret, authority),
        joining=joining,
        members=tuple(_member_of(member, joining, record.sections) for member in record.members),
    )


class _Sections:
    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._known: dict[int, int] = {}  # by the ids of sections, which the state holds

    @property
    def records(self) -> tuple[msgspec.Raw, ...]:
        return tuple(msgspec.Raw(section) for section in self._places)

    def places_of(self, config: ClusterConfig) -> _Places:
        return tuple(self._place_of(getattr(config, name)) for name in config.__struct_fields__)

    def _place_of(self, section: object) -> int:
        index = self._known.get(id(section))
        if index is None:
            index = self._known[id(section)] = self._places.setdefault(_plain(section), len(self._places))
        return index


def _config_of(places: _Places, sections: Sequence[msgspec.Raw]) -> ClusterConfig:
    named = zip(ClusterConfig.__struct_fields__, places, strict=True)
    return from_mapping({name: msgspec.msgpack.decode(sections[index]) for name, index in named})


def _plan_record(plan: ClusterPlan, sections: _Sections) -> _Plan:
    return _Plan(
        config=sections.places_of(plan.config),
        served=msgspec.Raw(_plain(plan.served)),
        is_encoder=plan.served.encoder is not None,
        deployment_id=plan.deployment_id,
        counts=plan.placement.counts,
        shares=plan.shares,
        sizes={name: sections.places_of(choice.config) for name, choice in plan.choices.items()},
        capacities=plan.capacities,
    )


def _plan_of(record: _Plan, sections: Sequence[msgspec.Raw]) -> ClusterPlan:
    config = _config_of(record.config, sections)
    served = _served_of(record.served, EncoderConfig if record.is_encoder else ModelConfig)
    choices = {name: SizeChoice(_config_of(sized, sections), served) for name, sized in record.sizes.items()}
    placement = DeploymentPlacement(config, record.deployment_id, record.counts)
    return ClusterPlan(config, served, placement, record.shares, choices, record.capacities)


def _member_record(member: Member, sections: _Sections) -> _Member:
    parts = tuple(
        _Part(part.share, part.capacity, sections.places_of(part.config), part.num_far_decode, part.joins_others)
        for part in member.parts
    )
    return _Member(member.ray_node, str(member.prepared.folder), parts, dict(member.placed))


def _member_of(record: _Member, joining: Joining, sections: Sequence[msgspec.Raw]) -> Member:
    links = joining.plan.config.links
    agent = agent_of(record.ray_node, None, Path(record.folder), joining.cluster_id, links)
    parts = [
        PreparedNode(
            part.share,
            part.capacity,
            _config_of(part.config, sections),
            agent.book,
            num_far_decode=part.num_far_decode,
            joins_others=part.joins_others,
        )
        for part in record.parts
    ]
    others = {part.share.deployment_id: part for part in parts[1:]}
    return Member(record.ray_node, parts[0], agent, others, record.placed)


def _served_of(record: msgspec.Raw, kind: type) -> ServedModel:
    fields = msgspec.msgpack.decode(record, type=dict[str, Any])
    types = {**get_type_hints(ServedModel), "config": kind}
    return ServedModel(
        **{name: msgspec.convert(value, types[name], dec_hook=_decoded) for name, value in fields.items()}
    )


def _plain(value: object) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_hook)


def _hook(value: object) -> str | None:
    if isinstance(value, Path):
        return str(value)
    assert isinstance(value, DefaultSize), f"{type(value)} in the record of a cluster"
    return None


def _decoded(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else decode_seeing(kind, value)


logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_HEAD_SILENT_S = 20.0
# Less than Ray's nodes wait for a head (60 s, or as long as one that returns): streams are to end with an error, and
# not with their gateway's process.
_ORPHANED_S = 50.0
_BEFORE_RAY_S = 10.0
_POLL_S = 0.5
_PATIENCE_S = 15.0  # with a driver that does not end


def digest_of(*configs: ClusterConfig) -> str:
    """Return a digest of all that a driver is started with: a driver with another one starts a cluster of its own.
    `configs`: of its models."""
    encoded = [msgspec.json.encode(config, enc_hook=_typed).decode() for config in configs]
    parts = (own_versions(), *encoded, *sorted(api_keys()), redis_url() or "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _typed(value: object) -> str:
    return f"{type(value).__name__} {value}"


@dataclass(slots=True)
class _Given:
    agent: Any
    number: int
    actors: list[Any]
    answer: Any = None  # None: there is none to come


class Succession:
    """Hands the state of a cluster over to its agents, and says again and again that its driver lives."""

    def __init__(self, digest: str, former: ClusterState | None = None) -> None:
        self.is_adopted = former is not None
        self.started = former.started if former is not None else time.time()
        self._asked = digest
        self._number = former.number if former is not None else 0
        self._handed_s = float("-inf")
        self._copy = b""  # the record that was handed over last
        self._given: dict[str, _Given] = {}  # by node

    def hand_over(
        self,
        joining: Joining,
        members: Sequence[Member],
        cluster_secrets: ClusterSecrets,
        actors: Mapping[str, Mapping[str, Any]],
        *,
        has_changed: bool = False,
    ) -> None:
        """Give a copy to the agents of all members that have not this state, without waiting for them. Looked at about
        once a second. `actors`: by node and name; agents end those of their node when they have had no driver for long.
        `has_changed`: at once, so that a driver which dies now leaves no process that the next one does not know."""
        now = time.monotonic()
        if now - self._handed_s < _PERIOD_S and not has_changed:
            return
        self._handed_s = now
        copy = encode(ClusterState(self._asked, self.started, cluster_secrets, joining, tuple(members)))
        if copy != self._copy:
            self._number, self._copy = self._number + 1, copy
        self._forget_lacking({member.name for member in members})
        for member in members:
            with contextlib.suppress(RayError, ValueError):
                self._tell(member, list(actors.get(member.name, {}).values()))

    def _forget_lacking(self, names: set[str]) -> None:
        self._given = {name: handed for name, handed in self._given.items() if name in names}
        calls = {given.answer: name for name, given in self._given.items() if given.answer is not None}
        for answer, has_copy in answers_so_far(list(calls)).items():
            self._given[calls[answer]].answer = None
            if not has_copy:
                del self._given[calls[answer]]

    def _tell(self, member: Member, actors: list[Any]) -> None:
        agent, handed = member.agent.actor, self._given.get(member.name)
        if handed is None or (handed.agent, handed.number, handed.actors) != (agent, self._number, actors):
            agent.keep.remote(self._number, self._copy, actors, orphans_patience_s())
            self._given[member.name] = _Given(agent, self._number, actors)
        elif handed.answer is None:  # one that answers late has heard enough
            handed.answer = agent.hear.remote(self._number)


def head_patience_s() -> float:
    return float(HEAD_RETURNS_S) if redis_url() is not None else _HEAD_SILENT_S


def orphans_patience_s() -> float:
    return HEAD_RETURNS_S - _BEFORE_RAY_S if redis_url() is not None else _ORPHANED_S


def left_by_former(record: ClusterRecord | None) -> ClusterState | None:
    """Return what the last driver of this cluster has left; None: nothing is left, or it is of another version. Raises
    ResourceError when that driver has not ended."""
    if record is None or record.version != own_versions():
        return None
    agents = [node.agent for node in record.nodes if node.agent]
    ends_s = time.monotonic() + _PATIENCE_S
    while states := kept_by(agents):
        if min(state.age_s for state in states) > SILENT_S:
            latest = max(states, key=lambda state: state.number)
            return _read(latest)
        if time.monotonic() > ends_s:
            raise ResourceError("a cluster serves on these hosts already; end it with `alignedserve stop`")
        time.sleep(_POLL_S)
    return None


def _read(latest: KeptState) -> ClusterState | None:
    try:
        return replace(decode(latest.state), number=latest.number)
    except ProtocolError as error:
        logger.warning("%s", error)
        return None

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
from typing import Any

import msgspec
from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import ClusterSecrets
from alignedserve.cluster.hosts.handover import ClusterState, decode, encode
from alignedserve.cluster.hosts.ray_directory import HEAD_RETURNS_S
from alignedserve.cluster.hosts.record import ClusterRecord, own_versions
from alignedserve.cluster.nodes.agent import SILENT_S, KeptState, kept_by
from alignedserve.cluster.nodes.joining import Joining
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.ray_node import answers_so_far
from alignedserve.config.environment import api_keys, redis_url
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ProtocolError, ResourceError

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

"""Hands a driver's state to the next one, so that a cluster goes on while its driver is started again.

Every node's keeper has a copy, in its memory alone: the cluster's secret and its certificate authority are in it. A
driver hands it over about once a second, which is also how keepers know that there is a driver. The next driver takes
the latest copy of those that are left, from keepers that the cluster's record names, over Ray's authenticated channel.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import msgspec
from ray import cloudpickle
from ray.exceptions import RayError

from alignedserve.cluster.actor_factory import ClusterSecrets
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.left_behind import SILENT_S, kept_by
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.nodes.keeper import KeptState
from alignedserve.cluster.hosts.nodes.report import own_versions
from alignedserve.cluster.hosts.ray_storage import HEAD_RETURNS_S
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.config.environment import api_keys, redis_url
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ResourceError

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_HEAD_SILENT_S = 20.0
# Less than Ray's nodes wait for a head (60 s, or as long as one that returns): streams are to end with an error, and
# not with their gateway's process.
_ORPHANED_S = 50.0
_BEFORE_RAY_S = 10.0
_POLL_S = 0.5
_PATIENCE_S = 15.0  # with a driver that does not end
# Raised where the classes of a state have changed and their version has not, as happens to those who work on them.
OTHER_BUILD = (UnpicklingError, AttributeError, EOFError, ImportError, IndexError, TypeError)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All that the next driver of a cluster has to know."""

    number: int  # counts what was handed over
    asked: str  # what it serves, by `digest_of`
    started: float  # Unix time
    secrets: ClusterSecrets
    joining: Joining  # with the plan
    members: tuple[Member, ...]  # the head first


def digest_of(config: ClusterConfig) -> str:
    """Return a digest of all that a driver is started with: a driver with another one starts a cluster of its own."""
    asked = msgspec.json.encode(config, enc_hook=_typed)
    parts = (own_versions(), asked.decode(), *sorted(api_keys()), redis_url() or "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _typed(value: object) -> str:
    """Return what is more than a plain value in other words than that: a default is not the same as a setting."""
    return f"{type(value).__name__} {value}"


class Succession:
    """Hands the state of a cluster over to its keepers, again and again."""

    def __init__(self, asked: str, former: ClusterState | None = None) -> None:
        """`former`: left by the driver before this one, which has its cluster; None: this one starts its own."""
        self.is_adopted = former is not None
        self.started = former.started if former is not None else time.time()
        self._asked = asked
        self._number = former.number if former is not None else 0
        self._handed_s = float("-inf")

    def hand_over(
        self,
        joining: Joining,
        members: Sequence[Member],
        cluster_secrets: ClusterSecrets,
        actors: Mapping[str, Mapping[str, Any]],
        *,
        has_changed: bool = False,
    ) -> None:
        """Give a copy to the keepers of all members, about once a second, without waiting for them.

        `actors`: by node and name; keepers end those of their node when they have had no driver for long.
        `has_changed`: at once, so that a driver which dies now leaves no process that the next one does not know.
        """
        now = time.monotonic()
        if now - self._handed_s < _PERIOD_S and not has_changed:
            return
        self._handed_s = now
        self._number += 1
        portable = tuple(one.without_keeper() for one in members)
        state = ClusterState(self._number, self._asked, self.started, cluster_secrets, joining, portable)
        copy: bytes = cloudpickle.dumps(state)  # type: ignore[no-untyped-call]
        for member in members:
            of_node = list(actors.get(member.name, {}).values())
            with contextlib.suppress(RayError, ValueError):
                member.keeper.actor.keep.remote(self._number, copy, of_node, orphans_patience_s())


def head_patience_s() -> float:
    """Return for how long a driver waits for Ray's head."""
    return float(HEAD_RETURNS_S) if redis_url() is not None else _HEAD_SILENT_S


def orphans_patience_s() -> float:
    """Return for how long a node's actors go on without a driver."""
    return HEAD_RETURNS_S - _BEFORE_RAY_S if redis_url() is not None else _ORPHANED_S


def left_by_former(record: ClusterRecord | None) -> ClusterState | None:
    """Return what the last driver of this cluster has left; None: nothing is left, or it is of another version.

    Raises ResourceError when that driver has not ended.
    """
    if record is None or record.version != own_versions():
        return None
    keepers = [node.keeper for node in record.nodes if node.keeper]
    ends_s = time.monotonic() + _PATIENCE_S
    while kept := kept_by(keepers):
        if min(one.age_s for one in kept) > SILENT_S:
            latest = max(kept, key=lambda one: one.number)
            return _read(latest)
        if time.monotonic() > ends_s:
            raise ResourceError("a cluster serves on these hosts already; end it with `alignedserve stop`")
        time.sleep(_POLL_S)
    return None


def _read(kept: KeptState) -> ClusterState | None:
    try:
        # As every result of an actor, it was pickled by a process of this cluster and came over Ray's channel.
        state: ClusterState = cloudpickle.loads(kept.state)
    except OTHER_BUILD as error:
        logger.warning("what the former driver has left is of another build: %r", error)
        return None
    return state

"""Processes that a driver has left: whether another looks after them, and their end without one.

Commands use it: what it imports is loaded in a moment.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from alignedserve.cluster.hosts.nodes.agent import KeptState
from alignedserve.cluster.hosts.nodes.placement_group import release_former
from alignedserve.cluster.hosts.ray_directory import NAMESPACE
from alignedserve.cluster.hosts.record import ClusterRecord, remove_record
from alignedserve.cluster.ray_polls import answer_or_none, kill_actors
from alignedserve.core.errors import ResourceError

logger = logging.getLogger(__name__)

SILENT_S = 4.0  # after which a driver that hands over every second has ended
_ANSWER_S = 10.0
_POLL_S = 0.5
_PATIENCE_S = 15.0  # with processes that do not end


def end_cluster(record: ClusterRecord) -> None:
    """End all processes of a recorded cluster without a driver. Raises ResourceError when they do not end."""
    actors = [actor.name for node in record.nodes for actor in node.actors]  # the driver's name is no actor's
    end_by_name([*actors, *(node.agent for node in record.nodes if node.agent)])
    release_former()
    remove_record(record.cluster_id)


def has_driver(record: ClusterRecord) -> bool:
    """Return whether a driver looks after this cluster."""
    kept = kept_by([node.agent for node in record.nodes if node.agent])
    return any(one.age_s < SILENT_S for one in kept)


def kept_by(agents: Sequence[str]) -> list[KeptState]:
    asked: list[Any] = []
    for name in agents:
        try:
            asked.append(ray.get_actor(name, NAMESPACE).kept.remote())
        except ValueError:
            logger.info("%s is gone", name)
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    found = (answer_or_none(reference) for reference in answered)
    return [kept for kept in found if kept is not None]  # some nodes may be gone


def end_by_name(names: Sequence[str]) -> None:
    """End all actors with these names, and wait until others may have the names. Raises ResourceError."""
    ends_s = time.monotonic() + _PATIENCE_S
    while left := [actor for name in names if (actor := _actor(name)) is not None]:
        if time.monotonic() > ends_s:
            raise ResourceError(f"{len(left)} processes of a former cluster do not end; see `ray list actors`")
        kill_actors(left)
        time.sleep(_POLL_S)


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None

"""Decides how many nodes a cluster has, from what clients ask of it: up fast, down slowly, never back and forth.

The life of a decision, about once a second:
1. The Demand of each model's router becomes a Recommendation: the fewest nodes below which nodes are added, and the
   most above which nodes are given back. Between the two nothing happens. Of several models the largest count.
2. Recommendations are kept for `down_after_s`. The number of nodes rises to the smallest that was wanted throughout the
   last `up_after_s`, and falls to the largest that was wanted at any time within `down_after_s` (as the Kubernetes
   horizontal pod autoscaler stabilises its recommendations).
3. The difference to the nodes that there are becomes commands: first nodes that were given back and are still there are
   taken again, then Ray is asked for the rest; or the nodes that came last are given back.

Example: two nodes of 64 places each, 140 real-time requests, `target_load` 0.8. 140 / (0.8 * 64) = 2.7: a third node is
asked for after 3 s. With it the cluster goes back to two nodes when for 300 s there were at most 0.9 * 0.8 * 128 = 92
requests, at which two nodes are below the load that would bring the third back.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.config.sections import ScalingConfig
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import FIRST_DEPLOYMENT

_LOWER_LOAD = 0.9  # of the load at which nodes are added: below it nodes are given back
_GROWTH = 2  # nodes are added up to this many times those that serve: what is on its way changes the forecast


@dataclass(frozen=True, slots=True)
class ScaledNode:
    """A node of the cluster, as the decision sees it."""

    node_id: str
    is_head: bool = False
    is_serving: bool = True  # False: workers are starting
    is_released: bool = False  # given back, still present
    models: tuple[str, ...] = (FIRST_DEPLOYMENT,)  # deployments with workers on the node


@dataclass(frozen=True, slots=True)
class AskForNodes:
    """Ray is to have this many nodes for the cluster, the head included; it keeps to the last such command."""

    num_nodes: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The node is to be drained and left to Ray, which removes nodes that are idle."""

    node_id: str


@dataclass(frozen=True, slots=True)
class TakeAgain:
    """The node that was given back, and is still there, is to serve again."""

    node_id: str


ScalingCommand = AskForNodes | GiveBack | TakeAgain


class Recommendation(NamedTuple):
    """Bounds of the number of nodes, by one look at the demand."""

    at_least: int
    at_most: int


class ScalingLogic:
    """The number of nodes of one cluster over time."""

    def __init__(self, config: ScalingConfig, max_nodes: int) -> None:
        self._config = config
        self._max_nodes = max_nodes
        self._num_wanted: int | None = None  # with the head
        self._num_asked: int | None = None
        self._seen: deque[tuple[float, Recommendation]] = deque()
        self._since_s = 0.0  # when the cluster last grew by itself, or this began

    @property
    def num_wanted(self) -> int | None:
        """Return the number of nodes at which the cluster is to be; None before the first decision."""
        return self._num_wanted

    def ask_again(self) -> None:
        """Repeat the request to Ray with the next decision, as the last command did not reach it."""
        self._num_asked = None

    def decide(
        self, statuses: Mapping[str, ClusterStatus], nodes: Sequence[ScaledNode], now: float
    ) -> list[ScalingCommand]:
        """Return what is to be done; `nodes` in the order in which they came. `statuses`: of each deployment's router;
        one that is missing has not reported, or is being repaired: nothing changes then."""
        members = [node for node in nodes if not node.is_released]
        self._keep_unasked(len(members), now)
        serving = [node for node in members if node.is_serving]
        models = dict.fromkeys(model for node in members for model in node.models)
        recommendations = [self._of_model(model, statuses.get(model), serving) for model in models]
        known = [bounds for bounds in recommendations if bounds is not None]
        if not known or len(known) < len(recommendations):
            self._since_s = now
            return self._commands(members, nodes)
        self._seen.append((now, Recommendation(*(max(bounds) for bounds in zip(*known, strict=True)))))
        self._num_wanted = self._stabilised(now)
        return self._commands(members, nodes)

    def _of_model(
        self, deployment_id: str, status: ClusterStatus | None, serving: Sequence[ScaledNode]
    ) -> Recommendation | None:
        """Return the bounds for all nodes that follow from one model's demand; None: it is not known. What a model
        needs beyond the nodes that it has comes on top of all."""
        num_own = sum(deployment_id in node.models for node in serving)
        if status is None or not status.demand.num_decode_places or not num_own:
            return None
        others = len(serving) - num_own
        bounds = (need + others if need > num_own else need for need in self.recommend(status, num_own))
        return Recommendation(*(self._bounded(bound) for bound in bounds))

    def recommend(self, status: ClusterStatus, num_serving: int) -> Recommendation:
        config, demand = self._config, status.demand
        places = demand.num_decode_places / num_serving  # of a node
        unfinished = status.num_queued + status.num_prefilling + status.num_pooled + status.num_decoding
        at_least = _ceil(demand.num_real_time, config.target_load * places)
        if demand.queue_wait_s > config.max_wait_s:
            at_least = max(at_least, _ceil(num_serving * demand.queue_wait_s, config.max_wait_s))
        if demand.num_at_risk:
            at_least = max(at_least, num_serving + 1)
        at_least = min(at_least, _GROWTH * num_serving)
        # Best-effort work adds no node, but those that it uses are not idle.
        at_most = max(at_least, _ceil(unfinished, _LOWER_LOAD * config.target_load * places))
        return Recommendation(self._bounded(at_least), self._bounded(at_most))

    def _keep_unasked(self, num_members: int, now: float) -> None:
        wanted = self._num_wanted
        if wanted is None or num_members > max(wanted, self._num_asked or 0):
            self._num_wanted = max(num_members, self._config.min_nodes)
            self._since_s = now

    def _stabilised(self, now: float) -> int:
        while self._seen[0][0] < now - self._config.down_after_s:
            self._seen.popleft()
        wanted = self._num_wanted
        assert wanted is not None, "a decision before the nodes were counted"
        if now - self._since_s >= self._config.down_after_s:
            wanted = min(wanted, max(seen.at_most for _, seen in self._seen))
        if now - self._since_s >= self._config.up_after_s:
            begins_s = now - self._config.up_after_s
            wanted = max(wanted, min(seen.at_least for seen_s, seen in self._seen if seen_s >= begins_s))
        return wanted

    def _commands(self, members: Sequence[ScaledNode], nodes: Sequence[ScaledNode]) -> list[ScalingCommand]:
        wanted = self._num_wanted
        assert wanted is not None, "a decision before the nodes were counted"
        commands: list[ScalingCommand] = []
        if wanted != self._num_asked:
            self._num_asked = wanted
            commands.append(AskForNodes(wanted))
        missing = wanted - len(members)
        released = [node for node in nodes if node.is_released]
        if missing > 0:
            commands += [TakeAgain(node.node_id) for node in released[-missing:]]
        elif missing < 0:
            commands += [GiveBack(node.node_id) for node in _spare(members, -missing)]
        return commands

    def _bounded(self, num_nodes: int) -> int:
        return min(max(num_nodes, self._config.min_nodes), self._max_nodes)


def _spare(members: Sequence[ScaledNode], num_nodes: int) -> list[ScaledNode]:
    left, spare = list(members), list[ScaledNode]()
    for node in reversed(members):
        others = {model for other in left if other is not node for model in other.models}
        if len(spare) < num_nodes and not node.is_head and others.issuperset(node.models):
            left.remove(node)
            spare.append(node)
    return spare


def _ceil(amount: float, of_one: float) -> int:
    return math.ceil(amount / of_one - 1e-9) if of_one > 0 else 0

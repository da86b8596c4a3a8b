"""Nodes that follow the load over a day: what they cost, what requests wait, how often their number changes.

The decision is the live one (cluster/hosts/scaling/logic.py), once a second. The nodes are not: each has 64 places, a
request keeps one for 10 s in the mean, nodes take 60 s to come and are removed 300 s after they were given back.

python -m benchmarks.simulation.scaling
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alignedserve.cluster.hosts.scaling.logic import AskForNodes, GiveBack, ScaledNode, ScalingLogic
from alignedserve.config.sections import ScalingConfig
from alignedserve.messages.gateways import ClusterStatus, Demand
from benchmarks.support.recording import write_result

DAY_S = 86_400
PLACES = 64
SERVICE_S = 10.0
START_S = 60
IDLE_S = 300
MAX_NODES = 12
MAX_FORECAST_S = 120.0  # as the router's
LONG_WAIT_S = 5.0

Rate = Callable[[int], float]  # requests per second, by the second of the day


@dataclass(slots=True)
class Fleet:
    """Nodes, and the requests that they serve in the order of arrival."""

    logic: ScalingLogic | None  # None: the number of nodes is fixed
    nodes: dict[int, int | None]  # when it was given back; None: it serves
    coming: list[int] = field(default_factory=list)  # when
    asked: int = 1
    next_id: int = 1
    num_running: int = 0
    num_queued: int = 0
    node_s: int = 0
    num_long: int = 0  # requests that came when the wait was long
    num_arrived: int = 0
    changes: list[int] = field(default_factory=list)  # of what is asked for

    def step(self, now: int, num_arriving: int, random: np.random.Generator) -> None:
        """Let a second pass."""
        self._come_and_go(now)
        num_places = PLACES * sum(since is None for since in self.nodes.values())
        wait_s = self.num_queued * SERVICE_S / num_places
        self.num_arrived += num_arriving
        self.num_long += num_arriving * (wait_s > LONG_WAIT_S)
        self.num_running -= int(random.binomial(self.num_running, -math.expm1(-1.0 / SERVICE_S)))
        self.num_queued += num_arriving
        num_started = max(0, min(self.num_queued, num_places - self.num_running))
        self.num_queued -= num_started
        self.num_running += num_started
        if self.logic is not None:
            self._scale(self.logic, now, Demand(self.num_running + self.num_queued, num_places, wait_s))

    def _come_and_go(self, now: int) -> None:
        for _ in [at for at in self.coming if at <= now]:
            self.nodes[self.next_id] = None
            self.next_id += 1
        self.coming = [at for at in self.coming if at > now]
        self.nodes = {node: since for node, since in self.nodes.items() if since is None or now - since <= IDLE_S}
        self.node_s += len(self.nodes)

    def _scale(self, logic: ScalingLogic, now: int, demand: Demand) -> None:
        bounded = Demand(demand.num_real_time, demand.num_decode_places, min(demand.queue_wait_s, MAX_FORECAST_S))
        status = ClusterStatus(num_queued=self.num_queued, num_decoding=self.num_running, demand=bounded)
        seen = [ScaledNode(str(node), node == 0, is_released=since is not None) for node, since in self.nodes.items()]
        for command in logic.decide({"": status}, seen, float(now)):
            match command:
                case AskForNodes(num_nodes):
                    self.asked = num_nodes
                    self.changes.append(num_nodes)
                case GiveBack(node_id):
                    self.nodes[int(node_id)] = now
                case _:
                    self.nodes[int(command.node_id)] = None
        num_serving = sum(since is None for since in self.nodes.values())
        missing = self.asked - num_serving - len(self.coming)
        self.coming += [now + START_S] * max(missing, 0)
        del self.coming[max(self.asked - num_serving, 0) :]


def day(now: int) -> float:
    """Return 2 requests per second at night, rising to 42 in the afternoon."""
    return 22.0 - 20.0 * math.cos(2.0 * math.pi * now / DAY_S)


def bursts(now: int) -> float:
    """Return five times as many for ten minutes of every hour."""
    return 30.0 if now % 3600 < 600 else 6.0


def steady(now: int) -> float:
    """Return the same rate at all times."""
    return 20.0


def main() -> None:
    """Let days pass, print and record."""
    figures = [_day_of(rate, down_after_s) for rate in (day, bursts, steady) for down_after_s in (60.0, 300.0)]
    for row in figures:
        print(row)
    print(write_result("scaling", {"days": figures}))


def _day_of(rate: Rate, down_after_s: float) -> dict[str, Any]:
    config = ScalingConfig(max_nodes=MAX_NODES, down_after_s=down_after_s)
    fleet = _passed(Fleet(ScalingLogic(config, MAX_NODES), {0: None}), rate)
    peak = math.ceil(max(rate(now) for now in range(DAY_S)) * SERVICE_S / (PLACES * config.target_load))
    fixed = _passed(Fleet(None, dict.fromkeys(range(peak))), rate)
    steps = [later - former for former, later in zip(fleet.changes, fleet.changes[1:], strict=False)]
    return {
        "load": rate.__name__,
        "down_after_s": down_after_s,
        "node_hours": round(fleet.node_s / 3600, 1),
        "node_hours_fixed_at_the_peak": round(fixed.node_s / 3600, 1),
        "percent_of_requests_in_a_long_wait": round(100 * fleet.num_long / fleet.num_arrived, 2),
        "num_changes": len(steps),
        "num_turns": sum(one * next_one < 0 for one, next_one in itertools.pairwise(steps)),
        "most_nodes": max(fleet.changes),
    }


def _passed(fleet: Fleet, rate: Rate) -> Fleet:
    random = np.random.default_rng(1)
    for now in range(DAY_S):
        fleet.step(now, int(random.poisson(rate(now))), random)
    return fleet


if __name__ == "__main__":
    main()

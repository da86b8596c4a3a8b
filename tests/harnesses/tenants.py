"""Simulates tenants that share small clusters, and counts the tokens that each receives, by window of time."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from alignedserve.config.sections import RouterConfig, SchedulingConfig, Topology
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.gateways import TokensEmitted
from lab.sim.config import SimConfig
from lab.sim.result import SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest, Workload
from tests.harnesses.simulation import colocated, disaggregated, timed

CHAT = Slo(ttft_s=1.0, tpot_s=0.2)
TOPOLOGIES = {
    "elastic": colocated(2, policy="aligned_slo", topology=Topology.ELASTIC),
    "colocated": colocated(1, policy="aligned_slo"),
    "disaggregated": disaggregated(1, 1),
}


def shared(topology: str, duration_s: float) -> SimConfig:
    """Configure a small cluster whose queue holds any backlog."""
    config = TOPOLOGIES[topology]
    router = RouterConfig(prefill_order="least_slack", max_queued_requests=100_000, max_queued_tokens=10**9)
    cluster = msgspec.structs.replace(config.cluster, scheduling=SchedulingConfig(policy="aligned_slo"), router=router)
    return replace(config, cluster=cluster, duration_s=duration_s)


def backlog(num_requests: int, request_class: RequestClass = RequestClass.REAL_TIME) -> list[TimedRequest]:
    """Return what tenants a and b, of weights 2 and 1, ask for at once: more than they can get."""
    slo = CHAT if request_class is RequestClass.REAL_TIME else Slo()
    fields: dict[str, Any] = {"request_class": request_class, "slo": slo}
    return [
        timed(place * 0.001, 40, 20 + place * 7 % 20, class_name=name, tenant=name, weight=weight, **fields)
        for place in range(num_requests)
        for name, weight in (("a", 2.0), ("b", 1.0))
    ]


def chats(rate: float, until_s: float, *, prompt_len: int = 40, seed: int = 5) -> list[TimedRequest]:
    """Return the chats of a tenant c, as a Poisson process from the fifth second on."""
    rng, now, requests = random.Random(seed), 5.0, []
    while (now := now + rng.expovariate(rate)) < until_s:
        requests.append(timed(now, prompt_len, 30, class_name="c", tenant="c", slo=CHAT))
    return requests


class TenantTokens:
    """Tokens by second and tenant."""

    def __init__(self) -> None:
        self._by_second: dict[int, Counter[str]] = {}

    def run(self, config: SimConfig, workload: Workload) -> SimulationResult:
        """Simulate, and count."""
        simulation = Simulation(config, workload)
        gateway, network, queue = simulation._gateway, simulation._network, simulation._event_queue

        def emitted(message: TokensEmitted) -> None:
            second = self._by_second.setdefault(int(queue.now), Counter())
            for delta in message.deltas:
                if (sent := gateway._open.get(delta.request_id)) is not None:
                    second[sent.timed.tenant] += len(delta.token_ids)
            gateway.emitted(message)

        network.to_gateway = emitted
        return simulation.run()

    def windows(self, first_s: int, last_s: int, length_s: int = 10) -> Iterator[Counter[str]]:
        """Yield the tokens of every window of so many seconds within these."""
        for start in range(first_s, last_s - length_s + 1):
            yield sum((self._by_second.get(second, Counter()) for second in range(start, start + length_s)), Counter())

    def ratios(self, first_s: int, last_s: int) -> list[float]:
        """Return the tokens of a by those of b, of every window of ten seconds within these."""
        return [window["a"] / max(window["b"], 1) for window in self.windows(first_s, last_s)]

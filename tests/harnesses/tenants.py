"""Counts the tokens that tenants of a simulation receive, by window of time."""

from collections import Counter
from collections.abc import Iterator

from alignedserve.messages.gateways import TokensEmitted
from alignedserve.sim.config import SimConfig
from alignedserve.sim.result import SimulationResult
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import Workload


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

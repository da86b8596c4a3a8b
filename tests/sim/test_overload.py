"""More chats than a cluster can serve, simulated: those that are accepted do not wait until their clients have gone."""

import random
from dataclasses import replace

import msgspec
import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.request import Slo
from lab.sim.result import ALL, ClassResult
from lab.sim.simulation import Simulation
from tests.harnesses.simulation import colocated, timed, workload_of
from tests.sim.test_chat_beside_documents import TOPOLOGIES, with_policy
from tests.support.marks import slow

LONGEST_S = 8.0
PATIENCE_S = LONGEST_S / 0.75  # after which gateways give up


def _chats(name: str, rate: float) -> ClassResult:
    """Simulate so many chats a second for 20 s."""
    rng = random.Random(5)
    requests, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < 20.0:
        requests.append(timed(now, rng.randrange(100, 300), 12, slo=Slo(ttft_s=0.6, tpot_s=0.2)))
    config = replace(with_policy(TOPOLOGIES[name]), duration_s=120.0)
    router = msgspec.structs.replace(config.cluster.router, max_real_time_wait_s=LONGEST_S)
    config = replace(config, cluster=msgspec.structs.replace(config.cluster, router=router))
    return Simulation(config, workload_of(*requests)).run().classes[ALL]


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if "pool" not in name])
def test_in_an_overload_of_several_times_accepted_chats_have_a_token_before_their_clients_go(name: str) -> None:
    """Without refusals the last one waits for 49 to 113 s, and on separate workers next to none is in time."""
    chats = _chats(name, 20.0)
    assert chats.ttft_s is not None
    assert chats.attainment is not None
    assert chats.ttft_s.distribution.max <= PATIENCE_S
    num_completed = chats.num_by_ending["completed"]
    assert num_completed + chats.num_by_ending["rejected"] == chats.num_sent
    assert chats.attainment * chats.num_sent >= 0.3 * num_completed


def test_nobody_is_refused_where_all_can_be_served() -> None:
    assert _chats("elastic", 4.0).num_by_ending["rejected"] == 0


@pytest.mark.parametrize("seed", [5, *slow(6)])
def test_chats_that_missed_their_first_token_wait_a_few_times_as_long_as_others(seed: int) -> None:
    """While others passed in one to two seconds, three of them waited up to 30 and 35 s in the router's queue."""
    rng, requests, now = random.Random(seed), [], 0.0
    while (now := now + rng.uniform(0.5, 1.5) / 3.7) < 70.0:
        requests.append(timed(now, rng.randrange(100, 300), 12, slo=Slo(ttft_s=3.0, tpot_s=0.3)))
    tight = {"class_name": "late", "slo": Slo(ttft_s=0.1, tpot_s=0.3)}
    requests += [timed(30.0 + 0.01 * number, 200, 12, **tight) for number in range(3)]
    config = replace(with_policy(colocated(1, topology=Topology.ELASTIC, max_running_requests=4)), duration_s=120.0)
    decode = msgspec.structs.replace(config.cluster.decode, max_waiting_requests=0)  # all wait in the router
    config = replace(config, cluster=msgspec.structs.replace(config.cluster, decode=decode))
    classes = Simulation(config, workload_of(*sorted(requests, key=lambda timed: timed.arrival_s))).run().classes
    late, chat = classes["late"].ttft_s, classes["chat"]
    assert late is not None
    assert (chat.num_sent, chat.attainment) == (chat.num_by_ending["completed"], 1.0)
    assert late.distribution.p50 <= 6.0
    assert late.distribution.max <= 12.0

"""The simulated engine's account of caches that leave in parts, and workers on the same cores."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.config.sections import ClusterConfig, RouterConfig, SchedulingConfig, Topology
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, Slo
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel, Sample
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration, Swap, Swaps
from alignedserve.scheduling.policies import all_policies
from alignedserve.scheduling.policy import DeviceMemory, Mechanism
from lab.costmodel.choice import WorkerSpec
from lab.sim.config import SimConfig, SimMechanisms, Slowdowns
from lab.sim.copies import SharedCores
from lab.sim.engine import SimulatedAnswer, SimulatedEngine
from lab.sim.event_queue import EventQueue
from lab.sim.policies import ClusterHardware, as_predicted_for, mechanisms_for, simulated_policy, with_policy
from lab.sim.records import SimulatedRequest
from lab.sim.result import SimulationResult
from lab.sim.simulation import MissWatch, Simulation
from lab.sim.sweep import WorkloadLine
from lab.workload.requests import ClosedLoop, ClosedLoopRun, TimedRequest
from tests.harnesses.scheduling import EasyCosts, request_of
from tests.harnesses.simulation import LINKS, MESSAGE_S, colocated, timed, workload_of
from tests.support.costs import decodes, prefill
from tests.support.marks import each

ONE, OTHER = RequestId("one"), RequestId("other")
MEMORY = DeviceMemory(100, 100, 16, num_free_host=1000)


def _added(request: Request, *block_ids: int, num_cached: int = 0) -> Addition:
    return Addition(request, (), tuple(map(BlockId, block_ids)), num_cached)


def _out(*block_ids: int) -> Swaps:
    return Swaps((), (Swap(ONE, 16 * len(block_ids), tuple(map(BlockId, block_ids))),), ())


def test_a_cache_leaves_in_two_parts_and_comes_back_as_one() -> None:
    engine = SimulatedEngine(
        EasyCosts(), {ONE: SimulatedAnswer(9), OTHER: SimulatedAnswer(9)}, MEMORY, keeps_timeline=False
    )
    one, other = request_of("one", {"prompt_len": 48}), request_of("other", {"prompt_len": 16})
    engine.begin(RunIteration((), (_added(one, 0, 1, 2),), (), ((ONE, 32),)), 0.0)
    engine.begin(RunIteration((ONE,), (_added(other, 2),), (), ((OTHER, 16),), _out(2)), 1.0)
    engine.begin(RunIteration((), (), (), ((OTHER, 1),), _out(1)), 2.0)
    back = Swaps((), (), (Swap(ONE, 32, tuple(map(BlockId, (0, 3, 4)))),))
    last = engine.begin(RunIteration((), (_added(one, 0, 3, 4, num_cached=32),), (), ((ONE, 16),), back), 3.0)
    assert [token.request_id for token in last.sampled] == [ONE]


def test_rows_under_a_grammar_cost_what_the_model_says_of_them() -> None:
    costs = LinearIterationModel(LinearCoefficients(base_s=1.0, constrained_s=0.25))
    engine = SimulatedEngine(costs, {ONE: SimulatedAnswer(9), OTHER: SimulatedAnswer(9)}, MEMORY, keeps_timeline=False)
    one, other = request_of("one", {"prompt_len": 16, "grammar": "g"}), request_of("other", {"prompt_len": 16})
    added = (_added(one, 0, 1), _added(other, 2, 3))
    both = ((ONE, 16), (OTHER, 16))
    assert engine.begin(RunIteration((), added, (), both), 0.0).duration_s == 1.25
    assert engine.begin(RunIteration((), (), (), ((ONE, 1), (OTHER, 1))), 2.0).duration_s == 1.25
    assert engine.begin(RunIteration((), (), (), ((OTHER, 1),)), 4.0).duration_s == 1.0


def ends(slowdown: float | Slowdowns, jobs: list[tuple[float, float]], prompts: tuple[int, ...] = ()) -> list[float]:
    """Return the times at which jobs (begin, duration alone) end. `prompts`: the numbers of those that have one."""
    event_queue = EventQueue()
    cores = SharedCores(event_queue, slowdown if isinstance(slowdown, Slowdowns) else Slowdowns.alike(slowdown))
    ended = [0.0] * len(jobs)

    def begin(number: int) -> None:
        cores.begin(jobs[number][1], number in prompts, lambda: ended.__setitem__(number, round(event_queue.now, 6)))

    for number, (time_s, _) in enumerate(jobs):
        event_queue.at(time_s, begin, number)
    event_queue.run()
    return ended


def test_alone_nothing_is_slower() -> None:
    assert ends(1.0, [(0.0, 2.0), (2.0, 1.0)]) == [2.0, 3.0]


def test_two_at_a_time_take_twice_as_long() -> None:
    assert ends(1.0, [(0.0, 2.0), (0.0, 2.0)]) == [4.0, 4.0]


def test_only_while_they_overlap() -> None:
    """The short one needs 2 s for its 1 s; the long one has done 1 + 1 of its 4 s by then."""
    assert ends(1.0, [(0.0, 4.0), (1.0, 1.0)]) == [5.0, 3.0]


def test_three_at_a_time() -> None:
    """At 1 / (1 + 0.5 * 2) = 1/2 of the speed, then at 2/3."""
    assert ends(0.5, [(0.0, 1.0), (0.0, 2.0), (0.0, 2.0)]) == [2.0, 3.5, 3.5]


def test_prompts_and_decodes_slow_each_other_by_their_own_shares() -> None:
    """The prompt runs at half of its speed, 1 s of 2 until the decode ends; that runs at 1 / 1.25."""
    slowdowns = Slowdowns(decodes_by_prompts=0.25, prompts_by_decodes=1.0)
    assert ends(slowdowns, [(0.0, 2.0), (0.0, 1.6)], prompts=(0,)) == [3.0, 2.0]
    assert ends(slowdowns, [(0.0, 2.0), (0.0, 1.6)], prompts=(0, 1)) == [2.0, 1.6]


# Simulations that are abandoned, or have nothing left to be found out.

TIGHT = "rt: prompt=200, output=uniform(20,60), rate=40, ttft=0.5, tpot=0.02"
BESIDE = "be: prompt=200, output=400, outstanding=4"


def _open(slo: Slo, *times_s: float, output_len: int = 11) -> SimulatedRequest:
    timed = TimedRequest(0.0, 100, output_len, None, "rt", slo=slo)
    return SimulatedRequest(0, timed, 1.0, array("d", times_s))


@each(
    ("request_", "late_from_s"),
    [
        (_open(Slo(ttft_s=0.5)), 1.5),
        (_open(Slo(ttft_s=0.5, tpot_s=0.1), 1.25), 2.25),  # ten gaps
        (_open(Slo(deadline_s=3.0), 1.25), 4.0),
    ],
)
def test_an_open_request_is_late_once_it_can_no_longer_meet_an_objective(
    request_: SimulatedRequest, late_from_s: float
) -> None:
    watch = MissWatch({"rt": 0})
    assert not watch.is_over([], [request_], late_from_s - 0.01)
    assert not watch.is_settled([request_], late_from_s - 0.01)
    assert watch.is_over([], [request_], late_from_s + 0.01)
    assert watch.is_settled([request_], late_from_s + 0.01)


def test_a_late_first_token_settles_a_request_and_other_classes_do_not_count() -> None:
    late = _open(Slo(ttft_s=0.5, tpot_s=0.1), 1.75)
    assert MissWatch({"rt": 0}).is_over([], [late], 1.8)
    assert not MissWatch({"be": 0}).is_over([], [late], 1.8)
    assert MissWatch({"be": 0}).is_settled([_open(Slo())], 1.8)
    assert not MissWatch({"rt": 0}).is_settled([_open(Slo())], 1.8)


def _run(line: str, config: SimConfig) -> SimulationResult:
    return Simulation(config, WorkloadLine(line, seed=1, duration_s=2.0).build()).run()


def test_a_settled_run_attains_what_the_whole_one_does_and_is_shorter() -> None:
    whole = _run(f"{TIGHT}; {BESIDE}", colocated())
    settled = _run(f"{TIGHT}; {BESIDE}", replace(colocated(), miss_limits={"rt": 10**6}, ends_when_settled=True))
    assert not settled.is_abandoned
    assert settled.duration_s < whole.duration_s
    assert settled.classes["rt"].attainment == whole.classes["rt"].attainment
    for name in ("rt", "be", "all"):
        assert settled.classes[name].loaded_tokens_per_s == whole.classes[name].loaded_tokens_per_s
    assert whole.classes["be"].loaded_tokens_per_s


def test_a_run_with_more_misses_than_its_limit_is_abandoned_before_its_end() -> None:
    whole = _run(TIGHT, colocated())
    missed = round((1.0 - (whole.classes["rt"].attainment or 0.0)) * whole.classes["rt"].num_sent)
    assert missed > 5
    abandoned = _run(TIGHT, replace(colocated(), miss_limits={"rt": 5}))
    assert abandoned.is_abandoned
    assert abandoned.duration_s < whole.duration_s
    assert not _run(TIGHT, replace(colocated(), miss_limits={"rt": missed})).is_abandoned


# The simulated cluster of a named policy.


def mechanisms(policy: str, hidden_ratio: float = 0.5, **settings: object) -> SimMechanisms:
    return mechanisms_for(SchedulingConfig(policy=policy, policy_params=settings), hidden_ratio=hidden_ratio)


def test_the_topology_is_the_policys_own_unless_another_is_asked_for() -> None:
    assert with_policy(ClusterConfig(), "aligned_slo").topology is Topology.ELASTIC
    assert with_policy(ClusterConfig(), "aligned").topology is Topology.DISAGGREGATED
    assert with_policy(ClusterConfig(), "sarathi").topology is Topology.COLOCATED
    assert with_policy(ClusterConfig(), "fcfs", topology=Topology.DISAGGREGATED).topology is Topology.DISAGGREGATED


def test_order_and_batches_come_with_the_policy() -> None:
    cluster = with_policy(ClusterConfig(), "aligned_slo")
    assert (cluster.router.prefill_order, cluster.batching.policy) == ("least_slack", "density_first")
    cluster = with_policy(ClusterConfig(), "fcfs")
    assert (cluster.router.prefill_order, cluster.batching.policy) == ("fcfs", "fcfs")


def test_what_the_user_sets_stays() -> None:
    mine = ClusterConfig(router=RouterConfig(prefill_order="least_slack"))
    assert with_policy(mine, "fcfs").router.prefill_order == "least_slack"


@each(
    ("name", "settings", "topology", "message"),
    [
        ("nonesuch", {}, None, "unknown policy 'nonesuch'; known: .*sarathi"),
        ("alise", {"levels": 3}, None, "no parameter 'levels'; known: num_levels"),
        ("alise", {"num_levels": 0}, None, "alise.*num_levels"),
        ("orca", {}, Topology.DISAGGREGATED, "policy 'orca' is for colocated or elastic workers"),
        ("aligned", {}, Topology.ELASTIC, "policy 'aligned' is for disaggregated workers; set topology=disaggregated"),
    ],
)
def test_what_cannot_be_is_said(
    name: str, settings: dict[str, object], topology: Topology | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_policy(ClusterConfig(), name, settings, topology=topology)


def test_the_engine_has_what_the_policy_wants() -> None:
    assert mechanisms("fcfs") == SimMechanisms()
    assert mechanisms("bros") == SimMechanisms(has_shared_blocks=True)
    assert mechanisms("apt_serve") == SimMechanisms(hidden_ratio=0.5)
    assert mechanisms("apt_serve", hybrid_cache=False) == SimMechanisms()


def test_there_is_no_hidden_cache_that_is_larger_than_keys_and_values() -> None:
    assert mechanisms("apt_serve", hidden_ratio=2.0) == SimMechanisms()


def test_host_memory_is_for_those_that_swap() -> None:
    machines = ClusterHardware(WorkerSpec("opt-13b", "a100-80g"))
    by_policy = {
        name: simulated_policy(machines, with_policy(ClusterConfig(), name)).decode_memory.num_free_host > 0
        for name in all_policies()
    }
    assert by_policy == {name: Mechanism.SWAP in entry.uses for name, entry in all_policies().items()}


def test_policies_that_must_know_lengths_get_them() -> None:
    loop = ClosedLoop("loop", 1, False, [timed(output_len=9)])
    workload = workload_of(timed(output_len=7, max_tokens=50), closed_loops=(loop,), max_closed=1)
    assert as_predicted_for(SchedulingConfig(policy="fcfs"), workload) is workload
    known = as_predicted_for(SchedulingConfig(policy="oracle"), workload)
    assert [one.predicted_len for one in known.requests] == [7]
    assert known.closed_loops[0].stream[0].predicted_len == 9


# Simulations of a recorded machine: its messages, its clients, and what its workers know.

PREFILL_S = 0.010 + 0.001 * 40


def ttfts_of(config: SimConfig) -> list[float]:
    """Return the first tokens of requests that never meet."""
    simulation = Simulation(config, workload_of(*(timed(float(number)) for number in range(12))))
    simulation.run()
    return [record.ttft_s for record in simulation.records() if record.ttft_s is not None]


def test_tokens_may_count_when_they_leave_the_worker() -> None:
    for found in ttfts_of(replace(colocated(), links=replace(LINKS, token_s=0.0))):
        assert found == pytest.approx(2 * MESSAGE_S + PREFILL_S)


def test_each_request_takes_one_of_the_recorded_times_to_the_router() -> None:
    config = replace(colocated(), links=replace(LINKS, submit_times_s=(0.02, 0.03)))
    beside = {round(found - 2 * MESSAGE_S - PREFILL_S, 6) for found in ttfts_of(config)}
    assert beside == {0.02, 0.03}
    assert ttfts_of(config) == ttfts_of(config)
    assert ttfts_of(config) != ttfts_of(replace(config, seed=1))


class _Heard:
    """A logic, and the iterations whose end it heard of: what its worker measured, and how long it really took."""

    def __init__(self, logic: Any) -> None:
        self._logic = logic
        self._begun_s = 0.0
        self.iterations: list[tuple[float, float]] = []

    def on_event(self, event: Any, now: float) -> Any:
        if isinstance(event, IterationCompleted):
            self.iterations.append((event.duration_s(0.0, now), now - self._begun_s))
            self._begun_s = now
        commands = self._logic.on_event(event, now)
        if any(type(command).__name__ == "RunIteration" for command in commands):
            self._begun_s = now
        return commands


@each("slowdown", [0.0, 0.5])
def test_policies_learn_what_the_engine_measures(slowdown: float) -> None:
    unmeasured = LinearIterationModel(LinearCoefficients(base_s=0.002, decode_s=0.001))
    config = replace(colocated(), unmeasured_costs=unmeasured, slowdowns=Slowdowns.alike(slowdown))
    simulation = Simulation(config, workload_of(timed()))
    worker = simulation._workers["worker-0"].component
    worker.logic = heard = _Heard(worker.logic)
    simulation.run()
    beside = [pytest.approx(0.002), pytest.approx(0.003), pytest.approx(0.003)]
    assert [took_s - measured_s for measured_s, took_s in heard.iterations] == beside
    assert heard.iterations[0][1] == pytest.approx(PREFILL_S)


def test_a_worker_knows_what_it_measured_before_it_served() -> None:
    measured = tuple(Sample(work, 0.5) for work in (prefill(16), prefill(256), decodes(4, 100), decodes(32, 100)))
    simulation = Simulation(replace(colocated(), measured={"worker-0": measured}), workload_of(timed()))
    logic: Any = simulation.logics()["worker-0"]
    assert logic._scheduler.costs.iteration_s(prefill(100)) == pytest.approx(0.5, rel=0.2)


def test_a_client_pauses_before_its_next_request() -> None:
    class Endless:
        def __getitem__(self, number: int) -> Any:
            return timed(class_name="loop")

    loop = ClosedLoop("loop", 1, is_wave=False, stream=Endless(), think_s=0.25)
    workload = workload_of(closed_loops=(loop,), max_closed=3)
    run = ClosedLoopRun(workload)
    assert [one.arrival_s for one in run.first()] == [0.0]
    assert [one.arrival_s for one in run.next_after("loop", 2.0)] == [2.25]
    simulation = Simulation(colocated(), workload)
    simulation.run()
    first, second, third = simulation.records()
    assert second.arrival_s - first.ended_s == pytest.approx(0.25)
    assert third.arrival_s - second.ended_s == pytest.approx(0.25)

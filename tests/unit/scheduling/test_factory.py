"""Schedulers built from the configuration, and the topology that it chooses."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    PrefillWorkerConfig,
    RouterConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.config.unset_sizes import from_mapping, with_fixed_sizes
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.online import OnlineIterationModel
from alignedserve.scheduling import policies
from alignedserve.scheduling.factory import (
    check_yielding,
    make_decode_scheduler,
    make_iteration_scheduler,
    make_scheduler,
    make_yielding,
    measured_speed,
    params_of,
    require_effect,
    resolve_policy,
    topology_of,
    with_yielding,
)
from alignedserve.scheduling.iteration_scheduler import FcfsIterationScheduler, PolicyIterationScheduler
from alignedserve.scheduling.policies import POLICIES, PolicyEntry, all_policies, policy_entry
from alignedserve.scheduling.policy import IterationLimits, Mechanism
from alignedserve.scheduling.scheduler import Scheduler
from lab import policies as baselines
from lab.policies.round_robin import RoundRobin
from tests.harnesses.scheduling import EasyCosts
from tests.support.costs import decodes, prefill
from tests.support.marks import each

STOPPING = SchedulingConfig(yield_between_layers=True)
NOT_STOPPING = SchedulingConfig(yield_between_layers=False)
ROOT = Path(__file__).parents[3]
LIMITS = IterationLimits(max_running_requests=4, max_tokens=10)


def test_known_costs_are_not_learned() -> None:
    costs = EasyCosts()
    scheduler = make_scheduler(SchedulingConfig(policy="round_robin"), LIMITS, costs)
    assert isinstance(scheduler.policy, RoundRobin)
    assert (scheduler.costs, scheduler.learner, scheduler.limits) == (costs, None, LIMITS)


def test_unknown_costs_are_learned_from_what_runs() -> None:
    scheduler = make_scheduler(SchedulingConfig(), LIMITS)
    assert isinstance(scheduler.learner, OnlineIterationModel)
    assert scheduler.costs is scheduler.learner


def test_workers_share_neither_policy_nor_costs() -> None:
    one, other = (make_scheduler(SchedulingConfig(), LIMITS) for _ in range(2))
    assert one.policy is not other.policy
    assert one.costs is not other.costs


@each(
    ("scheduling", "message"),
    [
        (SchedulingConfig(policy="lifo"), "lifo"),
        (SchedulingConfig(policy="fcfs", policy_params={"colour": "red"}), "colour"),
    ],
)
def test_what_does_not_exist_is_named(scheduling: SchedulingConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(scheduling, LIMITS)
    with pytest.raises(ConfigError, match=message):
        resolve_policy(ClusterConfig(scheduling=scheduling))


def test_the_speed_is_that_of_the_shortest_iterations_and_no_extrapolation() -> None:
    """As six starts beside a busy process measured a prompt of 16 tokens, and some longer ones."""
    for slow_s in (0.08, 0.39, 1.24, 5.1):
        measured = [Sample(prefill(16), slow_s), Sample(decodes(1, 64), 0.2), Sample(decodes(8, 64), 0.1)]
        measured += [Sample(prefill(512), seconds) for seconds in (0.8, 0.15, 2.8)]
        measured += [Sample(prefill(16), 0.009), Sample(decodes(8, 64), 0.01)]
        speed = measured_speed(LIMITS, None, measured, max_context_len=8192)
        assert speed is not None
        assert (speed.prompt_s, speed.shared_token_s) == pytest.approx((0.3, 0.01))
    assert measured_speed(LIMITS, None, [], max_context_len=8192) is None


def test_a_policy_that_paces_decides_on_both_kinds_of_workers() -> None:
    paced = SchedulingConfig(policy="round_robin")
    assert isinstance(make_iteration_scheduler(paced, LIMITS), PolicyIterationScheduler)
    scheduler = make_decode_scheduler(paced, LIMITS)
    assert isinstance(scheduler, Scheduler)
    assert not scheduler.computes_prompts


def test_without_pacing_prompts_go_in_order_and_decodes_all_together() -> None:
    other = SchedulingConfig(policy="aligned")
    assert isinstance(make_iteration_scheduler(other, LIMITS), FcfsIterationScheduler)
    assert make_decode_scheduler(other, LIMITS) is None


def test_documents_have_the_floor_of_the_policy_where_jobs_get_places() -> None:
    paced = SchedulingConfig(policy="aligned_slo", policy_params={"best_effort_floor": 0.1})
    assert make_iteration_scheduler(paced, LIMITS).best_effort_floor == 0.1
    assert make_iteration_scheduler(SchedulingConfig(policy="round_robin"), LIMITS).best_effort_floor == 0.0


def test_what_a_policy_implies_is_set() -> None:
    resolved = resolve_policy(ClusterConfig(scheduling=SchedulingConfig(policy="distserve")))
    assert (resolved.router.prefill_order, resolved.router.direct_handoff) == ("fcfs", True)
    assert resolved.batching.policy == "fcfs"


def test_prompts_that_wait_for_slack_go_by_class() -> None:
    def order(**params: float | None) -> str | None:
        scheduling = SchedulingConfig(policy="aligned", policy_params=params)
        return resolve_policy(ClusterConfig(scheduling=scheduling)).router.prefill_order

    assert order() == "fcfs_classed"
    assert order(pack_share=None) == "fcfs"  # the paper's


def test_what_is_set_explicitly_stays() -> None:
    config = ClusterConfig(
        topology=Topology.DISAGGREGATED,
        scheduling=SchedulingConfig(policy="distserve"),
        router=RouterConfig(prefill_order="least_slack", direct_handoff=False),
        batching=BatchingConfig(policy="density_first", best_effort_floor=0.1),
    )
    assert resolve_policy(config) == config


@each("order,floor", [("least_slack", 0.2), ("fcfs", None)])
def test_batches_know_classes_where_the_order_of_prompts_does(order: str, floor: float | None) -> None:
    router = RouterConfig(prefill_order=order, best_effort_floor=0.2)
    config = ClusterConfig(topology=Topology.DISAGGREGATED, router=router)
    assert resolve_policy(config).batching.best_effort_floor == floor


def test_elastic_workers_form_no_batches() -> None:
    assert resolve_policy(ClusterConfig()).batching.best_effort_floor is None


@each("floor", [-0.01, 0.51, float("nan")])
def test_a_floor_out_of_range_is_refused(floor: float) -> None:
    with pytest.raises(ConfigError, match=r"best_effort_floor must be at least 0 and at most 0\.5"):
        BatchingConfig(best_effort_floor=floor)
    with pytest.raises(ConfigError, match=r"best_effort_floor must be at least 0 and at most 0\.5"):
        RouterConfig(best_effort_floor=floor)


def test_passes_that_stop_leave_documents_the_share_of_the_router() -> None:
    config = ClusterConfig(router=RouterConfig(best_effort_floor=0.2), scheduling=STOPPING)
    assert resolve_policy(config).scheduling.best_effort_floor == 0.2
    assert resolve_policy(ClusterConfig(scheduling=NOT_STOPPING)).scheduling.best_effort_floor is None


@each(
    ("scheduling", "can_stop", "decodes_here", "stops"),
    [
        (SchedulingConfig(), True, True, True),
        (SchedulingConfig(), False, True, False),
        (NOT_STOPPING, True, True, False),
        (STOPPING, False, True, True),  # which is refused, or simulated
        (SchedulingConfig(policy="sarathi_classed"), True, True, False),
        (SchedulingConfig(interference=1.1), True, True, False),
        (SchedulingConfig(interference=1.1), True, False, True),
    ],
)
def test_passes_stop_by_default_where_the_engine_can_and_the_policy_wants(
    scheduling: SchedulingConfig, can_stop: bool, decodes_here: bool, stops: bool
) -> None:
    settled = with_yielding(scheduling, can_stop=can_stop, decodes_here=decodes_here)
    assert settled.yield_between_layers is stops
    assert (make_yielding(settled, 12) is not None) is stops


@each(
    ("scheduling", "topology", "message"),
    [
        (
            SchedulingConfig(policy="bros", yield_between_layers=True),
            Topology.COLOCATED,
            "'bros', which uses shared_bl",
        ),
        (
            SchedulingConfig(policy="aligned", yield_between_layers=True),
            Topology.DISAGGREGATED,
            "no effect with policy",
        ),
        (
            SchedulingConfig(best_effort_floor=0.1, yield_between_layers=False),
            Topology.ELASTIC,
            "no effect without scheduling.yield_between_layers",
        ),
    ],
)
def test_passes_do_not_stop_where_the_policy_excludes_it(
    scheduling: SchedulingConfig, topology: Topology, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_yielding(scheduling, topology, frozenset(Mechanism))
    check_yielding(STOPPING, topology, frozenset({Mechanism.SWAP}))


def test_settings_of_the_batching_section_go_there() -> None:
    config = ClusterConfig(scheduling=SchedulingConfig(policy="aligned", policy_params={"min_requests": 7}))
    resolved = resolve_policy(config)
    assert (resolved.batching.policy, resolved.batching.min_requests) == ("density_first", 7)
    assert resolved.batching.starvation_s == config.batching.starvation_s


def test_to_resolve_twice_changes_nothing() -> None:
    once = resolve_policy(ClusterConfig())
    assert resolve_policy(once) == once


def of(**sections: Any) -> Topology:
    return topology_of(from_mapping(sections))


def test_unset_it_is_the_policys_own_and_elastic_for_the_default_one() -> None:
    assert of() is topology_of(ClusterConfig()) is Topology.ELASTIC
    for name, entry in all_policies().items():
        assert of(scheduling={"policy": name}) is entry.topologies[0]
    assert of(scheduling={"policy": "aligned"}) is Topology.DISAGGREGATED
    assert of(scheduling={"policy": "sarathi"}) is Topology.COLOCATED
    with pytest.raises(ConfigError, match="unknown policy 'lifo'"):
        of(scheduling={"policy": "lifo"})


@each("topology", Topology)
def test_what_is_set_is_taken(topology: Topology) -> None:
    assert of(topology=topology.value, prefill={"count": 2}, decode={"count": 2}) is topology


@each(
    "sections",
    [
        {"prefill": {"count": 2}, "decode": {"count": 2}},
        {"prefill": {"count": 1}},  # the default, but asked for
        {"pool": {"memory_bytes": 1 << 28}},
        {"pool": {"lease_s": 5.0}},
        {"prefill": {"max_num_batched_tokens": 64}},
        {"batching": {"policy": "density_first"}},
    ],
)
def test_settings_of_separate_workers_ask_for_such(sections: dict[str, Any]) -> None:
    assert of(**sections) is Topology.DISAGGREGATED
    require_effect(from_mapping(sections))
    assert of(**sections, scheduling={"policy": "alise"}) is Topology.DISAGGREGATED
    for policy in ("sarathi", "orca"):  # which know no separate workers
        config = from_mapping({**sections, "scheduling": {"policy": policy}})
        assert topology_of(config) is Topology.COLOCATED
        with pytest.raises(
            ConfigError, match=rf"has no effect in colocated workers.*policy '{policy}' has no separate"
        ):
            require_effect(config)


def test_settings_of_the_workers_themselves_and_what_is_lent_do_not() -> None:
    lent = {"prefill": {"candidate_buffer_bytes": 0}, "decode": {"count": 3, "kv_cache_bytes": 1 << 30}}
    assert of(**lent) is Topology.ELASTIC
    require_effect(from_mapping(lent))
    require_effect(from_mapping({"prefill": {"count": None}, "pool": {"memory_bytes": None}, "topology": "elastic"}))


@each(
    ("topology", "sections", "field"),
    [
        ("elastic", {"prefill": {"count": 1}}, r"prefill\.count"),
        ("elastic", {"pool": {"memory_bytes": 1 << 28}}, r"pool\.memory_bytes"),
        ("elastic", {"batching": {"min_requests": 3}}, r"batching\.min_requests"),
        ("colocated", {"prefill": {"candidate_buffer_bytes": 1}}, r"prefill\.candidate_buffer_bytes"),
    ],
)
def test_what_has_no_effect_is_refused(topology: str, sections: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} has no effect in {topology} .* or set topology=disaggregated$"):
        require_effect(from_mapping({"topology": topology, **sections}))
    require_effect(from_mapping({"topology": "disaggregated", **sections}))


@each(
    ("sections", "message"),
    [
        ({"topology": "disaggregated"}, "has no effect in separate workers"),
        ({"scheduling": {"policy": "fcfs"}}, "has no effect with policy 'fcfs'"),
    ],
)
def test_a_pool_for_decodes_is_refused_where_none_waits_there(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"decode.pool_bytes {message}"):
        require_effect(from_mapping({"decode": {"pool_bytes": 1 << 20}, **sections}))
    require_effect(from_mapping({"decode": {"pool_bytes": 1 << 20}}))


def test_what_the_policy_implies_may_be_written_out() -> None:
    own = {"topology": "elastic", "batching": {"policy": "density_first"}}
    require_effect(from_mapping(own))
    with pytest.raises(ConfigError, match=r"batching\.policy has no effect"):
        require_effect(from_mapping({**own, "batching": {"policy": "fcfs"}}))


def test_sizes_that_were_worked_out_ask_for_nothing() -> None:
    fixed = with_fixed_sizes(from_mapping({}))
    assert topology_of(fixed) is Topology.ELASTIC
    assert topology_of(ClusterConfig(prefill=PrefillWorkerConfig(count=2))) is Topology.DISAGGREGATED


def test_slack_is_packed_where_the_policy_or_its_batching_says_so() -> None:
    def share_of(params: dict[str, Any], batching: BatchingConfig | None = None) -> float | None:
        config = ClusterConfig(
            scheduling=SchedulingConfig(policy="aligned", policy_params=params), batching=batching or BatchingConfig()
        )
        return resolve_policy(config).batching.pack_share

    assert share_of({"pack_share": 0.8}) == 0.8
    assert share_of({}, BatchingConfig(pack_share=0.7)) == 0.7
    assert share_of({"pack_share": None}, BatchingConfig(pack_share=0.7)) is None
    with pytest.raises(ConfigError, match="pack_share"):
        share_of({"pack_share": 1.5})
    with pytest.raises(ConfigError, match=r"batching\.pack_share has no effect with policy 'aligned_slo'"):
        resolve_policy(ClusterConfig(batching=BatchingConfig(pack_share=0.9)))


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, PolicyEntry]]:
    """Policies of an installed package, as its entry point gives them."""
    offered: dict[str, PolicyEntry] = {}
    monkeypatch.setattr(
        policies,
        "entry_points",
        lambda *, group: [SimpleNamespace(load=lambda: offered)] if "policies" in group else [],
    )
    all_policies.cache_clear()
    yield offered
    all_policies.cache_clear()


def test_a_package_offers_policies_but_changes_none_of_the_core(offered: dict[str, PolicyEntry]) -> None:
    offered["mine"] = offered["aligned_slo"] = policy_entry("fcfs")
    assert policy_entry("mine") is policy_entry("fcfs")
    assert all_policies() == {**POLICIES, "mine": policy_entry("fcfs")}


def test_without_the_laboratory_an_unknown_policy_names_the_policies_and_the_package(
    offered: dict[str, PolicyEntry],
) -> None:
    known = "accelgen, aligned, aligned_slo, alise, apt_serve, apt_serve_chunked, bros, fcfs"
    with pytest.raises(ConfigError, match=rf"unknown policy 'edf'; known: {known}; pip install alignedserve\[lab\]"):
        policy_entry("edf")
    offered["edf"] = policy_entry("fcfs")
    all_policies.cache_clear()
    assert policy_entry("edf") is policy_entry("fcfs")


def test_the_laboratory_declares_its_policies() -> None:
    declared = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]["entry-points"]
    assert declared["alignedserve.policies"] == {"lab": "lab.policies:POLICIES"}
    assert not set(baselines.POLICIES) & set(POLICIES)


# --- the bound of interference


@each("bound", [0.99, -1.0, 0.0, 10.01, float("nan"), float("inf")])
def test_a_bound_out_of_range_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match=r"scheduling\.interference must be at least 1 and at most 10, or unset"):
        SchedulingConfig(interference=bound)


def test_a_policy_that_knows_no_bound_refuses_it() -> None:
    scheduling = SchedulingConfig(policy="sarathi", interference=1.1)
    with pytest.raises(ConfigError, match=r"scheduling\.interference has no effect with policy 'sarathi'"):
        resolve_policy(ClusterConfig(scheduling=scheduling))


def test_two_bounds_are_refused() -> None:
    scheduling = SchedulingConfig(interference=1.1, policy_params={"interference": 1.2})
    with pytest.raises(ConfigError, match="differ; set one of them"):
        params_of(scheduling)


def test_the_floor_is_that_of_the_router() -> None:
    config = ClusterConfig(scheduling=SchedulingConfig(interference=1.1), router=RouterConfig(best_effort_floor=0.02))
    assert params_of(resolve_policy(config).scheduling) == {"interference": 1.1, "best_effort_floor": 0.02}
    config = ClusterConfig(router=RouterConfig(best_effort_floor=0.02))
    assert params_of(resolve_policy(config).scheduling) == {"best_effort_floor": 0.02}
    assert params_of(resolve_policy(ClusterConfig(scheduling=SchedulingConfig("fastgen"))).scheduling) == {}

"""The bound on interference, against brute force on small workers, and its settings."""

import random
from typing import Any

import pytest

from alignedserve.config.sections import ClusterConfig, RouterConfig, SchedulingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.factory import params_of, resolve_policy
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationPolicy, WorkerView
from tests.harnesses.scheduling import EasyCosts, assert_sound, scheduled_of, view_of
from tests.support.marks import each

COSTS = EasyCosts()
Rows = dict[str, dict[str, Any]]


def policy(bound: float | None, floor: float = 0.0) -> IterationPolicy:
    return make_policy("aligned_slo", {"interference": bound, "best_effort_floor": floor})


def chat(**more: Any) -> dict[str, Any]:
    """Return a chat that has its first token, with time to spare."""
    row = {"prompt_len": 100, "num_generated": 5, "ttft_s": 9.0, "tpot_s": 5.0, "last_token_s": 0.99, **more}
    return row | {"service_s": 0.1}


def documents(lengths: list[int]) -> Rows:
    return {
        f"d{number}": {"be": True, "prompt_len": length, "num_generated": 3, "last_run_s": 0.99, "predicted_len": 50}
        for number, length in enumerate(lengths)
    }


def view(rows: Rows, **worker: Any) -> WorkerView:
    return view_of(rows, now=1.0, costs=COSTS, history=[0.02], **worker)


def seconds(seen: WorkerView, scheduled: dict[str, int]) -> float:
    """Return the time of an iteration, added up by hand."""
    work, table = IterationWork(), seen.table
    for name, num_tokens in scheduled.items():
        row = table.row(RequestId(name))
        if table.num_generated[row] and table.num_remaining[row] == 1:
            work.add_decode(int(table.context_len[row]))
        else:
            work.add_chunk(num_tokens, int(table.num_cached[row]), is_last=True)
    return COSTS.iteration_s(work)


def planned(by: IterationPolicy, seen: WorkerView) -> dict[str, int]:
    plan = by.plan(seen)
    assert_sound(seen, plan)
    return scheduled_of(seen, plan)


@each("seed", range(40))
def test_as_many_documents_decode_as_the_bound_allows(seed: int) -> None:
    """Brute force over all sets: none with more documents is within the bound."""
    rng = random.Random(seed)
    bound = rng.choice([1.0, 1.05, 1.2, 1.5, 2.0])
    chats = {f"c{number}": chat(prompt_len=rng.randrange(10, 300)) for number in range(rng.randint(1, 4))}
    lengths = [rng.randrange(10, 500) for _ in range(rng.randint(1, 8))]
    seen = view(chats | documents(lengths))
    got = planned(policy(bound), seen)
    alone_s = seconds(seen, dict.fromkeys(chats, 1))
    chosen = [name for name in got if name.startswith("d")]
    assert set(chats) <= set(got)
    assert seconds(seen, got) <= bound * alone_s + 1e-12
    shortest_first = sorted(documents(lengths), key=lambda name: lengths[int(name[1:])])
    fitting = [
        count
        for count in range(len(lengths) + 1)
        if seconds(seen, dict.fromkeys([*chats, *shortest_first[:count]], 1)) <= bound * alone_s
    ]
    # The order is that of the predicted time left; a set of the shortest is never smaller by more than one.
    assert max(fitting) - 1 <= len(chosen) <= max(fitting)


def test_the_example_of_the_code() -> None:
    chats = {f"c{number}": chat(prompt_len=145) for number in range(4)}  # 10 + 4 * (1 + 1.5) = 20 ms alone
    rows = chats | documents([17, 17, 17, 17])  # 1.2 ms each
    assert sum(name.startswith("d") for name in planned(policy(1.1), view(rows))) == 1
    assert sum(name.startswith("d") for name in planned(policy(1.2), view(rows))) == 3
    assert sum(name.startswith("d") for name in planned(policy(None), view(rows))) == 4


def test_a_prompt_of_a_document_is_cut_to_the_bound() -> None:
    rows: Rows = {"c": chat(prompt_len=95), "d": {"be": True, "prompt_len": 400}}  # 12 ms alone
    assert planned(policy(1.5), view(rows)) == {"c": 1, "d": 6}


def test_prompts_of_chat_count_as_its_own_part() -> None:
    rows: Rows = {
        "c": chat(prompt_len=95),
        "asked": {"prompt_len": 88, "ttft_s": 0.4, "tpot_s": 5.0, "arrival_s": 0.9},
        "d": {"be": True, "prompt_len": 400},
    }
    got = planned(policy(1.1), view(rows))
    assert got["asked"] > 0
    alone_s = seconds(view(rows), {name: count for name, count in got.items() if name != "d"})
    assert seconds(view(rows), got) <= max(1.1 * alone_s, alone_s)


def test_objectives_stay_constraints() -> None:
    rows = {"c": chat(tpot_s=0.025, last_token_s=1.0, arrival_s=0.9, first_token_s=0.95)} | documents([15] * 30)
    got = planned(policy(10.0), view(rows))
    assert seconds(view(rows), got) <= 0.9 * 0.025


def test_the_first_token_of_a_chat_has_no_gap_to_prolong() -> None:
    rows: Rows = {"asked": {"prompt_len": 20, "ttft_s": 4.0, "arrival_s": 0.9}} | documents([17] * 9)
    assert planned(policy(1.0), view(rows)) == planned(policy(None), view(rows))


def test_documents_before_a_prompt_of_chat_are_shorter_where_gaps_are_bounded() -> None:
    """Chats that come during an iteration are in each other's gaps after it: it takes 0.08 of their TTFT, not 0.2."""
    document = {"be": True, "prompt_len": 9000}
    rows: Rows = {"asked": {"prompt_len": 20, "ttft_s": 2.0, "arrival_s": 0.9}, "d": document}
    shorter_s, longer_s = (seconds(seen, planned(policy(bound), seen)) for bound in (1.0, None) if (seen := view(rows)))
    assert 0.9 * 0.08 * 2.0 < shorter_s <= 0.08 * 2.0
    assert 0.9 * 0.2 * 2.0 < longer_s <= 0.2 * 2.0


def test_documents_have_their_floor_whatever_the_bound() -> None:
    """A twentieth of the time, in units of one token: the iteration alone takes 12 ms, a document 1.2 ms."""
    by, seen = policy(1.0, floor=0.05), view({"c": chat(prompt_len=95)} | documents([17, 17, 17]))
    counts = [len(planned(by, seen)) - 1 for _ in range(1000)]
    assert set(counts) == {0, 1}
    alone_s = seconds(seen, {"c": 1})
    beside_s = seconds(seen, {"c": 1, "d0": 1}) - alone_s
    share = sum(counts) * beside_s / (sum(counts) * beside_s + len(counts) * alone_s)
    assert share == pytest.approx(0.05, rel=0.02)


def test_without_a_floor_and_at_a_bound_of_one_documents_wait() -> None:
    assert planned(policy(1.0), view({"c": chat()} | documents([17, 17]))) == {"c": 1}


def test_a_cache_comes_back_from_the_host_within_the_bound() -> None:
    away = {"be": True, "prompt_len": 140, "num_generated": 3, "num_swapped": 142, "num_blocks": 0}
    rows: Rows = {"c": chat(prompt_len=95), "d": away}  # 14.2 ms to copy, 14.4 ms beside the chat
    worker: dict[str, Any] = {"num_free_host": 1000}
    assert planned(policy(1.1), view(rows, **worker)) == {"c": 1}
    assert planned(policy(1.3), view(rows, **worker)) == {"c": 1, "d": 1}


def test_a_swapped_prompt_comes_back_in_parts() -> None:
    away = {"be": True, "prompt_len": 400, "num_cached": 50, "num_swapped": 50, "num_blocks": 0}
    rows: Rows = {"c": chat(prompt_len=95), "d": away}
    assert planned(policy(1.5), view(rows, num_free_host=1000)) == {"c": 1, "d": 6}


def test_iterations_of_documents_alone_stay_short_where_chat_comes_between_its_tokens() -> None:
    by = policy(1.1)
    newcomer = chat(prompt_len=95) | {"service_s": 0.0}
    planned(by, view({"c": newcomer} | documents([17] * 3)))
    assert seconds(view(documents([17] * 60)), planned(by, view(documents([17] * 60)))) <= 2 * 0.012
    there_all_along = policy(1.1)
    planned(there_all_along, view({"c": chat(prompt_len=95)} | documents([17] * 3)))
    assert len(planned(there_all_along, view(documents([17] * 60)))) == 60


def test_the_plan_tells_the_time_of_the_real_time_part() -> None:
    rows = {"c": chat(prompt_len=95)} | documents([17, 17, 17])
    assert policy(1.2).plan(view(rows)).alone_s == pytest.approx(0.012)
    assert policy(None).plan(view(rows)).alone_s == 0.0


# --- settings


@each("bound", [0.99, -1.0, 0.0, 10.01, float("nan"), float("inf")])
def test_a_bound_out_of_range_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match=r"scheduling\.interference must be at least 1 and at most 10, or unset"):
        SchedulingConfig(interference=bound)
    with pytest.raises(ConfigError, match=r"interference must be at least 1 and at most 10"):
        policy(bound)


def test_a_floor_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"best_effort_floor must be at least 0 and at most 0\.5"):
        policy(1.1, floor=0.6)


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

"""How many tokens may be drafted: as long as they pay by the forecast, and within the objectives of all."""

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams, Slo
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.drafting import DraftLimits
from alignedserve.scheduling.policy import (
    EvictionMode,
    IterationLimits,
    IterationPlan,
    PlannedEviction,
    ScheduledRequest,
)
from alignedserve.scheduling.table import RequestTable

LIMITS = IterationLimits(64, 512)


class Costs:
    """An iteration takes 20 ms and so long for every token."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    def iteration_s(self, work: IterationWork) -> float:
        return 0.02 + self._token_s * work.num_tokens


def decoding(count: int, tpot_s: float | None = None) -> tuple[RequestTable, IterationPlan]:
    """Return a table of requests that all decode, and the plan that computes a token of each."""
    table = RequestTable()
    for number in range(count):
        sampling = SamplingParams(max_tokens=50)
        table.add(Request(RequestId(f"r{number}"), (1,) * 20, sampling, "g", 0.0, slo=Slo(tpot_s=tpot_s)), 0.0)
    table.num_cached[: len(table)] = 20
    table.num_generated[: len(table)] = 1
    table.num_blocks[: len(table)] = 2
    return table, IterationPlan(tuple(ScheduledRequest(row, 1) for row in range(count)))


def allowed(drafting: DraftLimits, count: int, token_s: float, tpot_s: float | None = None) -> int:
    drafts = dict(drafting.allow(*decoding(count, tpot_s), Costs(token_s), LIMITS))  # type: ignore[arg-type]
    assert len(set(drafts.values())) <= 1
    return next(iter(drafts.values()), 0)


def test_one_request_has_drafts_and_many_have_none() -> None:
    counts = [allowed(DraftLimits(), count, token_s=0.001) for count in (1, 4, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 2
    assert counts[-1] == 0


def test_more_are_allowed_of_whom_many_were_right() -> None:
    drafting, seen = DraftLimits(), []
    for _ in range(80):
        seen.append(allowed(drafting, 1, token_s=0.001))
        drafting.note(((RequestId("r0"), 4, 4),))
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    for _ in range(20):
        drafting.note(((RequestId("r0"), 4, 0),))
    assert allowed(drafting, 1, token_s=0.001) <= 1
    assert allowed(drafting, 1, token_s=0.004) == 0


def test_no_gap_is_longer_than_an_objective_allows() -> None:
    assert allowed(DraftLimits(), 2, token_s=0.001, tpot_s=1.0) > 0
    assert allowed(DraftLimits(), 2, token_s=0.001, tpot_s=0.0275) == 1  # 26 ms with two
    assert allowed(DraftLimits(), 2, token_s=0.001, tpot_s=0.024) == 0


def test_only_iterations_of_decodes_alone_have_drafts() -> None:
    table, plan = decoding(2)
    costs, drafting = Costs(0.0001), DraftLimits()
    assert drafting.allow(table, plan, costs, LIMITS)  # type: ignore[arg-type]
    evicting = IterationPlan(plan.scheduled[:1], (PlannedEviction(1, EvictionMode.DROP),))
    table.num_cached[1] = 3
    prompt = IterationPlan((ScheduledRequest(0, 1), ScheduledRequest(1, 18)))
    part = IterationPlan((ScheduledRequest(0, 1), ScheduledRequest(1, 1)))
    for other in (evicting, prompt, part, IterationPlan()):
        assert drafting.allow(table, other, costs, LIMITS) == ()  # type: ignore[arg-type]


def test_requests_that_left_are_forgotten() -> None:
    drafting = DraftLimits()
    for number in range(1000):
        drafting.note(((RequestId(f"old{number}"), 2, 1),))
    drafting.allow(*decoding(1), Costs(0.001), LIMITS)  # type: ignore[arg-type]
    assert len(drafting._shares) == 0
    assert allowed(drafting, 1, 0.001) == allowed(DraftLimits(), 1, 0.001)

"""A worker as a policy sees it, built by hand: one dict per request, and a cost model whose sums are easy."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import (
    DeviceMemory,
    EvictionMode,
    IterationHistory,
    IterationLimits,
    IterationPlan,
    PlannedEviction,
    ScheduledRequest,
    WorkerView,
)
from alignedserve.scheduling.shared_blocks import SharedBlocks
from alignedserve.scheduling.table import RequestTable
from tests.support.shared_slots import SlotModel


@dataclass(frozen=True)
class EasyCosts:
    """Iterations cost a fixed time, one for each token, and one for each token of context that a decode reads."""

    base_s: float = 0.010
    token_s: float = 0.001
    context_s: float = 0.00001
    swap_token_s: float = 0.0001

    def iteration_s(self, work: IterationWork) -> float:
        """See CostModel."""
        compute = self.base_s + self.token_s * work.num_tokens + self.context_s * work.decode_context_len
        return max(compute, self.swap_s(work.swap_in_tokens + work.swap_out_tokens))

    def swap_s(self, num_tokens: float) -> float:
        """See CostModel."""
        return self.swap_token_s * num_tokens


class Step:
    """A plan by request ids: tokens by request, who leaves the device for it, who comes back beside it.

    `depart`, `back`: to and from the pool.
    """

    def __init__(
        self,
        *,
        drop: Sequence[str] = (),
        swap: Sequence[str] = (),
        upload: Sequence[str] = (),
        depart: Sequence[str] = (),
        back: Sequence[str] = (),
        **scheduled: int,
    ) -> None:
        self.scheduled, self.uploads, self.departures, self.returns = scheduled, upload, depart, back
        self.evictions = [*((name, EvictionMode.DROP) for name in drop), *((name, EvictionMode.SWAP) for name in swap)]

    def plan_of(self, table: RequestTable) -> IterationPlan:
        """Return the plan in rows of this table."""
        uploads, departures, returns = (
            tuple(table.row(RequestId(name)) for name in names)
            for names in (self.uploads, self.departures, self.returns)
        )
        return IterationPlan(
            tuple(ScheduledRequest(table.row(RequestId(name)), count) for name, count in self.scheduled.items()),
            tuple(PlannedEviction(table.row(RequestId(name)), how) for name, how in self.evictions),
            uploads,
            departures=departures,
            returns=returns,
        )


@dataclass
class Script:
    """A policy that plans one step after the other, and rests when there is none. Keeps what it was shown last."""

    steps: deque[Step] = field(default_factory=deque)
    view: WorkerView | None = None

    def plan(self, view: WorkerView) -> IterationPlan:
        """See IterationPolicy."""
        self.view = view
        return self.steps.popleft().plan_of(view.table) if self.steps else IterationPlan()


def request_of(request_id: str, fields: Mapping[str, Any]) -> Request:
    """Build a request from the fields of a row; what is not said is as in a real-time request without SLOs."""
    slo = Slo(fields.get("ttft_s"), fields.get("tpot_s"), fields.get("deadline_s"))
    return Request(
        RequestId(request_id),
        (1,) * fields.get("prompt_len", 16),
        SamplingParams(
            max_tokens=fields.get("max_tokens", 100),
            grammar=fields.get("grammar", ""),
            num_prompt_logprobs=fields.get("num_prompt_logprobs"),
        ),
        "gateway",
        fields.get("arrival_s", 0.0),
        RequestClass.BEST_EFFORT if fields.get("be") else RequestClass.REAL_TIME,
        slo,
        fields.get("priority", 0),
    )


_PROGRESS = (
    *("num_generated", "num_cached", "num_swapped", "num_blocks", "is_hidden", "waits_since_s", "first_token_s"),
    *("last_token_s", "last_run_s", "service_s", "predicted_len", "num_preemptions"),
)


def table_of(rows: Mapping[str, Mapping[str, Any]], block_size: int = 16) -> RequestTable:
    """Build a table of rows by request id, in this order. Fields are named as the columns, and `be`.

    A request with generated tokens decodes, its whole cache on the device, unless its row says otherwise.
    """
    table = RequestTable()
    for request_id, fields in rows.items():
        row = table.add(request_of(request_id, fields), fields.get("arrival_s", 0.0))
        decoded = fields.get("num_generated", 0)
        cached = fields.get("num_cached", int(table.prompt_len[row]) + decoded - 1 if decoded else 0)
        on_device = cached - fields.get("num_swapped", 0)
        defaults = {"num_cached": cached, "num_blocks": -(-on_device // block_size)}
        if decoded:
            defaults |= {"first_token_s": fields.get("arrival_s", 0.0), "last_token_s": fields.get("arrival_s", 0.0)}
        for name, value in {**defaults, **{key: fields[key] for key in _PROGRESS if key in fields}}.items():
            getattr(table, name)[row] = value
    return table


def view_of(
    rows: Mapping[str, Mapping[str, Any]],
    *,
    now: float = 0.0,
    num_blocks: int = 1000,
    block_size: int = 16,
    max_running_requests: int = 64,
    max_tokens: int = 512,
    costs: CostModel | None = None,
    history: Iterable[float] = (),
    stretch: float = 1.0,
    can_evict: bool = True,
    **memory: Any,
) -> WorkerView:
    """Build the view of a worker that holds these requests. `history`: the durations of its iterations."""
    table = table_of(rows, block_size)
    past = IterationHistory()
    for duration_s in history:
        past.note(duration_s)
    past.stretch = stretch
    num_free = num_blocks - int(table.num_blocks.sum())
    has_shared_blocks = memory.get("has_shared_blocks", False)
    return WorkerView(
        table,
        DeviceMemory(num_blocks, num_free, block_size, **memory),
        IterationLimits(max_running_requests, max_tokens),
        past,
        costs or EasyCosts(),
        now,
        can_evict,
        SharedBlocks(table, block_size) if has_shared_blocks else None,
    )


def scheduled_of(view: WorkerView, plan: IterationPlan) -> dict[str, int]:
    """Return the tokens by request id, in the plan's order."""
    return {str(view.table.request_ids[share.row]): share.num_tokens for share in plan.scheduled}


def evicted_of(view: WorkerView, plan: IterationPlan) -> list[tuple[str, str]]:
    """Return (request id, how) in the plan's order."""
    return [(str(view.table.request_ids[part.row]), part.how.value) for part in plan.evictions]


def seconds_of(view: WorkerView, tokens: dict[str, int]) -> float:
    """Return the time of an iteration of these tokens by request id."""
    work, table = IterationWork(), view.table
    for name, num_tokens in tokens.items():
        row = table.row(RequestId(name))
        if table.num_generated[row] and table.num_remaining[row] == 1:
            work.add_decode(int(table.context_len[row]))
        else:
            work.add_chunk(num_tokens, int(table.num_cached[row]), is_last=True)
    return view.costs.iteration_s(work)


def blocks_needed(view: WorkerView, part: ScheduledRequest, *, is_evicted: bool = False) -> int:
    """Return the free blocks for the tokens that a request computes and for its cache on the host."""
    table, row = view.table, part.row
    num_cached, num_held = (0, 0) if is_evicted else (int(table.num_cached[row]), int(table.num_blocks[row]))
    is_hidden = part.is_hidden or (bool(table.is_hidden[row]) and not is_evicted)
    return max(view.memory.blocks_for(num_cached + part.num_tokens, is_hidden=is_hidden) - num_held, 0)


def assert_sound(view: WorkerView, plan: IterationPlan, *, is_finished: bool = True) -> None:
    """Assert that a plan keeps within places, tokens, blocks, host memory, and the remaining tokens of each request."""
    table, memory = view.table, view.memory
    rows: Sequence[int] = [share.row for share in plan.scheduled]
    assert len(set(rows)) == len(rows)
    assert len(rows) <= view.limits.max_running_requests
    assert sum(share.num_tokens for share in plan.scheduled) <= view.limits.max_tokens
    evicted = {part.row: part for part in plan.evictions}
    assert len(evicted) == len(plan.evictions)
    assert view.can_evict or not evicted
    num_free, host = memory.num_free, 0
    for part in plan.evictions:
        on_device = int(table.num_cached[part.row] - table.num_swapped[part.row])
        leaving = on_device if part.num_tokens is None else part.num_tokens
        assert 0 < leaving <= on_device
        host += leaving if part.how.value == "swap" else 0
        kept = memory.blocks_for(on_device - leaving, is_hidden=bool(table.is_hidden[part.row]))
        num_free += int(table.num_blocks[part.row]) - (kept if leaving < on_device else 0)
    assert host <= memory.num_free_host
    for share in plan.scheduled:
        is_evicted = share.row in evicted
        left = int(table.context_len[share.row]) - (0 if is_evicted else int(table.num_cached[share.row]))
        assert 0 < share.num_tokens <= left
        num_free -= blocks_needed(view, share, is_evicted=is_evicted)
        # Who has just left does not come back with the same plan, but with a cache of another kind.
        changes_kind = share.is_hidden != bool(table.is_hidden[share.row])
        assert not is_evicted or (changes_kind and evicted[share.row].how is EvictionMode.DROP)
    assert plan.scheduled or not (plan.uploads or plan.evictions) or not is_finished
    assert len(set(plan.uploads)) == len(plan.uploads)
    for row in plan.uploads:
        assert row not in rows
        assert row not in evicted
        assert table.num_swapped[row] > 0
        num_free -= blocks_needed(view, ScheduledRequest(row, 0))
    if memory.has_shared_blocks:
        SlotModel(view).apply(plan)
    else:
        assert num_free >= 0


def decision_of(
    policy: str, rows: Mapping[str, Any], settings: Mapping[str, Any] | None = None, **worker: Any
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return what a policy schedules and evicts on a worker with these rows; the plan is sound."""
    view = view_of(rows, **worker)
    plan = make_policy(policy, settings).plan(view)
    assert_sound(view, plan)
    return scheduled_of(view, plan), evicted_of(view, plan)

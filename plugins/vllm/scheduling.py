"""Our core beside vLLM's queues: a table of its requests, plans of their next step, and costs learned from steps.

Knows vLLM's objects by `names` alone, so that it runs over plain stand-ins. The life of a step:

1. `lay_out` brings the table up to date, asks the policy, and says how vLLM's queues lie for one `schedule`.
2. vLLM computes what it can of that: `scheduled` notes what it really took.
3. `completed` notes how long the step was, and teaches the cost model.

vLLM plans a step while the one before it computes. The table counts the tokens of steps in flight as computed, and a
plan is made for the moment at which the device is free.
"""

import heapq
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alignedserve.core.fair_shares import FairShares, cost_of
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams, Slo
from alignedserve.costmodel.online import OnlineIterationModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies.aligned_slo import AlignedSlo, AlignedSloConfig
from alignedserve.scheduling.policy import (
    DeviceMemory,
    IterationHistory,
    IterationLimits,
    IterationPlan,
    IterationPolicy,
    WorkerView,
)
from alignedserve.scheduling.table import Ints, RequestTable, rows_where
from alignedserve.scheduling.table_operations import note_completed, note_decodes
from plugins.vllm import names
from plugins.vllm.counters import Counters
from plugins.vllm.names import Layout
from plugins.vllm.pieces import Piece, arrange
from plugins.vllm.terms import DEFAULT_SLO, BadTerms, RequestTerms, read_terms

MAX_DOCUMENTS = 512  # with a row; others wait outside, by fair shares, so that a plan stays short
_LEAST_STEP_S = 1e-5
_LATE_PLAN_S = 0.05  # longer steps are planned one by one: a new chat waits for one of them, not for two
_MOST_ALIKE = 15  # steps by one plan, while all decode, nobody comes and nobody leaves
_AHEAD_TOKENS = 2048.0  # by which a tenant's work may be ahead of what is served
_NO_ROWS: tuple[dict[RequestId, int], Ints, Ints] = ({}, *np.zeros((2, 0), np.int64))
_CHATS_S = 30.0  # after the last chat, steps are planned early again


@dataclass(slots=True)
class Tracked:
    """A request of vLLM's with what the table does not keep."""

    request: Any
    terms: RequestTerms
    arrival_s: float  # on the clock of `now`
    tag: float  # where its tenant's work stood when it came (start tags, Goyal et al., SIGCOMM '96); orders documents
    cost: float  # to be charged when it begins; 0: has begun
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step in flight."""

    output: Any
    work: IterationWork
    scheduled_s: float
    predicted_s: float
    first_ids: list[RequestId]  # requests whose first token comes with it


@dataclass(slots=True)
class Planner:
    """The scheduling of one vLLM engine."""

    scheduler: Any
    default_slo: Slo = DEFAULT_SLO
    policy: IterationPolicy = field(default_factory=lambda: AlignedSlo(AlignedSloConfig()))
    costs: OnlineIterationModel = field(default_factory=OnlineIterationModel)
    counters: Counters = field(default_factory=Counters)
    table: RequestTable = field(default_factory=RequestTable)
    history: IterationHistory = field(default_factory=IterationHistory)
    shares: FairShares = field(default_factory=FairShares)
    _waiting_cost: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by tenant, of waiting ones
    _tracked: dict[RequestId, Tracked] = field(default_factory=dict)
    _unready: dict[RequestId, None] = field(default_factory=dict)  # no row: vLLM decides about them
    _backlog: list[tuple[float, RequestId]] = field(default_factory=list)  # documents without a row, a heap by tag
    _num_documents: int = 0  # with a row
    _steps: deque[StepInFlight] = field(default_factory=deque)
    _ended_s: float = 0.0  # the last step
    _num_stuck: int = 0  # steps in a row that computed nothing though there was a plan
    _plan: IterationPlan | None = None
    _chats_until_s: float = -math.inf
    _rows_of: tuple[dict[RequestId, int], Ints, Ints] = field(default_factory=lambda: _NO_ROWS)  # of the last step
    _num_alike: int = 0  # steps that may follow without a plan, as all that is here computes a token

    def lay_out(self, now: float) -> Layout | None:
        """Return how the queues lie for the next step; None: as vLLM has them. May preempt requests by vLLM's means."""
        began_s = time.perf_counter()
        self._sync(now)
        self._plan, pieces = None, list[Piece]()
        if self._num_stuck > 1 or not names.can_plan(self.scheduler):
            self.counters.add("plain_steps")
            return None
        if self._is_early(now):
            return Layout(self.scheduler.running, [], [], 0)
        is_alike = not self._unready and not self.scheduler.waiting and len(self.table) == len(self.scheduler.running)
        if self._num_alike and is_alike:
            self._num_alike -= 1
            return Layout(self.scheduler.running, [], [], len(self.table))
        if len(self.table):
            self._plan = plan = self.policy.plan(self._view(now))
            for eviction in plan.evictions:
                victim = self._tracked[self.table.request_ids[eviction.row]].request
                names.preempt(self.scheduler, victim, now)
            pieces = self._pieces_of(plan)
        layout = self._layout_of(pieces)
        self.counters.add("held_requests", len(layout.held))
        self.counters.add("plan_seconds", time.perf_counter() - began_s)
        return layout

    def _view(self, now: float) -> WorkerView:
        scheduler = self.scheduler
        memory = DeviceMemory(*names.num_blocks(scheduler), scheduler.block_size)
        limits = IterationLimits(scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens)
        return WorkerView(self.table, memory, limits, self.history, self.costs, self._free_at(now))

    def _is_early(self, now: float) -> bool:
        if self._num_documents < len(self.table):
            self._chats_until_s = now + _CHATS_S
        return now < self._chats_until_s and self._free_at(now) - now > _LATE_PLAN_S

    def _free_at(self, now: float) -> float:
        """Return when the device is free: at the predicted end of what is in flight."""
        for step in self._steps:
            now = max(now, max(step.scheduled_s, self._ended_s) + step.predicted_s)
        return now

    def _pieces_of(self, plan: IterationPlan) -> list[Piece]:
        table, tracked = self.table, self._tracked
        remaining, held = table.num_remaining.tolist(), table.num_blocks.tolist()
        has_drafts = self.scheduler.num_spec_tokens > 0
        pieces = []
        for row, num_tokens, *_ in plan.scheduled:
            request = tracked[table.request_ids[row]].request
            if has_drafts and remaining[row] == 1 and held[row]:
                num_tokens = max(names.num_pending(request), 1)
            pieces.append(Piece(request, num_tokens, num_tokens < remaining[row], held[row] > 0))
        return pieces

    def _layout_of(self, pieces: list[Piece]) -> Layout:
        """Lay out the pieces, behind the requests about which vLLM decides alone."""
        unready = [self._tracked[request_id].request for request_id in self._unready]
        first = [request for request in unready if names.is_running(request)]
        blocked = [request for request in unready if not names.is_running(request)]
        holding = self.scheduler.kv_holding_waiting
        behind = {request.request_id for request in holding}
        blocked = [request for request in blocked if request.request_id not in behind]
        # vLLM looks at a waiting request only while tokens are left.
        num_own = sum(names.num_pending(request) for request in first) + len(blocked)
        num_own += sum(max(names.num_pending(request), 1) for request in holding)
        layout = arrange(pieces, self.scheduler.running, first, names.max_loras(self.scheduler))
        return layout._replace(newcomers=[*blocked, *layout.newcomers], num_tokens=layout.num_tokens + num_own)

    def scheduled(self, output: Any, now: float) -> None:
        """Note what vLLM took into the step."""
        table = self.table
        self._forget_rows(output.preempted_req_ids or ())
        if not output.total_num_scheduled_tokens:
            self._num_stuck += self._plan is not None and bool(self._plan.scheduled)
            return
        self._num_stuck = 0
        if output.num_scheduled_tokens != self._rows_of[0]:
            computed = {name: num for name, num in output.num_scheduled_tokens.items() if name in table}
            numbers = [table.row(name) for name in computed], list(computed.values())
            self._rows_of = computed, *np.array(numbers, np.int64)
        ids, rows, num_tokens = list(self._rows_of[0]), *self._rows_of[1:]
        for at in rows_where(table.num_blocks[rows] == 0).tolist():  # newcomers, perhaps with a cached beginning
            known = self._tracked[ids[at]]
            table.num_cached[rows[at]] = max(known.request.num_computed_tokens - int(num_tokens[at]), 0)
            self._begin(known)
        remaining = table.num_remaining[rows]
        num_tokens = np.minimum(num_tokens, remaining)
        work = self._work_of(rows, num_tokens, remaining)
        predicted_s = self.costs.iteration_s(work)
        ends_s = self._free_at(now) + predicted_s
        is_first = (table.num_generated[rows] == 0) & (remaining == num_tokens)
        first_ids = [ids[at] for at in rows_where(is_first).tolist()]
        self._steps.append(StepInFlight(output, work, now, predicted_s, first_ids))
        note_completed(table, rows, num_tokens, now=ends_s, duration_s=predicted_s)
        size = self.scheduler.block_size
        table.num_blocks[rows] = (table.num_cached[rows] + (size - 1)) // size
        # The last token of these is in flight: they need no further step.
        is_last = table.num_generated[rows] >= table.max_tokens[rows]
        for request_id in [ids[at] for at in rows_where(is_last).tolist()]:
            self._drop_row(request_id)
            self._unready[request_id] = None
        self.counters.add("steps")
        if self._plan is not None:
            are_all = len(ids) == work.num_decodes == len(table) == len(self.scheduler.running)
            self._num_alike = _MOST_ALIKE if are_all and not self.scheduler.num_spec_tokens else 0

    def _work_of(self, rows: Ints, num_tokens: Ints, remaining: Ints) -> IterationWork:
        table, work = self.table, IterationWork()
        is_decode = (remaining == 1) & (table.num_generated[rows] > 0)
        note_decodes(work, table, rows[is_decode])
        for at in rows_where(~is_decode).tolist():
            num, is_last = int(num_tokens[at]), bool(num_tokens[at] == remaining[at])
            work.add_chunk(num, int(table.num_cached[rows[at]]), is_last=is_last)
        return work

    def completed(self, output: Any, now: float) -> None:
        """Note the end of a step, after vLLM has taken its tokens."""
        if not self._steps or self._steps[0].output is not output:
            return
        step = self._steps.popleft()
        duration_s = max(now - max(self._ended_s, step.scheduled_s), _LEAST_STEP_S)
        self._ended_s = now
        self.history.note(duration_s)
        if step.work.num_tokens:
            self.history.note_error(max(step.predicted_s, _LEAST_STEP_S), duration_s, now)
            self.costs.observe(step.work, duration_s)
        self.counters.add("step_seconds", duration_s)
        self.counters.add("predicted_seconds", step.predicted_s)
        for request_id in step.first_ids:
            if (known := self._tracked.get(request_id)) is not None and known.first_token_s is None:
                known.first_token_s = now
                if request_id in self.table:
                    self.table.first_token_s[self.table.row(request_id)] = now
        for request_id in sorted(output.num_scheduled_tokens.keys() - self.scheduler.requests.keys()):
            self._ended(request_id, now)
        if self.scheduler.num_spec_tokens:
            self._correct(output.num_scheduled_tokens)

    def _correct(self, computed: Mapping[RequestId, int]) -> None:
        """Take over the progress of requests with drafts, of which some were refused."""
        table = self.table
        for request_id in computed:
            if request_id in table:
                row, request = table.row(request_id), self._tracked[request_id].request
                table.num_generated[row] = names.num_generated(request)
                table.num_cached[row] = min(request.num_computed_tokens, table.context_len[row] - 1)

    def _ended(self, request_id: RequestId, now: float) -> None:
        known = self._tracked.get(request_id)
        if known is None:
            return
        self._forget(request_id)
        kind = "chat" if known.terms.is_chat else "document"
        self.counters.add(f"{kind}s")
        num_generated = known.request.num_output_tokens
        self.counters.add(f"{kind}_tokens", num_generated)
        slo, began_s = known.terms.slo, now if known.first_token_s is None else known.first_token_s
        taken_s = {"ttft": began_s - known.arrival_s, "deadline": now - known.arrival_s}
        taken_s["tpot"] = (now - began_s) / max(num_generated - 1, 1)
        for name, target_s in slo.targets:
            self.counters.add(f"missed_{name}", float(taken_s[name] > target_s))

    # --- the table follows vLLM's requests

    def _sync(self, now: float) -> None:
        requests, tracked = self.scheduler.requests, self._tracked
        if tracked.keys() != requests.keys():
            for request_id in [request_id for request_id in tracked if request_id not in requests]:
                self._forget(request_id)  # cancelled
            for request_id in [request_id for request_id in requests if request_id not in tracked]:
                self._track(requests[request_id], now)
        for request_id in list(self._unready):
            request = tracked[request_id].request
            is_done = names.is_running(request) and not names.num_pending(request)
            if not is_done and names.is_ready(request):
                del self._unready[request_id]
                self._add_row(request_id, now)
        while self._backlog and self._num_documents < MAX_DOCUMENTS:
            _, request_id = heapq.heappop(self._backlog)
            if request_id in tracked and request_id not in self.table and request_id not in self._unready:
                self._insert(tracked[request_id], now)
        if self.shares.num_waiting > 1:
            self._share_out()

    def _track(self, request: Any, now: float) -> None:
        try:
            terms = read_terms(names.xargs_of(request), request.priority, self.default_slo)
        except BadTerms:  # the front end refuses these, where the plugin is loaded there
            self.counters.add("bad_terms")
            terms = RequestTerms(slo=self.default_slo)
        waited_s = min(max(time.time() - request.arrival_time, 0.0), 3600.0)
        cost = cost_of(max(request.num_prompt_tokens, 1), min(request.max_tokens, request.num_prompt_tokens))
        self.shares.wait(terms.tenant, 1.0, now)
        tag = self.shares.counter(terms.tenant)[0] + self._waiting_cost[terms.tenant]
        self._waiting_cost[terms.tenant] += cost
        self._tracked[request.request_id] = Tracked(request, terms, now - waited_s, tag, cost)
        self._unready[request.request_id] = None

    def _add_row(self, request_id: RequestId, now: float) -> None:
        known = self._tracked[request_id]
        is_waiting = not names.is_running(known.request)
        if is_waiting and not known.terms.is_chat and self._num_documents >= MAX_DOCUMENTS:
            heapq.heappush(self._backlog, (known.tag, request_id))
        else:
            self._insert(known, now)

    def _insert(self, known: Tracked, now: float) -> None:
        request, terms, table = known.request, known.terms, self.table
        most = min(request.max_tokens, self.scheduler.max_model_len - request.num_prompt_tokens)
        prompt, sampling = (0,) * max(request.num_prompt_tokens, 1), SamplingParams(max_tokens=max(most, 1))
        facts = (known.arrival_s, terms.request_class, terms.slo, terms.priority)
        begun_s = 0.0 if known.first_token_s is None else now - known.first_token_s
        made = Request(request.request_id, prompt, sampling, "", *facts)
        row = table.add(made, now, num_generated=names.num_generated(request), begun_s=begun_s)
        if names.is_running(request):
            table.num_cached[row] = min(request.num_computed_tokens, int(table.context_len[row]) - 1)
            table.num_blocks[row] = -(-request.num_computed_tokens // self.scheduler.block_size)
        self._num_alike = 0
        if not terms.is_chat:
            self._num_documents += 1
            table.order[row] = int(known.tag)

    def _drop_row(self, request_id: RequestId) -> None:
        if request_id in self.table:
            self._num_documents -= not self._tracked[request_id].terms.is_chat
            self.table.remove(request_id)
            self._rows_of, self._num_alike = _NO_ROWS, 0

    def _forget(self, request_id: RequestId) -> None:
        self._drop_row(request_id)
        self._unready.pop(request_id, None)
        self._stop_waiting(self._tracked.pop(request_id))

    def _begin(self, known: Tracked) -> None:
        cost = known.cost
        self._stop_waiting(known)
        self.shares.charge(known.terms.tenant, cost)

    def _stop_waiting(self, known: Tracked) -> None:
        tenant = known.terms.tenant
        if known.cost and not self.shares.stop_waiting(tenant):
            del self._waiting_cost[tenant]
        elif known.cost:
            self._waiting_cost[tenant] -= known.cost
        known.cost = 0.0

    def _forget_rows(self, request_ids: Any) -> None:
        """Let preempted requests come back with what vLLM has left of them."""
        for request_id in request_ids:
            if request_id in self._tracked:
                self.counters.add("preemptions")
                self._drop_row(request_id)
                self._unready[request_id] = None

    def _share_out(self) -> None:
        """Let chats of tenants that are beyond their share give way first."""
        table, num_generated, first = self.table, self.table.num_generated.tolist(), self.shares.first
        assert first is not None, "nobody waits"
        ahead = self.shares.counter(first)[0] + _AHEAD_TOKENS
        for row, request_id in enumerate(table.request_ids):
            known = self._tracked[request_id]
            if known.terms.is_chat and not num_generated[row]:
                table.priority[row] = known.terms.priority + (known.tag > ahead)

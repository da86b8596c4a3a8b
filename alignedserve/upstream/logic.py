"""Decides which call goes to which upstream server, and when. No clock, no I/O.

The life of a call:
1. `arrive`: it waits in the line of its model and class; clients take turns there by what they have had.
2. `starts`: chat goes to an upstream at once; a document goes where the allowance of documents has a place.
3. `on_token`, and `tick` four times a second: first tokens and gaps of chat move the allowances.
4. `end`: the call leaves; a failure counts against its upstream, and the call may arrive again.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from alignedserve.core.fair_shares import FairShares, cost_of
from alignedserve.core.request import RequestClass, Slo

DOCUMENT, CHAT = RequestClass.BEST_EFFORT, RequestClass.REAL_TIME
TICK_S = 0.25
_SUFFERS = 0.9  # of an objective
_SHARE = 0.06  # of chats that may suffer
_CUT, _FIRST_GROWTH = 0.8, 1.25
_SETTLE_S = 1.0  # from a cut until its effect is seen
_DOCUMENTS = (2.0, 0.5, 1024.0)  # at first, at least, at most
_MOST_CHATS = 256  # at one upstream; others wait at the door, where clients take turns
_RATE = (500.0, 50.0, 1e7)  # prompt tokens of documents a second
_BURST_S = 0.25  # of the rate that may be saved up
_MAX_SHED = 2  # times that a document is taken back from an upstream
_MOST_STRIKES = 3  # failures in a row
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 0.5, 10.0, 5.0  # between looks at an upstream: down, and up
_MAX_BUSY_S = 30.0
_MAX_BEGINNINGS = 16_384
_SLACK_CALLS = 2  # by which an upstream with the beginning of a prompt may have more work than the idlest
_GAPS_S, _MIN_GAPS = 1.0, 2  # between looks at gaps; of a chat


class Fingerprint(NamedTuple):
    """What tells two models of one name apart; None: the upstream does not say."""

    root: str | None = None  # the folder's name
    num_parameters: int | None = None
    probe_tokens: int | None = None  # of a fixed text

    def differs_from(self, other: "Fingerprint") -> bool:
        return any(mine is not None and its is not None and mine != its for mine, its in zip(self, other, strict=True))


@dataclass(slots=True)
class Allowance:
    """How much documents may have of an upstream. Each chat that is well lets it grow a little, each that suffers cuts
    it by a lot: it comes to rest where a small share of chats suffers, whatever the upstream is."""

    limit: float
    least: float
    most: float
    was_cut: bool = False  # before, it grows fast
    cut_s: float = -math.inf

    def take(self, now: float, *, suffers: bool, is_used: bool) -> bool:
        """Take what a chat saw; return whether the allowance was cut. It grows only where it is used."""
        if suffers and now - self.cut_s >= _SETTLE_S:
            self.limit, self.was_cut, self.cut_s = max(self.least, self.limit * _CUT), True, now
            return True
        if not suffers and is_used:
            growth = _CUT ** (-_SHARE / (1.0 - _SHARE)) if self.was_cut else _FIRST_GROWTH
            self.limit = min(self.most, self.limit * growth)
        return False


@dataclass(slots=True)
class WaitingCall:
    """One call, from its arrival to its end."""

    call_id: str
    model: str
    request_class: RequestClass
    tenant: str
    weight: float
    num_prompt_tokens: int  # by its length
    slo: Slo
    beginnings: tuple[int, ...] = ()  # names of the beginnings of its prompt, the shortest first
    may_be_shed: bool = False
    avoided: frozenset[str] = frozenset()  # upstreams that failed it
    url: str | None = None  # where it is; None: it waits
    started_s: float = 0.0
    first_s: float | None = None
    num_tokens: int = 0
    num_shed: int = 0
    looked_s: float = 0.0  # when its gaps were looked at last, like the next
    looked_tokens: int = 0
    is_late: bool = False  # its first token, and that is counted

    def scheduler_terms(self) -> dict[str, Any]:
        """Return what our scheduler inside vLLM reads of a request (plugins/vllm/terms.py)."""
        is_document = self.request_class is DOCUMENT
        names = {"deadline": "deadline_ms"} if is_document else {name: f"slo_{name}_ms" for name in ("ttft", "tpot")}
        targets = {names[name]: 1000.0 * target_s for name, target_s in self.slo.targets if name in names}
        return {"service_class": "document" if is_document else "chat", "tenant": self.tenant, **targets}


@dataclass(slots=True)
class Upstream:
    """What is known of one server."""

    url: str
    models: Mapping[str, Fingerprint] = field(default_factory=dict)
    problem: str | None = "it has not answered yet"  # why it gets nothing; None: it serves
    is_refused: bool = False  # for good
    num_strikes: int = 0
    pause_s: float = _FIRST_PAUSE_S
    look_s: float = -math.inf  # when to look at it next
    busy_until_s: float = -math.inf  # it asked for fewer documents
    documents: Allowance = field(default_factory=lambda: Allowance(*_DOCUMENTS))
    rate: Allowance = field(default_factory=lambda: Allowance(*_RATE))
    credit: float = 0.0  # prompt tokens of documents that may start now, if above 0
    is_full: bool = False  # a document waited for a place since chat had its last first token
    is_short: bool = False  # or for credit
    calls: dict[str, WaitingCall] = field(default_factory=dict)
    first_s: float = -math.inf  # when chat had its last first token
    gap_s: float = -math.inf  # when its gaps were looked at last
    num_answered: int = 0

    @property
    def is_up(self) -> bool:
        return self.problem is None

    def num_open(self, request_class: RequestClass) -> int:
        return sum(call.request_class is request_class for call in self.calls.values())

    def has_place(self, call: WaitingCall, now: float) -> bool:
        num_open = self.num_open(call.request_class)
        if call.request_class is CHAT:
            return num_open < _MOST_CHATS
        # One document may go where no chat is: what comes of it says more than nothing.
        is_full = num_open + 1 > max(self.documents.limit, not self.num_open(CHAT))
        is_short = self.credit < 0.0
        self.is_full, self.is_short = self.is_full or is_full, self.is_short or (is_short and not is_full)
        return not is_full and not is_short and now >= self.busy_until_s

    def saw(self, now: float, *, suffers: bool, is_first: bool) -> bool:
        """Take what a chat saw of this upstream, of its first token or of gaps; return whether documents are to be
        taken back. Gaps only cut: first tokens come once a chat."""
        num_documents = self.num_open(DOCUMENT)
        if suffers and not num_documents:
            return False
        if suffers:
            self.documents.limit = min(self.documents.limit, num_documents + 1.0)
        if is_first:
            self.rate.take(now, suffers=suffers, is_used=self.is_short)
        is_cut = self.documents.take(now, suffers=suffers, is_used=self.is_full and is_first)
        if is_first:
            self.is_short = self.is_full = False
        return is_cut


class CallStarted(NamedTuple):
    """A call that goes to an upstream now."""

    call_id: str
    url: str


class _Line:
    def __init__(self) -> None:
        self.shares = FairShares()
        self.calls: dict[str, OrderedDict[str, WaitingCall]] = {}  # by tenant


class UpstreamLogic:
    """The upstreams of one door, and its waiting calls."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.upstreams = {url: Upstream(url) for url in urls}
        self._lines: dict[tuple[str, RequestClass], _Line] = {}
        self._beginnings: OrderedDict[tuple[str, int], str] = OrderedDict()  # where a prompt began so

    # --- upstreams

    @property
    def models(self) -> tuple[str, ...]:
        """Return the models of all upstreams, also of those that are down now."""
        return tuple(dict.fromkeys(name for upstream in self.upstreams.values() for name in upstream.models))

    def serving(self, model: str) -> list[Upstream]:
        return [item for item in self.upstreams.values() if item.is_up and model in item.models]

    def due_looks(self, now: float) -> list[str]:
        """Return the upstreams to look at now; each is due again after its pause."""
        due = [item for item in self.upstreams.values() if not item.is_refused and now >= item.look_s]
        for upstream in due:
            upstream.look_s = now + (_LOOK_S if upstream.is_up else upstream.pause_s)
        return [upstream.url for upstream in due]

    def on_listed(self, url: str, models: Mapping[str, Fingerprint]) -> list[str]:
        """Note that an upstream answers with these models. Return what is wrong with them: a model whose name means
        another model elsewhere is kept apart."""
        upstream, problems = self.upstreams[url], []
        allowed = dict(models)
        for name, fingerprint in models.items():
            for other in self.upstreams.values():
                its = other.models.get(name)
                if other is not upstream and its is not None and fingerprint.differs_from(its):
                    problems.append(f"{url} and {other.url} serve different models under the name {name}")
                    allowed.pop(name, None)
                    break
        if not upstream.is_up:
            upstream.documents = Allowance(*_DOCUMENTS)
        upstream.models, upstream.num_strikes, upstream.pause_s = allowed, 0, _FIRST_PAUSE_S
        upstream.problem = None if allowed else (problems[0] if problems else "it lists no model")
        return problems

    def on_down(self, url: str, problem: str, now: float, *, for_good: bool = False) -> None:
        upstream = self.upstreams[url]
        upstream.problem, upstream.is_refused = problem, for_good
        upstream.look_s = now + upstream.pause_s
        upstream.pause_s = min(2 * upstream.pause_s, _LONGEST_PAUSE_S)

    def on_strike(self, url: str, problem: str, now: float) -> None:
        """Count a failure: a few in a row, and the upstream gets nothing more until it has answered a look."""
        upstream = self.upstreams[url]
        upstream.num_strikes += 1
        if upstream.num_strikes >= _MOST_STRIKES and upstream.is_up:
            self.on_down(url, problem, now)

    def on_busy(self, url: str, retry_after_s: float, now: float) -> None:
        """Note that an upstream refused a call for lack of capacity."""
        upstream = self.upstreams[url]
        upstream.busy_until_s = now + min(max(retry_after_s, _FIRST_PAUSE_S), _MAX_BUSY_S)
        upstream.documents.take(now, suffers=True, is_used=True)

    # --- calls

    def arrive(self, call: WaitingCall, now: float) -> None:
        line = self._lines.setdefault((call.model, call.request_class), _Line())
        call.url, call.first_s, call.num_tokens = None, None, 0
        line.calls.setdefault(call.tenant, OrderedDict())[call.call_id] = call
        line.shares.wait(call.tenant, call.weight, now)

    def leave(self, call: WaitingCall) -> None:
        """Forget a call that still waits. May be repeated."""
        line = self._lines.get((call.model, call.request_class))
        calls = line.calls.get(call.tenant) if line is not None else None
        if line is not None and calls and calls.pop(call.call_id, None) is not None:
            line.shares.stop_waiting(call.tenant)
            if not calls:
                del line.calls[call.tenant]

    def starts(self, now: float) -> Iterator[CallStarted]:
        """Yield the calls that start now: chat first."""
        for request_class in (CHAT, DOCUMENT):
            for (_, kind), line in tuple(self._lines.items()):
                while kind is request_class and (call := self._next(line)) is not None:
                    upstream = self._choose(call, now)
                    if upstream is None:
                        break
                    line.shares.charge(call.tenant, cost_of(call.num_prompt_tokens, 0))
                    self.leave(call)
                    self._start(call, upstream, now)
                    yield CallStarted(call.call_id, upstream.url)

    def on_token(self, call: WaitingCall, count: int, now: float) -> None:
        """Note tokens of a call; only the first is looked at in its moment."""
        call.num_tokens += count
        if call.first_s is not None or call.url is None:
            return
        call.first_s = call.looked_s = now
        call.looked_tokens = call.num_tokens
        upstream = self.upstreams[call.url]
        if call.request_class is CHAT and call.slo.ttft_s and not call.is_late:
            upstream.first_s = now
            upstream.saw(now, suffers=now - call.started_s > _SUFFERS * call.slo.ttft_s, is_first=True)

    def end(self, call: WaitingCall, *, is_answered: bool) -> None:
        """Let a call leave its upstream. May be repeated."""
        upstream = self.upstreams[call.url] if call.url is not None else None
        if upstream is None or upstream.calls.pop(call.call_id, None) is None:
            self.leave(call)
            return
        if is_answered:
            upstream.num_strikes, upstream.num_answered = 0, upstream.num_answered + 1
        line = self._lines.get((call.model, call.request_class))
        if line is not None:
            line.shares.charge(call.tenant, cost_of(0, call.num_tokens))
        call.url = None

    def wants_canary(self, now: float) -> list[str]:
        """Return the upstreams with documents of which chat has said nothing for a second."""
        return [
            item.url
            for item in self.upstreams.values()
            if item.is_up and item.num_open(DOCUMENT) and now - item.first_s > 1.0
        ]

    def tick(self, now: float) -> list[WaitingCall]:
        """Move the allowances by what chat has seen; return documents to take back from their upstreams."""
        shed: list[WaitingCall] = []
        for upstream in self.upstreams.values():
            upstream.credit = min(upstream.rate.limit * _BURST_S, upstream.credit + upstream.rate.limit * TICK_S)
            for call in upstream.calls.values():
                limit_s = call.slo.ttft_s if call.request_class is CHAT and call.first_s is None else None
                if limit_s and not call.is_late and now - call.started_s > _SUFFERS * limit_s:
                    call.is_late, upstream.first_s = True, now
                    if upstream.saw(now, suffers=True, is_first=True):
                        shed += self._over(upstream)
            self._look_at_gaps(upstream, now)
        return shed

    def num_waiting(self, model: str, request_class: RequestClass) -> int:
        line = self._lines.get((model, request_class))
        return 0 if line is None else sum(map(len, line.calls.values()))

    # --- inside

    def _look_at_gaps(self, upstream: Upstream, now: float) -> None:
        if now - upstream.gap_s < _GAPS_S:
            return
        upstream.gap_s, parts = now, []
        for call in upstream.calls.values():
            if call.request_class is CHAT and call.first_s is not None and call.slo.tpot_s:
                count, elapsed_s = call.num_tokens - call.looked_tokens, now - call.looked_s
                if count >= _MIN_GAPS or elapsed_s > call.slo.tpot_s:
                    parts.append(elapsed_s / max(count, 1) / call.slo.tpot_s)
                    call.looked_s, call.looked_tokens = now, call.num_tokens
        if parts:
            upstream.saw(now, suffers=sum(parts) / len(parts) > _SUFFERS, is_first=False)

    def _over(self, upstream: Upstream) -> list[WaitingCall]:
        documents = [call for call in upstream.calls.values() if call.request_class is DOCUMENT]
        num_over = len(documents) - math.ceil(upstream.documents.limit)
        able = [call for call in documents if call.may_be_shed and call.num_shed < _MAX_SHED]
        return sorted(able, key=lambda call: -call.started_s)[: max(num_over, 0)]

    def _next(self, line: _Line) -> WaitingCall | None:
        tenant = line.shares.first
        return None if tenant is None else next(iter(line.calls[tenant].values()))

    def _choose(self, call: WaitingCall, now: float) -> Upstream | None:
        serving = self.serving(call.model)
        able = [item for item in serving if item.url not in call.avoided] or serving
        free = [item for item in able if item.has_place(call, now)]
        if not free:
            return None
        most = min(len(item.calls) for item in free) + _SLACK_CALLS
        near = [item for item in free if len(item.calls) <= most]
        return max(near, key=lambda item: (self._num_begun(call, item), -len(item.calls)))

    def _num_begun(self, call: WaitingCall, upstream: Upstream) -> int:
        for count in range(len(call.beginnings), 0, -1):
            if self._beginnings.get((call.model, call.beginnings[count - 1])) == upstream.url:
                return count
        return 0

    def _start(self, call: WaitingCall, upstream: Upstream, now: float) -> None:
        call.url, call.started_s = upstream.url, now
        upstream.calls[call.call_id] = call
        if call.request_class is DOCUMENT:
            upstream.credit -= call.num_prompt_tokens
        for name in call.beginnings:
            self._beginnings[call.model, name] = upstream.url
            self._beginnings.move_to_end((call.model, name))
        while len(self._beginnings) > _MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)

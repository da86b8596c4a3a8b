"""The courses of one gateway's calls: open ones, and ended ones for a while.

Bounded by count, bytes and age. Whoever asks changes nothing here.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from alignedserve.api.timelines.timeline import GATEWAY, LAST_NOTES_S, CallFacts, ChoiceTimeline, Timeline
from alignedserve.api.timelines.trace_context import TraceContext, trace_of
from alignedserve.config.sections import ExplainConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.request_notes import RequestNote, RequestsNoted, Step


class Timelines:
    """Finds the course of a request by its id; of a call by its response's, the client's own or its choices'."""

    def __init__(
        self,
        config: ExplainConfig,
        *,
        traced_ratio: float | None = None,
        trace: Callable[[Timeline], None] | None = None,
    ) -> None:
        """`traced_ratio`: of calls; None: none are. `trace`: gets each that is, at its end."""
        self._config = config
        self._keep_s = config.keep_s if config.enabled else 2 * LAST_NOTES_S
        self._traced_ratio = traced_ratio
        self._trace = trace
        self._open: dict[str, Timeline] = {}  # by response id, like the next
        self._ended: dict[str, Timeline] = {}  # the one that ended first comes first
        self._by_request: dict[RequestId, tuple[Timeline, ChoiceTimeline]] = {}
        self._by_id: dict[tuple[str, str], Timeline] = {}  # by owner and any of its ids
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept, as estimated."""
        return self._num_bytes

    def trace_of(self, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the trace of a call with these headers; None: it is not traced."""
        return None if self._traced_ratio is None else trace_of(headers, self._traced_ratio)

    def begin(self, facts: CallFacts, requests: Iterable[Request]) -> Timeline:
        """Keep a call that is submitted now. The same id may come again, as of a line that is tried again."""
        timeline = Timeline(facts, requests)
        now = time.monotonic()
        self._drop(self._open.get(facts.response_id) or self._ended.get(facts.response_id))
        self._open[facts.response_id] = timeline
        for choice in timeline.choices:
            self._by_request[choice.request_id] = timeline, choice
        for name in timeline.ids:
            self._by_id[facts.owner, name] = timeline
        timeline.received(now)
        self._num_bytes += timeline.num_bytes
        self._make_room(now)
        return timeline

    def end(self, timeline: Timeline) -> None:
        """Note that a call has ended: it is kept for a while, and traced."""
        now = timeline.ended_s = time.monotonic()
        response_id = timeline.facts.response_id
        if self._open.get(response_id) is timeline:
            self._ended[response_id] = self._open.pop(response_id)
        if self._trace is not None and timeline.facts.trace is not None:
            self._trace(timeline)
        self._make_room(now)

    def take(self, source: str, message: RequestsNoted) -> None:
        """Take what another process noted; what is about unknown requests is dropped."""
        for note in message.notes:
            self._add(source, note)

    def note(self, request_id: RequestId, step: Step) -> None:
        """Note a step of this gateway's."""
        self._add(GATEWAY, RequestNote(request_id, step, time.monotonic()))

    def find(self, wanted: str, owner: str) -> Timeline | None:
        """Return the call of this id, if it is this owner's."""
        timeline = self._by_id.get((owner, wanted)) if self._config.enabled else None
        return None if timeline is None or self._is_old(timeline, time.monotonic()) else timeline

    def _add(self, source: str, note: RequestNote) -> None:
        known = self._by_request.get(note.request_id)
        if known is not None:
            timeline, choice = known
            self._num_bytes += timeline.add(choice, source, note)

    def _is_old(self, timeline: Timeline, now: float) -> bool:
        return timeline.ended_s is not None and now - timeline.ended_s > self._keep_s

    def _make_room(self, now: float) -> None:
        while len(self) and (self._is_over() or self._is_old(self._first(), now)):
            self._drop(self._first())

    def _is_over(self) -> bool:
        return len(self) > self._config.max_requests or self._num_bytes > self._config.max_bytes

    def _first(self) -> Timeline:
        """Return the timeline to drop first: an ended one if there is any."""
        return next(iter((self._ended or self._open).values()))

    def _drop(self, timeline: Timeline | None) -> None:
        if timeline is None:
            return
        for kept in (self._open, self._ended):
            if kept.get(timeline.facts.response_id) is timeline:
                del kept[timeline.facts.response_id]
        self._num_bytes -= timeline.num_bytes
        for choice in timeline.choices:
            if self._by_request.get(choice.request_id, (None,))[0] is timeline:
                del self._by_request[choice.request_id]
        for name in timeline.ids:
            if self._by_id.get((timeline.facts.owner, name)) is timeline:
                del self._by_id[timeline.facts.owner, name]

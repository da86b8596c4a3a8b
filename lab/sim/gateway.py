"""The client and its gateway in one: sends requests at their times, and records when their tokens arrive."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice, repeat

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received
from alignedserve.messages.gateways import (
    ClusterStatus,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokensEmitted,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES, MAX_BLOCK_NAMES
from alignedserve.prefix_cache.block_hashes import BlockHasher, prefix_root
from lab.sim.components import Network
from lab.sim.engine import EOS, TOKEN, SimulatedAnswer
from lab.sim.event_queue import EventQueue
from lab.sim.records import GapSample, RequestEnding, RequestRecord, SimulatedRequest
from lab.sim.routers import RouterChoice
from lab.workload.requests import NO_SLO, ClosedLoopRun, TimedRequest, Workload
from router.state import LengthPredicted

_ROOT = prefix_root(b"simulated", tenant="", salt="", form=b"")


class SimulatedTexts:
    """Tokens of prompts and answers, and the names of their blocks. Every text has one token of its own, repeated."""

    def __init__(self, block_size: int | None) -> None:
        self._hasher = None if block_size is None else BlockHasher(block_size)
        self._next_token = count(max(EOS, TOKEN) + 1)
        self._token_of: dict[int | str, int] = {}
        self._plain: dict[int, tuple[int, ...]] = {}  # open prompts without texts, by length: one tuple for all of one
        self._num_users: dict[int, int] = {}

    def prompt(self, timed: TimedRequest) -> tuple[int, ...]:
        """Return the tokens of a request's prompt, which is given back when the request ends."""
        if not timed.runs:
            return self._borrow(timed.prompt_len)
        runs = chain.from_iterable(repeat(self._token(run.text), run.num_tokens) for run in timed.runs)
        tokens = tuple(runs)[: timed.prompt_len]
        num_own = timed.prompt_len - len(tokens)
        return tokens + (next(self._next_token),) * num_own if num_own else tokens

    def root(self, timed: TimedRequest) -> bytes:
        """Return the root of a request's blocks; empty for one without texts, which shares nothing."""
        return _ROOT if timed.runs and self._hasher is not None else b""

    def block_names(self, request: Request, generated_token_ids: Sequence[int] = ()) -> bytes:
        if self._hasher is None or not request.prefix_root:
            return b""
        blocks = self._hasher.named(request.prefix_root, (*request.prompt_token_ids, *generated_token_ids))
        return b"".join([block.block_hash[:BLOCK_NAME_BYTES] for block in islice(blocks, MAX_BLOCK_NAMES)])

    def answer(self, timed: TimedRequest) -> SimulatedAnswer:
        return SimulatedAnswer(timed.output_len, TOKEN if timed.answer is None else self._token(timed.answer))

    def give_back(self, timed: TimedRequest) -> None:
        length = timed.prompt_len
        if timed.runs:
            return
        self._num_users[length] -= 1
        if not self._num_users[length]:
            del self._plain[length], self._num_users[length]

    def _borrow(self, length: int) -> tuple[int, ...]:
        self._num_users[length] = self._num_users.get(length, 0) + 1
        prompt = self._plain.get(length)
        if prompt is None:
            prompt = self._plain[length] = (TOKEN,) * length
        return prompt

    def _token(self, text: int | str) -> int:
        token = self._token_of.get(text)
        if token is None:
            token = self._token_of[text] = next(self._next_token)
        return token


GATEWAY = "gateway-0"


@dataclass(slots=True)
class _SentRequest(SimulatedRequest):
    request: Request
    router: str


class SimulatedGateway:
    """Sends requests and receives tokens. `on_idle` is called when all requests are sent and have ended."""

    def __init__(
        self,
        workload: Workload,
        event_queue: EventQueue,
        network: Network,
        routers: RouterChoice,
        *,
        texts: SimulatedTexts,
        max_context_len: int,
        default_slo: Slo,
        on_idle: Callable[[], None],
    ) -> None:
        """`default_slo`: of real-time requests that name no objective, as the live gateway has it."""
        self._event_queue = event_queue
        self._network = network
        self._routers = routers
        self._max_context_len = max_context_len
        self._default_slo = default_slo
        self._on_idle = on_idle
        self._timed = iter(workload.requests)
        self._loops = ClosedLoopRun(workload)
        self._origin_s = 0.0
        self._num_to_come = 0  # scheduled requests
        self._num_sent = 0
        self._ends_s = workload.ends_s
        self._has_begun_all = False  # of the open loops
        self.loaded_tokens_per_s: dict[str, float] = {}  # by class; empty before the end of sending, or without one
        self._open: dict[RequestId, _SentRequest] = {}
        self._texts = texts
        self.answers: dict[RequestId, SimulatedAnswer] = {}  # to open requests
        self.gaps: dict[str, GapSample] = {}  # by class
        self.records: list[RequestRecord] = []
        self.statuses: dict[str, ClusterStatus] = {}  # the latest of each router
        self.max_open = 0  # requests at a time
        network.add(GATEWAY, Role.GATEWAY, self.dispatch)

    def start(self, time_s: float) -> None:
        self._origin_s = time_s
        if self._ends_s:
            self._event_queue.at(time_s + self._ends_s, self._note_loaded, self._ends_s)
        self._plan_next()
        self._plan_all(self._loops.first())
        self._note_idle()

    def dispatch(self, event: PeerConnected | PeerDisconnected | Received) -> None:
        if not isinstance(event, Received):
            self._routers.set_lost(event.peer, is_lost=isinstance(event, PeerDisconnected))
            if isinstance(event, PeerConnected):
                self._resume([key for key, open_request in self._open.items() if open_request.router == event.peer])
            return
        message = event.message
        match message:
            case RequestInterrupted():
                self._resume([message.request_id])
            case RequestRejected():
                self._end(message.request_id, RequestEnding.REJECTED, self._event_queue.now)
            case RequestFailed():
                self._end(message.request_id, RequestEnding.FAILED, self._event_queue.now)
            case ClusterStatus():
                self.statuses[event.peer] = message
                self._routers.observe(event.peer, message)
            case _:
                raise AssertionError(f"the simulated gateway does not take {type(message).__name__}")

    def emitted(self, message: TokensEmitted) -> None:
        time_s = self._event_queue.now + self._network.token_s
        under_way = self._open
        for delta in message.deltas:
            sent = under_way.get(delta.request_id)
            if sent is None or delta.first_index < len(sent.token_times_s):  # emitted again, as two had it after a loss
                continue
            assert delta.first_index == len(sent.token_times_s), "a token that is not the next"
            if not sent.token_times_s:
                sent.num_cached_tokens = delta.num_cached_tokens
            sent.token_times_s.append(time_s)
            if delta.finish_reason is not None:
                self._end(delta.request_id, RequestEnding.COMPLETED, time_s)

    def cut_off(self) -> None:
        for request_id in list(self._open):
            self._close(request_id, RequestEnding.UNFINISHED, self._event_queue.now)

    @property
    def has_sent_all(self) -> bool:
        """True once all requests of the open loops are sent, and a given time of sending is over."""
        return self._has_begun_all and (not self._ends_s or bool(self.loaded_tokens_per_s))

    def open_requests(self) -> Iterable[SimulatedRequest]:
        return self._open.values()

    # --- sending

    def _plan_next(self) -> None:
        timed = next(self._timed, None)
        self._has_begun_all = timed is None
        if timed is not None:
            self._num_to_come += 1
            self._event_queue.at(self._origin_s + timed.arrival_s, self._send_timed, timed)

    def _plan_all(self, looped: Sequence[TimedRequest]) -> None:
        for timed in looped:
            self._num_to_come += 1
            self._event_queue.at(self._origin_s + timed.arrival_s, self._send, timed)

    def _send_timed(self, timed: TimedRequest) -> None:
        self._plan_next()
        self._send(timed)

    def _send(self, timed: TimedRequest) -> None:
        request_id = RequestId(f"r{self._num_sent:07d}")
        now = self._event_queue.now
        if timed.request_class is RequestClass.REAL_TIME and self._default_slo != NO_SLO:
            timed = replace(timed, slo=timed.slo.completed_by(self._default_slo))
        request = Request(
            request_id,
            self._texts.prompt(timed),
            SamplingParams(max_tokens=self._limit(timed)),
            GATEWAY,
            now,
            timed.request_class,
            timed.slo,
            timed.priority,
            prefix_root=self._texts.root(timed),
            tenant=timed.tenant,
            weight=timed.weight,
            num_encoder_tokens=timed.num_encoder_tokens,
        )
        router = self._routers.choose(request_id)
        self._open[request_id] = _SentRequest(self._num_sent, timed, now, array("d"), request, router)
        self.max_open = max(self.max_open, len(self._open))
        self.answers[request_id] = self._texts.answer(timed)
        self._num_sent += 1
        self._num_to_come -= 1
        self._submit(self._open[request_id], SubmitRequest(request, self._texts.block_names(request)))

    def _limit(self, timed: TimedRequest) -> int:
        if timed.max_tokens is not None:
            return timed.max_tokens
        return max(self._max_context_len - timed.prompt_len, 1)

    def _submit(self, under_way: _SentRequest, message: SubmitRequest | ResumeRequest) -> None:
        delay_s = self._network.submit_s()
        self._network.deliver(under_way.router, Received(GATEWAY, message), delay_s)
        predicted_len = under_way.timed.predicted_len
        if predicted_len is not None:
            predicted = LengthPredicted(under_way.request.request_id, float(predicted_len))
            self._network.deliver(under_way.router, predicted, delay_s)

    def _resume(self, request_ids: Sequence[RequestId]) -> None:
        for under_way in [self._open[request_id] for request_id in request_ids if request_id in self._open]:
            request = under_way.request
            tokens = (self.answers[request.request_id].token_id,) * len(under_way.token_times_s)
            self._submit(
                under_way, ResumeRequest(request, tokens, block_names=self._texts.block_names(request, tokens))
            )

    # --- ends

    def _note_loaded(self, seconds: float) -> None:
        num_tokens: Counter[str] = Counter()
        for record in self.records:
            num_tokens[record.class_name] += record.num_tokens
        for under_way in self._open.values():
            num_tokens[under_way.timed.class_name] += len(under_way.token_times_s)
        self.loaded_tokens_per_s = {name: number / seconds for name, number in num_tokens.items()}

    def _end(self, request_id: RequestId, ending: RequestEnding, time_s: float) -> None:
        timed = self._close(request_id, ending, time_s)
        finished_s = time_s - self._origin_s
        if ending is RequestEnding.COMPLETED:
            self._plan_all(self._loops.after(timed, finished_s))
        else:
            self._plan_all(self._loops.next_after(timed.class_name, finished_s))
        self._note_idle()

    def _note_idle(self) -> None:
        if not (self._open or self._num_to_come):
            self._on_idle()

    def _close(self, request_id: RequestId, ending: RequestEnding, time_s: float) -> TimedRequest:
        under_way = self._open.pop(request_id)
        del self.answers[request_id]
        timed = under_way.timed
        self._texts.give_back(timed)
        gaps = self.gaps.setdefault(timed.class_name, GapSample())
        self.records.append(under_way.close(ending, time_s, gaps))
        return timed

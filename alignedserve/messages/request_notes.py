"""Messages about the course of single requests: what rooms note for the gateway that has a request, which keeps it.

Rooms send a few notes per request, several requests' at once, at most every tick. They name no token and no text.
"""

import enum
from typing import Annotated

import msgspec

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.fields import Attempt, Count, PredictedLen, Seconds, Text
from alignedserve.messages.wire import Message

MAX_NOTES = 1024  # in a message
_MAX_PENDING = 16 * MAX_NOTES  # for one gateway; a room that notes more between two ticks is not understood by them
MAX_DOCUMENT_BYTES = 1 << 20
MAX_STANDINGS = 16  # in an answer


class Step(enum.Enum):
    """Steps in the course of a request."""

    # gateway
    RECEIVED = "received"  # the HTTP request, or the line of a batch
    SUBMITTED = "submitted"  # tokenised and sent to the router
    FIRST_TOKEN = "first token"  # noqa: S105  (a step)
    RESUMED = "resumed"  # sent to a router again, with the tokens that the client has
    ENDED = "ended"  # the last token passed on, a failure, or the client is gone
    # router
    QUEUED = "queued"
    WAITING = "waiting"  # why it goes on waiting where it is, whenever that changes; by every room
    DISPATCHED = "dispatched"  # to a worker that computes its prompt
    PREDICTED = "predicted"  # the length of its answer
    POOLED = "pooled"
    GRANTED = "granted"  # by the pool, in a batch, to a decode worker
    MOVE_ORDERED = "move ordered"
    MOVED = "moved"  # another worker decodes it on
    STAYED = "stayed"  # it could not be moved
    PREEMPTED = "preempted"  # back to the queue
    INTERRUPTED = "interrupted"  # its holder is lost or drains
    # workers
    ACCEPTED = "accepted"
    STARTED = "started"  # in its first iteration; again after it was evicted
    STOOD_STILL = "stood still"  # the pass in which it is computed, see Cause.WITHIN
    PREFILLED = "prefilled"  # and its first token sampled
    WENT_ON = "went on"  # that pass, to its end
    OFFERED = "offered"  # blocks for its cache asked for, in the pool or a buffer
    HANDED_OVER = "handed over"
    HANDOFF_REFUSED = "handoff refused"
    ARRIVED = "arrived"  # at a decode worker, as a candidate
    PREFETCHING = "prefetching"  # into a candidate buffer
    PREFETCHED = "prefetched"
    PREFETCH_ENDED = "prefetch ended"  # cancelled, or it did not verify
    LOADING = "loading"  # into the decode worker's own memory
    JOINED = "joined"  # the running batch
    EVICTED = "evicted"
    SWAPPED_OUT = "swapped out"  # to host memory
    SWAPPED_IN = "swapped in"
    RETURNED = "returned"  # to the pool
    FINISHED = "finished"  # its worker has sent the last token
    ATTEMPT_FAILED = "attempt failed"


class Cause(enum.Enum):
    """Reasons of a step or of a wait."""

    # of waits
    NO_WORKER = "no worker"
    WORKERS_BUSY = "workers busy"  # all have as many prompt tokens to compute as they may be given
    POOL_FULL = "pool full"
    OTHERS_FIRST = "others first"  # the policy's order: class, priority, slack
    BLOCKS_SHORT = "blocks short"
    BATCH_FULL = "batch full"  # as many requests run as may
    BATCH_NOT_FULL = "batch not full"  # too few requests of similar length for an aligned batch
    NO_SLOT = "no slot"  # every decode worker has as many requests as it takes
    EARLIER_BATCH = "earlier batch"  # the batch that runs goes on before its own takes over
    PREFETCH = "prefetch"  # its cache is on its way
    PREFIX = "prefix"  # its prefix is on its way from a pool
    BLOCKS_HELD = "blocks held"  # for requests that move
    ITERATION = "iteration"  # the one that runs ends first
    COPY = "copy"  # its cache is copied, or waits for the answer of where it goes
    # of steps
    MEMORY = "memory"  # others needed its blocks
    REFUSED = "refused"  # its cache did not verify, or found no room
    WORKER_LOST = "worker lost"
    DRAINED = "drained"
    WITHIN = "within"  # another pass, which stops between two layers
    URGENT = "urgent"  # past the pool, straight to a decode worker
    CLIENT_GONE = "client gone"
    FAILED = "failed"
    REJECTED = "rejected"
    STOP_STRING = "stop string"


NoteTime = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class RequestNote(msgspec.Struct, frozen=True, array_like=True):
    """One step of one request. Fields that say nothing about a step have their defaults."""

    request_id: RequestId
    step: Step
    at_s: NoteTime  # on the sender's monotonic clock
    attempt: Attempt = 0
    cause: Cause | None = None
    peer: Text = ""  # the other process of the step: a worker or a pool
    num_tokens: Count = 0  # api/timelines/explanation.py says what is counted at which step
    num_requests: Count = 0
    num_iterations: Count = 0
    predicted_len: PredictedLen | None = None


class RequestsNoted(Message, frozen=True):
    """Router or worker to gateway: steps of its requests, in order."""

    notes: Annotated[tuple[RequestNote, ...], msgspec.Meta(max_length=MAX_NOTES)]


QuestionNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
WantedId = Annotated[str, msgspec.Meta(max_length=200)]


class AskTimeline(Message, frozen=True):
    """Gateway to router to every other gateway: the timeline of this request, if you have it. Each answers."""

    number: QuestionNumber  # of the asker
    asker: Text  # its name; set by the router
    wanted: WantedId  # id of the response, or the client's own id for the request
    owner: Text  # of the key that asks: others' requests are unknown to it


class TimelineTold(Message, frozen=True):
    """Answer to AskTimeline: of each gateway, by way of the router, and of the router itself."""

    number: QuestionNumber
    asker: Text
    document: Annotated[bytes, msgspec.Meta(max_length=MAX_DOCUMENT_BYTES)] = b""  # JSON; empty: it has none
    num_asked: Count | None = None  # the router: so many gateways were asked, each of which answers


class AskStandings(Message, frozen=True):
    """Gateway to router: where these requests stand."""

    number: QuestionNumber
    request_ids: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=MAX_STANDINGS)]


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request stands."""

    request_id: RequestId
    stage: Stage
    where: Text = ""  # the worker or pool that has it; empty while queued
    num_before: Count | None = None  # requests of the queue that go before it; None: not known
    num_tokens_before: Count = 0  # of prompts, expected before it is its turn; at a worker: of the others there
    start_s: Seconds | None = None  # in which it is expected to be its turn; None: not known
    latest_start_s: Seconds | None = None  # the same of best effort, if real-time requests never cease; None: no bound
    num_others: Count = 0  # requests in the same stage at the same place


class StandingsTold(Message, frozen=True):
    """Router to gateway: the standings of the requests that the router knows."""

    number: QuestionNumber
    standings: Annotated[tuple[Standing, ...], msgspec.Meta(max_length=MAX_STANDINGS)]


class NoteBuffer:
    """Notes of a room by the address of their gateway, kept until the next tick and then sent."""

    def __init__(self) -> None:
        self._pending: dict[str, list[RequestNote]] = {}

    def add(self, address: str, note: RequestNote) -> None:
        """Keep a note; dropped where there are too many."""
        notes = self._pending.setdefault(address, [])
        if len(notes) < _MAX_PENDING:
            notes.append(note)

    def take(self) -> list[tuple[str, RequestsNoted]]:
        """Return all notes, and keep none."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, {}
        return [
            (address, RequestsNoted(tuple(notes[first : first + MAX_NOTES])))
            for address, notes in pending.items()
            for first in range(0, len(notes), MAX_NOTES)
        ]

"""Stored records of files and batches, as JSON of these structs; times are Unix seconds."""

import enum
import re
from typing import Any, NewType, TypeVar

import msgspec

from alignedserve.core.errors import StorageDamaged

FileId = NewType("FileId", str)
BatchKey = NewType("BatchKey", str)  # "batch_...", as clients see it; BatchId names aligned batches

_FILE_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)
_BATCH_KEY = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)
NUM_ID_BYTES = 12
# Of all that a store of records keeps: a program refuses records of a newer version. To be raised with whatever an
# older one must not pass over, such as a new member that says when lines may start.
RECORDS_VERSION = 1


class Endpoint(enum.Enum):
    """Endpoint to which every line of a batch goes."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


class BatchStatus(enum.Enum):
    """Status of a batch: OpenAI's eight states."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TERMINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class ResultKind(enum.Enum):
    """One of a batch's two result files."""

    OUTPUT = "output"
    ERROR = "error"


class StoredRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base class of all stored records."""


class ResultView(StoredRecord, frozen=True):
    """A result file: a view of a batch's result log."""

    batch_id: BatchKey
    kind: ResultKind


class FileRecord(StoredRecord, frozen=True):
    """One file, as listed by the Files API."""

    file_id: FileId
    owner: str
    name: str  # as shown; never a path
    purpose: str
    num_bytes: int
    num_lines: int  # line ends, and a last line without one
    created_s: float
    expires_s: float | None = None
    digest: str = ""  # of an upload's bytes: tells whether two files have the same content
    num_uses: int = 0  # batches made from it; makes a concurrent deletion and creation conflict
    view: ResultView | None = None  # None: its content is a blob of its own

    def is_expired(self, now: float) -> bool:
        """Return True if the file's lifetime is over."""
        return self.expires_s is not None and now >= self.expires_s


class LineProblem(StoredRecord, frozen=True):
    """One reason why a batch failed validation."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


class Counts(StoredRecord, frozen=True):
    """Numbers of lines by outcome."""

    total: int = 0
    completed: int = 0
    failed: int = 0  # with an error response, or out of attempts
    expired: int = 0
    cancelled: int = 0

    @property
    def num_ended(self) -> int:
        return self.completed + self.failed + self.expired + self.cancelled


class Usage(StoredRecord, frozen=True):
    """Tokens of lines that have a response, and what workers computed for them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of `input_tokens`, from the prefix cache
    compute_us: int = 0  # microseconds that workers computed for them


class Risk(enum.Enum):
    """Verdict on a batch ending within its window."""

    FITS = "fits"
    AT_RISK = "at_risk"
    CANNOT_FIT = "cannot_fit"


class Eta(StoredRecord, frozen=True):
    """Estimated end of a batch, from expected lengths and the throughput that is left for it."""

    risk: Risk
    finish_s: float  # expected; for CANNOT_FIT the earliest possible end
    is_measured: bool  # from lines that ran here; else assumed from the configuration
    estimated_s: float = msgspec.field(name="quoted_s")
    fitting_s: float | None = None  # where it does not fit: the nearest end of a window that would


class Progress(StoredRecord, frozen=True):
    """Progress of a batch. Written only by the driver; follows from the result log."""

    counts: Counts = Counts()
    usage: Usage = Usage()
    num_validated: int = 0  # lines read so far, while validating
    log_bytes: int = 0  # of the result log, durable
    output_bytes: int = 0
    error_bytes: int = 0
    eta: Eta | None = msgspec.field(default=None, name="quote")
    paused: str | None = None  # why the batch makes no progress now


class BatchTotals(StoredRecord, frozen=True):
    """Totals of all batches since the state folder was created, and their current state. Written by the driver."""

    completed: int = 0  # lines, like the next three
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    compute_us: int = 0
    num_waiting: int = 0  # lines of batches that are not over
    num_in_flight: int = 0
    num_batches: dict[str, int] = {}  # by status, those that are not over
    num_at_risk: int = 0  # batches whose estimate does not say that they fit
    oldest_waiting_s: float = 0.0  # age of the oldest batch with a waiting line
    is_paused: bool = False  # results cannot be written

    def with_ended(self, counts: Counts, usage: Usage) -> "BatchTotals":
        """Return the totals after these lines ended."""
        return msgspec.structs.replace(
            self,
            completed=self.completed + counts.completed,
            failed=self.failed + counts.failed,
            expired=self.expired + counts.expired,
            cancelled=self.cancelled + counts.cancelled,
            input_tokens=self.input_tokens + usage.input_tokens,
            output_tokens=self.output_tokens + usage.output_tokens,
            compute_us=self.compute_us + usage.compute_us,
        )


class BatchRecord(StoredRecord, frozen=True):
    """One batch."""

    batch_id: BatchKey
    owner: str
    endpoint: Endpoint
    input_file_id: FileId
    output_file_id: FileId  # reserved from the start; listed once it is not empty
    error_file_id: FileId
    completion_window: str  # as the client wrote it
    created_s: float
    expires_s: float
    output_lifetime_s: float | None  # of both result files, from their creation
    input_bytes: int
    input_lines: int  # of the file, blank ones included
    fingerprint: str  # of the request without its file, to recognize a repeated idempotency key
    input_digest: str = ""  # of the file, for the same: it may be deleted by then
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    model: str | None = None  # that every line names; None: several, or it is not validated yet
    lines_by_model: dict[str, int] = {}  # where they name several
    problems: tuple[LineProblem, ...] = ()
    num_lines: int = 0  # known once validated
    in_progress_s: float | None = None
    finalizing_s: float | None = None
    completed_s: float | None = None
    failed_s: float | None = None
    expired_s: float | None = None
    cancelling_s: float | None = None
    cancelled_s: float | None = None
    not_before_s: float | None = None  # no line starts before
    hours: str | None = None  # as the client wrote them; None: lines start at any hour
    priority: int = 0  # among batches of its owner: smaller goes first
    paused_s: float | None = None  # its owner has paused it
    is_expiring: bool = False  # finalizing because its window has expired

    @property
    def is_over(self) -> bool:
        """Return True if the batch has ended."""
        return self.status in TERMINAL

    @property
    def is_ending(self) -> bool:
        """Return True if no line of the batch starts any more."""
        return self.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)

    @property
    def over_s(self) -> float:
        """Return the time at which the batch ended; it must be over."""
        ends = (self.failed_s, self.completed_s, self.expired_s, self.cancelled_s)
        return next(end_s for end_s in ends if end_s is not None)

    def model_shares(self) -> dict[str, float]:
        """Return which part of the lines names each model; before validation all count for an unnamed one."""
        num_lines = sum(self.lines_by_model.values())
        if num_lines:
            return {name: count / num_lines for name, count in self.lines_by_model.items()}
        return {self.model or "": 1.0}

    def result_file(self, kind: ResultKind) -> FileId:
        return self.output_file_id if kind is ResultKind.OUTPUT else self.error_file_id


RecordT = TypeVar("RecordT", bound=StoredRecord)
_ENCODER = msgspec.json.Encoder()


def encode(record: StoredRecord) -> bytes:
    return _ENCODER.encode(record)


def decode(raw: bytes, kind: type[RecordT]) -> RecordT:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise StorageDamaged(f"a stored {kind.__name__} cannot be read: {error}") from error


def parsed_file_id(text: str) -> FileId | None:
    """Return the text as a file id if it is a valid one; nothing else ever becomes a key or a path."""
    return FileId(text) if _FILE_ID.fullmatch(text) else None


def parsed_batch_key(text: str) -> BatchKey | None:
    """Return the text as a batch key if it is a valid one."""
    return BatchKey(text) if _BATCH_KEY.fullmatch(text) else None


def file_id_of(randomness: bytes) -> FileId:
    """Make a file id from random bytes."""
    return FileId(f"file-{randomness[:NUM_ID_BYTES].hex()}")


def batch_key_of(randomness: bytes) -> BatchKey:
    """Make a batch key from random bytes."""
    return BatchKey(f"batch_{randomness[:NUM_ID_BYTES].hex()}")


BACKGROUND = "background"
STREAMED_RESPONSE = "streamed_response"  # field of a line whose events are written


def api_owner(client: str, api: str) -> str:
    """Return the owner of the batches that an API makes for this client."""
    return f"{client}/{api}"


def client_of(owner: str) -> str:
    """Return the client whose batch this owner has."""
    return owner.partition("/")[0]


def is_client(owner: str) -> bool:
    """Return True for a client itself: its files are in its own list, and its own to delete."""
    return client_of(owner) == owner


def take_streamed_response(body: dict[str, Any], owner: str) -> dict[str, Any] | None:
    """Take from a line's body the response as it was queued; None where no events are to be written. Only lines that a
    gateway makes have it: in those of clients, whose owners are others, it is an unknown field."""
    return body.pop(STREAMED_RESPONSE, None) if owner.endswith(f"/{BACKGROUND}") else None

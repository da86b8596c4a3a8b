"""What is kept of files and batches. Stored as JSON of these structs; times are Unix seconds."""

import enum
import re
from typing import Any, NewType

import msgspec

from alignedserve.core.errors import StorageDamaged

FileId = NewType("FileId", str)
BatchKey = NewType("BatchKey", str)  # "batch_...", as clients see it; BatchId is of aligned batches

_FILE_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)
_BATCH_KEY = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)
NUM_ID_BYTES = 12


class Endpoint(enum.Enum):
    """Where every line of a batch goes."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


class BatchStatus(enum.Enum):
    """OpenAI's eight states."""

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
    """In which of a batch's two files a line's terminal record stands."""

    OUTPUT = "output"
    ERROR = "error"


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything that is stored."""


class ResultView(Kept, frozen=True):
    """A file that is one side of a batch's result log."""

    batch_id: BatchKey
    kind: ResultKind


class FileRecord(Kept, frozen=True):
    """One file that somebody can name."""

    file_id: FileId
    owner: str
    name: str  # as shown; never a path
    purpose: str
    num_bytes: int
    num_lines: int  # line ends, and a last line without one
    created_s: float
    expires_s: float | None = None
    digest: str = ""  # of an upload's bytes: one and the same file may have come twice
    num_uses: int = 0  # batches made from it; a deletion and a creation cannot miss each other
    view: ResultView | None = None  # None: its bytes lie in a blob of its own


class LineProblem(Kept, frozen=True):
    """Why a batch failed validation."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


class Counts(Kept, frozen=True):
    """Lines by how they ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0  # an error of their own
    expired: int = 0
    cancelled: int = 0

    @property
    def num_ended(self) -> int:
        """Lines that have their terminal record."""
        return self.completed + self.failed + self.expired + self.cancelled


class Usage(Kept, frozen=True):
    """Tokens of lines that were answered."""

    input_tokens: int = 0
    output_tokens: int = 0


class Risk(enum.Enum):
    """Whether a batch ends in time."""

    FITS = "fits"
    AT_RISK = "at_risk"
    CANNOT_FIT = "cannot_fit"


class Quote(Kept, frozen=True):
    """When a batch is expected to end, from predicted lengths and the capacity that is left for it."""

    risk: Risk
    finish_s: float  # expected; for CANNOT_FIT the time before which it cannot end
    is_measured: bool  # of lines that ran here; else assumed from the cluster's size
    quoted_s: float


class Progress(Kept, frozen=True):
    """How far a batch has come. Written by its driver only; everything in it follows from its result log."""

    counts: Counts = Counts()
    usage: Usage = Usage()
    num_validated: int = 0  # lines looked at so far, while validating
    log_bytes: int = 0  # of the result log, durable
    output_bytes: int = 0
    error_bytes: int = 0
    quote: Quote | None = None
    paused: str | None = None  # why nothing moves now
    updated_s: float = 0.0


class BatchTotals(Kept, frozen=True):
    """What batches have come to since the state was made, and where they stand. Written by the driver."""

    completed: int = 0  # lines, like the next three
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    num_waiting: int = 0  # lines of batches that are not over
    num_in_flight: int = 0
    num_batches: dict[str, int] = {}  # by status, those that are not over
    num_at_risk: int = 0  # batches whose quote does not say that they fit
    oldest_waiting_s: float = 0.0  # since the creation of the oldest batch with a line that nobody runs yet
    is_paused: bool = False  # nothing can be written

    def with_ended(self, counts: Counts, usage: Usage) -> "BatchTotals":
        """So many more lines ended."""
        return msgspec.structs.replace(
            self,
            completed=self.completed + counts.completed,
            failed=self.failed + counts.failed,
            expired=self.expired + counts.expired,
            cancelled=self.cancelled + counts.cancelled,
            input_tokens=self.input_tokens + usage.input_tokens,
            output_tokens=self.output_tokens + usage.output_tokens,
        )


class BatchRecord(Kept, frozen=True):
    """One batch."""

    batch_id: BatchKey
    owner: str
    endpoint: Endpoint
    input_file_id: FileId
    output_file_id: FileId  # reserved from the start; a file once there is something in it
    error_file_id: FileId
    completion_window: str  # as the client wrote it
    created_s: float
    expires_s: float
    output_lifetime_s: float | None  # of both result files, from their creation
    input_bytes: int
    input_lines: int  # of the file, blank ones included
    fingerprint: str  # of what was asked for but the file: an idempotency key means one request
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    model: str | None = None
    problems: tuple[LineProblem, ...] = ()
    num_lines: int = 0  # known once validated
    in_progress_s: float | None = None
    finalizing_s: float | None = None
    completed_s: float | None = None
    failed_s: float | None = None
    expired_s: float | None = None
    cancelling_s: float | None = None
    cancelled_s: float | None = None
    is_expiring: bool = False  # finalizing because its window is over

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in TERMINAL

    @property
    def over_s(self) -> float:
        """Since when. Of a batch that is over."""
        ends = (self.failed_s, self.completed_s, self.expired_s, self.cancelled_s)
        return next(end_s for end_s in ends if end_s is not None)

    def result_file(self, kind: ResultKind) -> FileId:
        """The file of these results."""
        return self.output_file_id if kind is ResultKind.OUTPUT else self.error_file_id


_ENCODER = msgspec.json.Encoder()


def encode(record: Kept) -> bytes:
    """As it is stored."""
    return _ENCODER.encode(record)


def decode(raw: bytes, kind: type[Any]) -> Any:
    """What was stored. Raises StorageDamaged; nothing in it is executed or looked up."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise StorageDamaged(f"a stored {kind.__name__} cannot be read: {error}") from error


def parsed_file_id(text: str) -> FileId | None:
    """The id, if it has the form of one; nothing else ever becomes a key or a path."""
    return FileId(text) if _FILE_ID.fullmatch(text) else None


def parsed_batch_key(text: str) -> BatchKey | None:
    """The id, if it has the form of one."""
    return BatchKey(text) if _BATCH_KEY.fullmatch(text) else None


def file_id_of(randomness: bytes) -> FileId:
    """A new id."""
    return FileId(f"file-{randomness[:NUM_ID_BYTES].hex()}")


def batch_key_of(randomness: bytes) -> BatchKey:
    """A new id."""
    return BatchKey(f"batch_{randomness[:NUM_ID_BYTES].hex()}")

"""Interfaces that batches depend on: record store, blob store, line runner. Contract suites run on every store."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from alignedserve.batches.records import BatchKey, Endpoint, FileId, ResultKind
from alignedserve.core.errors import AlignedServeError
from alignedserve.messages.state import Change

# --- state --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page:
    """Part of an ordered list."""

    members: tuple[str, ...]
    has_more: bool


class RecordStore(Protocol):
    """Small values by key, and ordered lists of names. Every method raises StoreUnavailable when it cannot answer. Keys
    and members are generated here and never contain client input."""

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values in order, all as of one moment; None for a missing key."""

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """Apply all changes atomically, durable when this returns True. False: nothing was applied, because a key of
        `unchanged` has another value by now. After StoreUnavailable either all or none of them are applied."""

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        """Return members behind `after` (None: from the beginning), or None if `after` is not in the list."""

    async def close(self) -> None:
        """Close connections."""


# --- contents -----------------------------------------------------------------------------------------------------


class BlobWriter(Protocol):
    """An upload in progress. It is invisible until `commit`; `discard` may be repeated, and is harmless after it."""

    async def write(self, chunk: bytes) -> None:
        """Append bytes. Raises StorageFull."""

    async def commit(self) -> None:
        """Make the blob durable under its id. Raises StorageFull."""

    async def discard(self) -> None:
        """Remove what was written, unless it was committed."""


class ContentStore(Protocol):
    """Files by id, as gateways use them. A blob never changes once it is committed."""

    async def begin(self, file_id: FileId) -> BlobWriter:
        """Start a new blob. Raises StorageFull."""

    def chunks(self, file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
        """Yield the blob's bytes from `start` on. Raises StorageDamaged for a missing blob."""

    async def remove(self, file_id: FileId) -> None:
        """Delete a blob; may be repeated."""


class BlobStore(ContentStore, Protocol):
    """Files by id, as the driver of batches uses them."""

    async def open(self, file_id: FileId) -> "BlobReader":
        """Open a blob for random access. Raises StorageDamaged for a missing blob."""

    async def committed_before(self, age_s: float) -> list[FileId]:
        """List blobs that are at least this old."""

    async def remove_abandoned(self, age_s: float) -> int:
        """Remove uncommitted uploads without a write for this long; return their number."""


class BlobReader(Protocol):
    """Random access to one blob, quick enough to be called on an event loop."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Read `length` bytes at `offset`."""

    def close(self) -> None:
        """Close the file."""


class ResultLogs(Protocol):
    """Result logs as files of results, for their readers."""

    def chunks(self, batch_id: BatchKey, kind: ResultKind, log_bytes: int, start: int = 0) -> AsyncIterator[bytes]:
        """Yield one result file, from its byte `start` on, as the log's first `log_bytes` show it. Raises
        StorageDamaged at a damaged record, after everything before it."""

    async def remove(self, batch_id: BatchKey) -> None:
        """Delete a batch's log; may be repeated."""


# --- running a line -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line to be run in the cluster."""

    endpoint: Endpoint
    request_id: str
    body: dict[str, Any] = field(repr=False)  # the line's `body`; the runner may change it
    owner: str  # of the batch: the client whose key it was created with
    deadline_s: float | None = None  # from now
    line_id: str = ""  # by which its owner may ask for an explanation; empty: none


@dataclass(frozen=True, slots=True)
class LineResponse:
    """The final response to a line: repeating the request would not change it."""

    status_code: int
    body: bytes = field(repr=False)
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of `input_tokens`, from the prefix cache
    compute_us: int = 0  # microseconds that workers computed for it

    @property
    def is_success(self) -> bool:
        """Return True if it belongs in the output file."""
        return self.status_code == 200


class ClusterTotals(NamedTuple):
    """Sums of all decode workers of one model since its router started."""

    num_tokens: int  # generated
    wall_s: float
    idle_s: float  # of the wall time: there was no request


class ModelState(NamedTuple):
    """A model that lines may name, with the latest report of its router."""

    num_places: int  # requests that its workers run together
    totals: ClusterTotals


class LineRejected(AlignedServeError):
    """The cluster is full or has no router: retry later. Does not count as an attempt."""

    def __init__(self, reason: str, *, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class LineFailed(AlignedServeError):
    """An accepted line did not finish, perhaps because of its content: attempts are counted."""


class LineRunner(Protocol):
    """Runs lines in the cluster."""

    async def run(self, request: LineRequest) -> LineResponse:
        """Run one line. Raises LineRejected or LineFailed. Cancelling it frees everything."""

    def model_states(self) -> Mapping[str, ModelState]:
        """Return the models whose routers can be reached now, by name, with all their work, also outside batches."""

    def may_use(self, owner: str, name: str) -> bool:
        """Return whether lines of this owner may name this model."""

    def model_of(self, name: str) -> str:
        """Return the base model of a name: an adapter's model, or the name itself."""

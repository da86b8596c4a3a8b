"""Where files and state lie, and who runs a line: the ports of batches. Contract suites run on every implementation."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from alignedserve.batches.records import Endpoint, FileId
from alignedserve.core.errors import AlignedServeError

# --- state --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Put:
    """Keep this value under this key, for a time or for ever."""

    key: str
    value: bytes
    lifetime_s: float | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget this key. Forgetting what is not there is no error."""

    key: str


@dataclass(frozen=True, slots=True)
class Enlist:
    """Put a member into an ordered list, or move it; members of one score are ordered by themselves."""

    index: str
    member: str
    score: float


@dataclass(frozen=True, slots=True)
class Delist:
    """Take a member out of an ordered list."""

    index: str
    member: str


Change = Put | Remove | Enlist | Delist


@dataclass(frozen=True, slots=True)
class Page:
    """Part of an ordered list."""

    members: tuple[str, ...]
    has_more: bool


class RecordStore(Protocol):
    """Small values by key, and ordered lists of names. Every method raises StoreUnavailable when it cannot answer.

    Keys and members are made by us and never hold what a client wrote.
    """

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values, in order; None where there is none. Of one moment."""

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """Do all of the changes at once, durably when this returns True. False: nothing was done, because a key of
        `unchanged` has another value by now. After StoreUnavailable they may or may not be done: all or none."""

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        """Members behind `after` (None: from the beginning). None: `after` is not in the list."""

    async def close(self) -> None:
        """Let go of connections."""


# --- contents -----------------------------------------------------------------------------------------------------


class BlobWriter(Protocol):
    """A file on its way in. It is nowhere until `commit`; `discard` may be repeated and follows `commit` harmlessly."""

    async def write(self, chunk: bytes) -> None:
        """Add bytes. Raises StorageFull."""

    async def commit(self) -> None:
        """Make it durable under its id. Raises StorageFull."""

    async def discard(self) -> None:
        """Leave nothing."""


class BlobStore(Protocol):
    """Files by id. A blob never changes once it is committed."""

    async def begin(self, file_id: FileId) -> BlobWriter:
        """A new blob. Raises StorageFull."""

    def chunks(self, file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
        """Its bytes, from this one on. Raises StorageDamaged where there is no such blob."""

    def open(self, file_id: FileId) -> "BlobReader":
        """Random access. Raises StorageDamaged where there is no such blob."""

    async def remove(self, file_id: FileId) -> None:
        """Forget it; may be repeated."""

    async def committed_before(self, age_s: float) -> list[FileId]:
        """Blobs that have been there for this long."""

    async def remove_abandoned(self, age_s: float) -> int:
        """Remove uploads that were begun and never committed, and that nobody has written to for this long; how many
        there were."""


class BlobReader(Protocol):
    """Random access to one blob, quick enough to be called on an event loop."""

    def read_at(self, offset: int, length: int) -> bytes:
        """These bytes."""

    def close(self) -> None:
        """Give it back."""


# --- running a line -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineCall:
    """One line on its way into the cluster."""

    endpoint: Endpoint
    request_id: str
    body: dict[str, Any] = field(repr=False)  # the line's `body`; the runner may change it
    deadline_s: float | None = None  # from now


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a line's call came to: for ever, however often it would be repeated."""

    status_code: int
    body: bytes = field(repr=False)
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_success(self) -> bool:
        """Whether it goes to the output file."""
        return self.status_code == 200


@dataclass(frozen=True, slots=True)
class ClusterTotals:
    """Sums of all decode workers since the router started."""

    num_tokens: int  # generated
    wall_s: float
    idle_s: float  # of the wall time: nobody had asked for anything


class LineNotTaken(AlignedServeError):
    """The cluster has no room, or no router: the same again later. Says nothing against the line."""

    def __init__(self, reason: str, *, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class LineBroken(AlignedServeError):
    """It was taken and did not come to an end. Perhaps by its own doing: tries are counted."""


class LineRunner(Protocol):
    """Runs lines in the cluster."""

    async def run(self, call: LineCall) -> LineAnswer:
        """Raises LineNotTaken or LineBroken. Cancelling it frees everything."""

    def cluster_totals(self) -> ClusterTotals | None:
        """What decode workers have done, for whomever; None while the cluster cannot be asked."""

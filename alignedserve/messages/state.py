"""Messages of the state server: calls of gateways for what is kept on the head, and their answers.

A call is answered once, in any order; one whose link is lost may or may not have been carried out.
"""

from typing import Annotated

import msgspec

from alignedserve.keys.entry import MAX_KEYS_BYTES
from alignedserve.keys.open_counts import Verdict
from alignedserve.keys.quotas import MAX_CHARGES
from alignedserve.messages.fields import Count, Seconds, Text
from alignedserve.messages.handshake import Ping
from alignedserve.messages.wire import Message

MAX_CHUNK_BYTES = 1 << 20

_Key = Annotated[str, msgspec.Meta(max_length=256)]
_Value = Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
_Cost = Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)]
_Owed = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Charges = Annotated[tuple[tuple[_Key, _Cost, _Owed], ...], msgspec.Meta(max_length=MAX_CHARGES)]
_OpenLimit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Open = Annotated[dict[_Key, Count], msgspec.Meta(max_length=65_536)]
_Chunk = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK_BYTES)]
_Clock = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Score = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class _Part(msgspec.Struct, frozen=True, array_like=True, tag=True): ...


# --- changes of records


class SetValue(_Part, frozen=True):
    """Store a value under a key, for a limited time or forever."""

    key: _Key
    value: _Value
    lifetime_s: Seconds | None = None


class DeleteValue(_Part, frozen=True):
    """Delete a key. Deleting a missing key is no error."""

    key: _Key


class AddToIndex(_Part, frozen=True):
    """Add a member to an ordered list, or move it; members with equal scores are ordered by name."""

    index: _Key
    member: _Key
    score: _Score


class RemoveFromIndex(_Part, frozen=True):
    """Remove a member from an ordered list."""

    index: _Key
    member: _Key


Change = SetValue | DeleteValue | AddToIndex | RemoveFromIndex

# --- calls


class ReadValues(_Part, frozen=True):
    """Read the values of these keys. Answered by Values."""

    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=100_000)]


class CommitChanges(_Part, frozen=True):
    """Apply all changes if these keys have these values. Answered by Done."""

    changes: tuple[Change, ...]
    unchanged: tuple[tuple[_Key, _Value | None], ...]


class ReadPage(_Part, frozen=True):
    """Read a part of an ordered list. Answered by PageRead."""

    index: _Key
    after: _Key | None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    newest_first: bool


class BeginUpload(_Part, frozen=True):
    """Begin a file's content. Answered by Done; it is dropped when the link is lost before FinishUpload."""

    file_id: _Key


class WriteUpload(_Part, frozen=True):
    """Append to a content that was begun. Answered by Done."""

    file_id: _Key
    chunk: _Chunk


class FinishUpload(_Part, frozen=True):
    """Make a content durable, or drop it. Answered by Done."""

    file_id: _Key
    is_committed: bool


class ReadContent(_Part, frozen=True):
    """Read a part of a file's content. Answered by ChunkRead, which is empty at the end."""

    file_id: _Key
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]


class RemoveContent(_Part, frozen=True):
    """Remove a file's content; may be repeated. Answered by Done."""

    file_id: _Key


class ReadResults(_Part, frozen=True):
    """Read a part of a result file, as the log's first `log_bytes` show it. Answered by ChunkRead, empty at the end."""

    batch_id: _Key
    is_output: bool  # the output file, or the error file
    log_bytes: Count
    start: Count


class RemoveResults(_Part, frozen=True):
    """Remove a batch's result log; may be repeated. Answered by Done."""

    batch_id: _Key


class UseQuota(_Part, frozen=True):
    """Count charges of a key; without any, only ask for a sign of life. Answered by QuotaAnswer.

    Sent by every gateway several times a second (keys/quotas.py).
    """

    seen_s: _Clock | None  # the time of the latest answer that has arrived
    charges: _Charges = ()  # a limit, part of it (below zero: given back), part that the gateway's requests owe already


class StateOpen(_Part, frozen=True):
    """State how many requests of keys a gateway has open, and ask for one more. Answered by OpenStated.

    Sent by every gateway several times a second, and for each request of a key with such a limit (keys/open_counts.py).
    """

    process_id: _Key  # differs after a restart
    number: Count  # of this process's statements
    num_open: _Open
    is_whole: bool  # of other keys nothing is open; else they are as they were
    wish: tuple[_Key, _OpenLimit] | None = None  # a key of which one more asks to be let in, counted already; its limit


class ReadKeys(_Part, frozen=True):
    """Read clients' keys, in parts, if they are others than the caller has. Answered by KeysRead."""

    known: _Key  # the version that the caller has; empty: none
    start: Count = 0


Call = (
    ReadValues
    | CommitChanges
    | ReadPage
    | BeginUpload
    | WriteUpload
    | FinishUpload
    | ReadContent
    | RemoveContent
    | ReadResults
    | RemoveResults
    | UseQuota
    | StateOpen
    | ReadKeys
)

# --- answers


class Values(_Part, frozen=True):
    """The values in the order of the keys; None for a missing key."""

    values: tuple[_Value | None, ...]


class Done(_Part, frozen=True):
    """Carried out; False: a value had changed."""

    is_done: bool = True


class PageRead(_Part, frozen=True):
    """A part of an ordered list; None: the member to continue behind is not in it."""

    members: tuple[_Key, ...] | None
    has_more: bool = False


class ChunkRead(_Part, frozen=True):
    """A part of a content."""

    chunk: _Chunk


class QuotaAnswer(_Part, frozen=True):
    """The state server's time, whether the call was recent, how long its key has to wait (0: counted), what it owes."""

    clock_s: _Clock
    is_counted: bool  # false: the call may be old; ask again
    wait_s: Seconds = 0.0
    owed: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=MAX_CHARGES)] = ()  # by limit


class OpenStated(_Part, frozen=True):
    """What becomes of the wish; IN where there was none."""

    verdict: Verdict


class KeysRead(_Part, frozen=True):
    """A part of the text of clients' keys, which hold digests and no secrets; empty where the caller has them."""

    version: _Key  # of the keys of now; empty: there are none yet
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEYS_BYTES)] = 0  # of the whole text
    chunk: _Chunk = b""


class CallFailed(_Part, frozen=True):
    """Not carried out, or not known to be; `error` names a StorageError."""

    error: Text
    reason: Text


Answer = Values | Done | PageRead | ChunkRead | QuotaAnswer | OpenStated | KeysRead | CallFailed

# --- messages


class StateCall(Message, frozen=True):
    """Gateway to state server: do this."""

    call_id: Count
    call: Call


class StateAnswer(Message, frozen=True):
    """State server to gateway: how it went."""

    call_id: Count
    answer: Answer


StateServerInbound = StateCall | Ping
StateClientInbound = StateAnswer | Ping

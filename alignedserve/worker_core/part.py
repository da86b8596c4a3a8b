"""Events and commands of all worker logics, and the base of their parts. A part takes some of the events."""

from collections.abc import Sequence

from alignedserve.core.ids import RequestId
from alignedserve.messages.events import CommonEvent, Dial, HangUp, Send, SendTo, StopDialling
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    CloseBuffer,
    IterationCompleted,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    RunIteration,
    UnmapArena,
)

WorkerEvent = CommonEvent | IterationCompleted | BlocksLoaded | BlocksOffloaded | BlocksRelayed | BufferOpened
CopyCommand = LoadBlocks | OffloadBlocks | RelayBlocks | MapArena | UnmapArena | OpenBuffer | CloseBuffer
WorkCommand = RunIteration | CopyCommand
WorkerCommand = Send | SendTo | Dial | StopDialling | HangUp | WorkCommand
Commands = Sequence[WorkerCommand]


class WorkerPart:
    """A part of a worker's logic. A subclass overrides what it takes part in."""

    def takes(self, event: WorkerEvent) -> bool:
        """Return whether the event is about this part. Of several parts the first takes it."""
        raise NotImplementedError

    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        raise NotImplementedError

    def leave(self, now: float) -> Commands:
        """Take requests out that leave with their caches; called while no iteration is in flight."""
        return ()

    def abort(self, request_id: RequestId, attempt: int | None) -> Commands:
        """Give up a request; with an attempt, only that attempt and earlier ones."""
        return ()

    def abort_all(self, now: float) -> Commands:
        """Give up what a new router does not know of."""
        return ()

    def tick(self, now: float) -> Commands:
        return ()

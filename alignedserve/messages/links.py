"""The closed union of messages that each component accepts.

The messages themselves: gateways.py (gateways), workers.py (workers), caches.py (blocks), pools.py (pools),
request_notes.py (the course of single requests).

KV never travels here (it is in the pool's arena), and tokens never pass through the router.

Links are independent, so a message about a request can arrive after the request has moved on. Every message about a
dispatched request carries its `attempt` (core/lifecycle.py): one with a smaller number than the known one is stale. It
is ignored, or answered by telling the sender to release that attempt and earlier ones.
"""

from alignedserve.messages.caches import (
    ArenaOffered,
    BatchGranted,
    BlocksPrefetched,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelPrefetch,
    CancelReservation,
    CopyGranted,
    CopyMissing,
    DecodePace,
    FetchCopy,
    LeasesReleased,
    LeasesReturned,
    PrefetchBlocks,
    RequestReturned,
    ReservationRefused,
    ReserveBlocks,
    ReturnRequest,
)
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    GatewayRegistered,
    PromptScored,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokensEmitted,
)
from alignedserve.messages.handshake import Ping
from alignedserve.messages.pools import (
    BatchFormed,
    BatchReceived,
    CopyKept,
    CopyLost,
    DropRequest,
    FormBatch,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.prefixes import (
    FindPrefix,
    PrefixBlocksChanged,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixReleased,
    StorePrefixBlocks,
)
from alignedserve.messages.request_notes import AskStandings, AskTimeline, RequestsNoted, StandingsTold, TimelineTold
from alignedserve.messages.workers import (
    AttemptFailed,
    BlocksFetched,
    IterationLogReport,
    MoveRequest,
    PeerNeeded,
    PeersChanged,
    PrefillCompleted,
    PrefillRequest,
    RegistrationRefused,
    RequestFinished,
    RequestMoved,
    RequestPreempted,
    RequestStayed,
    SetPredictedLength,
    WorkerLoad,
    WorkerRegistered,
)

RouterInbound = (
    GatewayRegistered
    | SubmitRequest
    | ResumeRequest
    | AbortRequest
    | AttemptFailed
    | WorkerRegistered
    | PrefillCompleted
    | RequestFinished
    | RequestPreempted
    | RequestMoved
    | RequestStayed
    | WorkerLoad
    | IterationLogReport
    | PrefixBlocksChanged
    | BlocksFetched
    | PoolRegistered
    | RequestPooled
    | BatchFormed
    | BatchReceived
    | CopyKept
    | CopyLost
    | PoolLoad
    | AskTimeline
    | TimelineTold
    | AskStandings
    | Ping
)
GatewayInbound = (
    RequestRejected
    | RequestFailed
    | RequestInterrupted
    | ClusterStatus
    | TokensEmitted
    | PromptScored
    | RequestsNoted
    | AskTimeline
    | TimelineTold
    | StandingsTold
    | Ping
)
PoolInbound = (
    ReserveBlocks
    | CancelReservation
    | BlocksWritten
    | LeasesReleased
    | LeasesReturned
    | DecodePace
    | FetchCopy
    | FormBatch
    | SetPredictedLength
    | DropRequest
    | StorePrefixBlocks
    | PrefixBlocksWritten
    | FindPrefix
    | PrefixReleased
    | RegistrationRefused
    | Ping
)
PrefillWorkerInbound = (
    PrefillRequest
    | SetPredictedLength
    | AbortRequest
    | ArenaOffered
    | BlocksReserved
    | ReservationRefused
    | BlocksTaken
    | CopyGranted
    | CopyMissing
    | PrefetchBlocks
    | CancelPrefetch
    | ReturnRequest
    | RegistrationRefused
    | Ping
)
DecodeWorkerInbound = (
    PrefillRequest
    | SetPredictedLength
    | AbortRequest
    | ArenaOffered
    | BatchGranted
    | ReserveBlocks
    | CancelReservation
    | BlocksWritten
    | BlocksPrefetched
    | RequestReturned
    | BlocksReserved
    | ReservationRefused
    | BlocksTaken
    | CopyGranted
    | CopyMissing
    | MoveRequest
    | PrefixBlocksReserved
    | PrefixFound
    | PeersChanged
    | PeerNeeded
    | RegistrationRefused
    | Ping
)

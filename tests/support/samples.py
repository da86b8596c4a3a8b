"""Small requests and one example of every message, for tests that must spell out exactly what is said."""

from typing import Any

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BatchId, BlockId, LeaseId, RequestId, WorkerName
from alignedserve.core.lifecycle import STEPS_PER_EPOCH, Stage
from alignedserve.core.request import FinishReason, Request, RequestClass, SamplingParams, Slo, TokenLogprob
from alignedserve.messages import blocks as block_messages
from alignedserve.messages import handshake, links
from alignedserve.messages import state as state_messages
from alignedserve.messages.blocks import (
    BlocksAnswered,
    BlocksCopied,
    DeviceMemoryHandle,
    NamedBlocks,
    OpenTransfer,
    ReadBlocks,
    RendezvousValue,
    TransferOpened,
    TransferRefused,
    WriteBlocks,
)
from alignedserve.messages.caches import (
    ArenaOffered,
    BatchGranted,
    BlockCopy,
    BlockRun,
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
    Handoff,
    LeasesReleased,
    LeasesReturned,
    PrefetchBlocks,
    RequestReturned,
    ReservationRefused,
    ReserveBlocks,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.cluster_view import (
    AdapterLoad,
    AdapterLoads,
    BatchShape,
    FormedBatch,
    IterationLogTotals,
    LengthLeaf,
    LengthTree,
    PlacedTree,
    RequestTimes,
    TierLoad,
    TimeSpread,
    WorkerSpeed,
    WorkerStatus,
)
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    GatewayRegistered,
    LengthTotals,
    PrefixTotals,
    PromptScored,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokenDelta,
    TokensEmitted,
    WorkerLean,
)
from alignedserve.messages.handshake import Challenge, Hello, Ping, Role, Welcome
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
    PrefixBlock,
    PrefixBlocksChanged,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixPart,
    PrefixReleased,
    ReservedPart,
    StorePrefixBlocks,
)
from alignedserve.messages.request_notes import (
    AskStandings,
    AskTimeline,
    Cause,
    RequestNote,
    RequestsNoted,
    Standing,
    StandingsTold,
    Step,
    TimelineTold,
)
from alignedserve.messages.state import QuotaAnswer, StateAnswer, StateCall, UseQuota
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    AttemptFailed,
    BlocksFetched,
    DecodeDelay,
    DecodedRequest,
    IterationLogReport,
    JoinedBatch,
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

GATEWAY, ROUTER, POOL, PREFILL, DECODE = "gateway-0", "router", "pool-0", "prefill-0", "decode-0"
REPLY_TO = "unix:gateway"
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")


def request(name: str = "r1", prompt_len: int = 4, max_tokens: int = 8, **changes: Any) -> Request:
    """Build a greedy request whose prompt is 10, 11, 12 and so on; it arrives at 0."""
    sampling = changes.pop("sampling", SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(range(10, 10 + prompt_len)),
        sampling=sampling,
        reply_to=changes.pop("reply_to", REPLY_TO),
        arrival_s=changes.pop("arrival_s", 0.0),
        **changes,
    )


def epoch(number: int, step: int = 0) -> int:
    """Return the attempt number of a request's n-th epoch, so many steps along."""
    return number * STEPS_PER_EPOCH + step


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def handoff(of: Request, lease: int, *, attempt: int = 1, generated: tuple[int, ...] = (7,), **changes: Any) -> Handoff:
    """Return `of`, pooled under this lease; its blocks and their checksum are not looked at by any logic."""
    context_len = of.prompt_len + len(generated) - 1
    runs = changes.pop("runs", (BlockRun(0, 1, 0),))
    return Handoff(of, attempt, generated, LeaseId(lease), BlockCopy(lease, context_len, runs))


def worker(**changes: Any) -> WorkerRegistered:
    """Return a decode worker of 20 blocks of four tokens that runs at most four requests."""
    facts: dict[str, Any] = {"num_blocks": 20, "block_size": 4, "max_running_requests": 4, "pool_name": POOL}
    return WorkerRegistered(**{**facts, "can_prefill": False, "can_decode": True, **changes})


TOTALS = IterationLogTotals(
    num_iterations=10,
    num_switch_iterations=2,
    num_requests=320,
    wall_s=8.0,
    nothing_to_do_s=4.0,
    waiting_for_prefill_s=1.0,
    prefetch_not_ready_s=0.5,
    turnaround_s=0.25,
    prepare_s=0.125,
    forward_s=2.0,
    sampling_s=0.125,
    misaligned_s=0.0625,
    sum_of_spreads=13.5,
    spread_counts=(1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0),
    num_ahead_iterations=7,
    sum_of_straggler_shares=2.5,
)
_FULL = Request(
    request_id=R1,
    prompt_token_ids=(5, 6, 70000),
    sampling=SamplingParams(
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        seed=-3,
        ignore_eos=True,
        stop_token_ids=(2, 3),
        logit_bias=((4, -1.5),),
        allowed_token_ids=(5, 4),
        bad_words=((7,), (8, 9)),
        num_logprobs=2,
        num_prompt_logprobs=0,
    ),
    reply_to="unix:/run/gateway-0.sock",
    arrival_s=12.5,
    request_class=RequestClass.BEST_EFFORT,
    slo=Slo(ttft_s=1.0, tpot_s=0.25, deadline_s=60.0),
    priority=-1,
    tenant="key-0",
    weight=2.5,
)
_SCORES = (TokenLogprob(6, -0.5, ((6, -0.5), (9, -1.25)), 1),)
_RUNS = (BlockRun(3, 2, 0x0123456789ABCDEF), BlockRun(9, 1, (1 << 64) - 1))
_COPY = BlockCopy(17, 40, _RUNS)
_SHAPE = BatchShape(3, 30, 32.5, 36)
_VIEW = WorkerStatus(
    DECODE,
    "node-1",
    can_prefill=False,
    is_elastic=True,
    is_draining=True,
    lean=0.5,
    num_waiting=1,
    num_running=3,
    num_places=4,
    num_blocks=20,
    num_blocks_used=9,
    num_prompt_tokens=99,
    num_tokens=320,
    wall_s=8.0,
    compute_s=2.25,
    batch=_SHAPE,
)
_TREE = LengthTree(
    65_536, 16, (LengthLeaf(0, 2, 2), LengthLeaf(9, 1, 10)), FormedBatch(BatchId(4), DECODE, 30, 37, 3, 9)
)
_LEASE, _BATCH, _NONCE = LeaseId(17), BatchId(4), bytes(range(16))
_HANDOFF = Handoff(_FULL, 3, (8, 9), _LEASE, _COPY, 6.5)
_JOINED = JoinedBatch(BatchId(2), 32, 48)

# One example of every message, with every field away from its default.
EXAMPLES: tuple[Message, ...] = (
    Challenge(1, _NONCE),
    Hello(1, Role.PREFILL_WORKER, PREFILL, bytes(32), _NONCE, POOL),
    Welcome(Role.ROUTER, ROUTER, bytes(32)),
    Ping(1.5),
    GatewayRegistered("node-1"),
    SubmitRequest(_FULL, bytes(range(16))),
    AbortRequest(R1, 3),
    RequestRejected(R1, "the queue is full", 2.5),
    RequestFailed(R1, FailureKind.WORKER_LOST, "its workers were lost again and again"),
    RequestInterrupted(R1),
    ResumeRequest(_FULL, (8, 9), 65_538, bytes(range(8)), DECODE),
    ClusterStatus(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        17,
        TOTALS,
        LengthTotals(5, 4, 60, 7.5),
        65_538,
        leans=(WorkerLean(DECODE, 0.5),),
        prefixes=PrefixTotals(80, 60, 12, 3),
        num_places=64,
        real_time=TierLoad(1, 2, 3, 4, 0.5),
        best_effort=TierLoad(5, 6, 7, 8, 1.5),
        workers=(_VIEW,),
        trees=(PlacedTree(POOL, _TREE),),
        times=RequestTimes(TimeSpread().with_time(0.75), TimeSpread().with_time(1e9), TimeSpread((1,) * 22, 2.5)),
        num_prompt_tokens=18,
        num_tokens=19,
        block_size=16,
        adapters=AdapterLoads(16, (AdapterLoad("terse", 2, 1),)),
    ),
    TokensEmitted(
        (TokenDelta(R1, 0, (6,), _SCORES), TokenDelta(R2, 7, (2,), (), FinishReason.STOP, 16, bytes(8))), (0.5, 0.25)
    ),
    PromptScored(R1, 1, _SCORES),
    WorkerRegistered(
        256,
        16,
        64,
        POOL,
        can_prefill=True,
        can_decode=False,
        layout_digest="ab" * 32,
        latest_attempt=65_538,
        can_move=True,
        node="node-1",
        num_places=48,
        decoding=(DecodedRequest(R1, 65_537, 3),),
        state_blocks=3,
    ),
    RegistrationRefused("other blocks"),
    PrefillRequest(
        _FULL, 3, (8, 9), has_copy=True, bypass_to=WorkerName(DECODE), predicted_output_len=6.5, begun_s=1.5
    ),
    SetPredictedLength(R1, 3, 6.5),
    PrefillCompleted(R1, 3, 5),
    RequestFinished(R1, 3, 9),
    MoveRequest(R1, 3, WorkerName(DECODE)),
    RequestMoved(R1, 4, 9),
    RequestStayed(R1, 3),
    RequestPreempted(R1, 3, (8, 9), handoff_refused=True),
    AttemptFailed(R1, 3, FailureKind.INTERNAL, "the model gave no usable logits"),
    WorkerLoad(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, _JOINED, 0.5, 11, 12, 13, delay=DecodeDelay(0.5, 14, 0.25, 15, 16)),
    ArenaOffered(
        "/dev/shm/alignedserve-a-pool-0.arena", 300, 8192, "ab" * 32, "unix:/a/b.sock", ("shm", "gloo"), "host/1/2"
    ),
    IterationLogReport(TOTALS, 320, _SHAPE, WorkerSpeed(0.25, 2.5, 0.125, 0.5)),
    PrefixBlocksChanged((bytes(8), b"12345678"), (b"abcdefgh",), is_complete=True),
    StorePrefixBlocks((PrefixPart(3, bytes(16), (PrefixBlock(bytes(range(16)), b"abcdefgh"),)),)),
    PrefixBlocksReserved((ReservedPart(2, LeaseId(77), blocks(4, 9)), ReservedPart(0, is_orphan=True))),
    PrefixBlocksWritten(LeaseId(77), ((1 << 64) - 1, 5)),
    FindPrefix(R1, 2, bytes(range(32))),
    PrefixFound(R1, LeaseId(78), BlockCopy(70, 16, (BlockRun(5, 1, 99),), 2), (b"abcdefgh",)),
    PrefixReleased(LeaseId(78), is_damaged=True),
    BlocksFetched(POOL, 12, 0.5),
    PeerNeeded(WorkerName("pool-1")),
    PeersChanged((WorkerName(PREFILL),), left=(WorkerName("prefill-1"),), is_complete=True),
    ReserveBlocks(R1, 3, 2, is_copy=True, may_wait=False),
    CancelReservation(R1, 3),
    BlocksReserved(R1, 3, _LEASE, 17, blocks(3, 4, 9)),
    ReservationRefused(R1, 3),
    BlocksWritten(_LEASE, BlockCopy(17, 40, _RUNS), 3, _FULL, (8, 9), 6.5, 0.25, 1.5),
    BlocksTaken(R1, 3, is_accepted=True),
    BatchGranted(_BATCH, (_HANDOFF,), joins=BatchId(2), is_aligned=False),
    LeasesReleased((_LEASE, LeaseId(18))),
    LeasesReturned((_LEASE, LeaseId(18))),
    DecodePace(0.025),
    FetchCopy(R1, 3),
    CopyGranted(_HANDOFF, 4),
    CopyMissing(R1, 3),
    PrefetchBlocks(R1, 3, _COPY, blocks(5, 6, 1), 21),
    CancelPrefetch(R1, 21),
    BlocksPrefetched(R1, 21, _COPY, is_refused=True),
    ReturnRequest(_FULL, 3, (8, 9), _COPY, 6.5),
    RequestReturned(R1, 3, ReturnOutcome.STAYED),
    PoolRegistered(300, "ab" * 32, 65_538),
    RequestPooled(R1, 3, 40, 3),
    FormBatch(_BATCH, WorkerName(DECODE), 100, 36, 12, _JOINED),
    CopyKept(R1, 3),
    BatchFormed(_BATCH, WorkerName(DECODE), ((R1, 3), (R2, 4))),
    BatchReceived(_BATCH, ((R1, 3), (R2, 4))),
    CopyLost(R1, 3, DECODE, BatchId(4)),
    PoolLoad(7, 2, 1, 3, _TREE),
    DropRequest(R1, 3),
    OpenTransfer("gloo", "ab" * 32),
    TransferOpened(300, DeviceMemoryHandle("GPU-1", b"h" * 64, 4096, 512, b"c" * 64, 8, b"e" * 64, True)),
    TransferRefused("its block layout is not the other end's"),
    RendezvousValue("0/1", b"address"),
    WriteBlocks((NamedBlocks(17, ((3, 2), (9, 1))), NamedBlocks(18, ()))),
    ReadBlocks((NamedBlocks(17, ((3, 2), (9, 1))),)),
    BlocksCopied(),
    BlocksAnswered((True, False)),
    StateCall(7, UseQuota(1.5, (("requests/a", 0.125, 0.5),))),
    StateAnswer(7, QuotaAnswer(2.5, True, 0.25, (0.5,))),
    RequestsNoted((RequestNote(R1, Step.WAITING, 7.5, 3, Cause.BLOCKS_SHORT, DECODE, 4, 5, 6, 6.5),)),
    AskTimeline(7, "gateway-1", "chatcmpl-1", "ab" * 16),
    TimelineTold(7, "gateway-1", b"{}", 2),
    AskStandings(7, (R1,)),
    StandingsTold(7, (Standing(R1, Stage.QUEUED, DECODE, 4, 5, 6.5, 7.5, 8),)),
)


def message_types() -> set[type[Message]]:
    """Return every message that is defined anywhere."""
    return {
        thing
        for module in (links, handshake, block_messages, state_messages)
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Message) and thing is not Message
    }

"""A KV pool to tell things to: eight blocks of four tokens, leases of ten seconds."""

from typing import Any

from alignedserve.core.ids import BatchId, LeaseId, RequestId, WorkerName
from alignedserve.messages.events import PeerLinked, PeerLost, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    ArenaOffered,
    BatchGranted,
    BlockCopy,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    FormBatch,
    Handoff,
    PoolLoad,
    ReserveBlocks,
)
from alignedserve.messages.wire import Message
from kvpool.logic import PoolCommand, PoolLogic, StampBlocks
from kvpool.policies.fcfs import FcfsBatchFormer
from tests.samples import DECODE, PREFILL, ROUTER, blocks, request

ARENA = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
BATCH, ASKED = BatchId(1), WorkerName(DECODE)
FORM = FormBatch(BATCH, ASKED, 100, 100)


class Desk:
    """A pool with a router, a prefill worker and a decode worker. Its counts for the router are left out."""

    def __init__(self) -> None:
        self.now = 0.0
        self.logic = PoolLogic(arena=ARENA, block_size=4, batch_former=FcfsBatchFormer(), lease_s=10.0)
        self.link(ROUTER, Role.ROUTER)
        self.link(PREFILL, Role.PREFILL_WORKER)
        self.link(DECODE, Role.DECODE_WORKER)

    def do(self, event: Any) -> list[PoolCommand]:
        commands = self.logic.on_event(event, self.now)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, PoolLoad))]

    def link(self, peer: str, role: Role) -> list[PoolCommand]:
        return self.do(PeerLinked(role, peer))

    def lose(self, peer: str) -> list[PoolCommand]:
        return self.do(PeerLost(Role.ROUTER if peer == ROUTER else Role.PREFILL_WORKER, peer))

    def hear(self, peer: str, message: Message) -> list[PoolCommand]:
        return self.do(Received(peer, message))

    def reserve(self, name: str, num_blocks: int, attempt: int = 1, peer: str = PREFILL) -> list[PoolCommand]:
        return self.hear(peer, ReserveBlocks(RequestId(name), attempt, num_blocks))

    def pool(self, name: str, num_blocks: int = 1, attempt: int = 1) -> BlocksWritten:
        """Reserve and write; what was written."""
        reserved = next(one for one in self.reserve(name, num_blocks, attempt) if isinstance(one, Send)).message
        assert isinstance(reserved, BlocksReserved)
        message = written(name, reserved)
        self.hear(PREFILL, message)
        return message


def written(name: str, reserved: BlocksReserved, **changes: Any) -> BlocksWritten:
    facts: dict[str, Any] = {
        "lease_id": reserved.lease_id,
        "generation": reserved.generation,
        "runs": tuple(BlockRun(block_id, 1, 99) for block_id in reserved.block_ids),
        "context_len": 4 * len(reserved.block_ids),
        "attempt": reserved.attempt,
        "request": request(name, prompt_len=4 * len(reserved.block_ids)),
        "generated_token_ids": (7,),
    }
    return BlocksWritten(**{**facts, **changes})


def leased(name: str, lease: int, *numbers: int, attempt: int = 1, to: str = PREFILL) -> list[PoolCommand]:
    reserved = BlocksReserved(RequestId(name), attempt, LeaseId(lease), lease, blocks(*numbers))
    return [StampBlocks(blocks(*numbers), lease), Send(to, reserved)]


def freed(*numbers: int) -> StampBlocks:
    return StampBlocks(blocks(*numbers), 0)


def taken(name: str, is_accepted: bool, attempt: int = 1) -> Send:
    return Send(PREFILL, BlocksTaken(RequestId(name), attempt, is_accepted))


def handoff_of(content: BlocksWritten) -> Handoff:
    return Handoff(
        content.request,
        content.attempt,
        content.generated_token_ids,
        content.lease_id,
        BlockCopy(content.generation, content.context_len, content.runs),
    )


def grants(commands: list[PoolCommand]) -> list[Handoff]:
    sent = [one.message for one in commands if isinstance(one, Send)]
    return [handoff for one in sent if isinstance(one, BatchGranted) for handoff in one.handoffs]

"""A KV pool to tell things to: eight blocks of four tokens, leases of ten seconds. r1's first attempt is L1."""

from typing import Any

from msgspec.structs import replace

from alignedserve.core.ids import BatchId, LeaseId, RequestId, WorkerName
from alignedserve.core.request import Request
from alignedserve.messages.caches import (
    ArenaOffered,
    BatchGranted,
    BlockCopy,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    Handoff,
    LeasesReleased,
    ReserveBlocks,
)
from alignedserve.messages.cluster_view import LengthTree
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import FormBatch, PoolLoad
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.messages.wire import Message
from kvpool.logic import PoolCommand, PoolLogic
from kvpool.policies.batch_former import BatchFormer, FcfsBatchFormer
from kvpool.state import SetBlockGeneration
from tests.support.samples import DECODE, PREFILL, ROUTER, blocks, epoch, request

ARENA = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
BATCH, ASKED = BatchId(1), WorkerName(DECODE)
FORM = FormBatch(BATCH, ASKED, 100, 100)
L1, L2 = epoch(1), epoch(2)


class PoolHarness:
    """A pool with a router, a prefill worker and a decode worker. Its counts for the router are left out."""

    def __init__(self, batch_former: BatchFormer | None = None, **changes: Any) -> None:
        self.now = 0.0
        former = batch_former or FcfsBatchFormer()
        self.logic = PoolLogic(arena=ARENA, block_size=4, batch_former=former, lease_s=10.0, **changes)
        self._load: PoolLoad | None = None
        self.told: list[PrefixBlocksChanged] = []
        self.link(ROUTER, Role.ROUTER)
        self.link(PREFILL, Role.PREFILL_WORKER)
        self.link(DECODE, Role.DECODE_WORKER)

    def do(self, event: Any) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        for command in self.logic.on_event(event, self.now):
            if isinstance(command, Send) and isinstance(command.message, PoolLoad):
                self._load = command.message
            elif isinstance(command, Send) and isinstance(command.message, PrefixBlocksChanged):
                self.told.append(command.message)
            else:
                commands.append(command)
        return commands

    @property
    def load(self) -> PoolLoad | None:
        """Return the counts that the router has after the next tick, without the lengths."""
        assert self.do(Ticked()) == []
        return replace(self._load, lengths=LengthTree()) if self._load is not None else None

    @property
    def lengths(self) -> LengthTree | None:
        """Return the lengths that the router has after the next tick."""
        assert self.do(Ticked()) == []
        return self._load.lengths if self._load is not None else None

    def link(self, peer: str, role: Role) -> list[PoolCommand]:
        return self.do(PeerConnected(role, peer))

    def lose(self, peer: str) -> list[PoolCommand]:
        return self.do(PeerDisconnected(Role.ROUTER if peer == ROUTER else Role.PREFILL_WORKER, peer))

    def hear(self, peer: str, message: Message) -> list[PoolCommand]:
        return self.do(Received(peer, message))

    def reserve(
        self, name: str, num_blocks: int, attempt: int = L1, peer: str = PREFILL, **changes: bool
    ) -> list[PoolCommand]:
        return self.hear(peer, ReserveBlocks(RequestId(name), attempt, num_blocks, **changes))

    def pool(self, of: Request | str, num_blocks: int = 1, attempt: int = L1, **changes: bool) -> BlocksWritten:
        """Reserve and write; what was written."""
        name = of if isinstance(of, str) else of.request_id
        commands = self.reserve(name, num_blocks, attempt, PREFILL, **changes)
        sent = [one.message for one in commands if isinstance(one, Send)]
        reserved = next(one for one in sent if isinstance(one, BlocksReserved))
        message = written(name, reserved) if isinstance(of, str) else written(name, reserved, request=of)
        self.hear(PREFILL, message)
        return message

    def grant(self, of: Request | str, num_blocks: int = 1, attempt: int = L1) -> Handoff:
        """Pool a request, which the decode worker then reads."""
        self.pool(of, num_blocks, attempt)
        (handoff,) = grants(self.hear(ROUTER, FORM))
        return handoff

    def keep(self, of: Request | str, num_blocks: int = 1, attempt: int = L1) -> Handoff:
        """Grant a request and release it: the pool keeps a copy."""
        handoff = self.grant(of, num_blocks, attempt)
        self.hear(DECODE, LeasesReleased((handoff.lease_id,)))
        return handoff


def written(name: str, reserved: BlocksReserved, **changes: Any) -> BlocksWritten:
    """Build BlocksWritten for filled blocks; `generation`, `context_len` and `runs` change its copy."""
    num_blocks = len(reserved.block_ids)
    copy = BlockCopy(
        changes.pop("generation", reserved.generation),
        changes.pop("context_len", 4 * num_blocks),
        changes.pop("runs", tuple(BlockRun(block_id, 1, 99) for block_id in reserved.block_ids)),
    )
    facts: dict[str, Any] = {
        "lease_id": reserved.lease_id,
        "copy": copy,
        "attempt": reserved.attempt,
        "request": request(name, prompt_len=4 * num_blocks),
        "generated_token_ids": (7,),
    }
    return BlocksWritten(**{**facts, **changes})


def reserved(name: str, lease: int, *numbers: int, attempt: int = L1) -> BlocksReserved:
    return BlocksReserved(RequestId(name), attempt, LeaseId(lease), lease, blocks(*numbers))


def leased(name: str, lease: int, *numbers: int, attempt: int = L1, to: str = PREFILL) -> list[PoolCommand]:
    return [SetBlockGeneration(blocks(*numbers), lease), Send(to, reserved(name, lease, *numbers, attempt=attempt))]


def freed(*numbers: int) -> SetBlockGeneration:
    return SetBlockGeneration(blocks(*numbers), 0)


def taken(name: str, is_accepted: bool, attempt: int = L1) -> Send:
    return Send(PREFILL, BlocksTaken(RequestId(name), attempt, is_accepted))


def handoff_of(content: BlocksWritten, num_steps: int = 2) -> Handoff:
    """Build the handoff of written blocks: into the pool is one step, out of it another."""
    attempt = content.attempt + num_steps
    return Handoff(content.request, attempt, content.generated_token_ids, content.lease_id, content.copy)


def grants(commands: list[PoolCommand]) -> list[Handoff]:
    sent = [one.message for one in commands if isinstance(one, Send)]
    return [handoff for one in sent if isinstance(one, BatchGranted) for handoff in one.handoffs]

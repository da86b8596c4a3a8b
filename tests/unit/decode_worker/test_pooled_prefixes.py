"""Prefix blocks between a worker of twenty blocks of four tokens and the pool of its node."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.core.ids import BlockId, LeaseId
from alignedserve.core.request import Request
from alignedserve.messages.caches import ArenaOffered, BlockCopy, BlockRun
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    Load,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    UnmapArena,
)
from alignedserve.messages.prefixes import (
    FindPrefix,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixReleased,
    ReservedPart,
    StorePrefixBlocks,
)
from alignedserve.messages.wire import Message
from alignedserve.prefix_cache.block_hashes import BlockHasher, NamedBlock
from alignedserve.prefix_cache.cached_blocks import CachedBlocks
from alignedserve.worker_core.pooled_prefixes import PrefixOffers
from tests.harnesses.colocated import ColocatedHarness, runs
from tests.harnesses.scheduling import Step
from tests.support.prefixes import BLOCK_SIZE, ROOT
from tests.support.samples import R1, blocks, request

POOL = "pool-0"
ARENA = ArenaOffered("/arena", 100, 64, "digest")
LEASE = LeaseId(7)


def shared(name: str = "r1") -> Request:
    return request(name, prompt_len=13, prefix_root=ROOT)  # three full blocks and a token


def names(of: Request | None = None) -> list[NamedBlock]:
    of = of or shared()
    return list(BlockHasher(BLOCK_SIZE).named(of.prefix_root or ROOT, of.prompt_token_ids))


def rooted(name: str, root: str) -> Request:
    """A request whose three full blocks no other root has."""
    return request(name, prompt_len=13, prefix_root=root.encode().ljust(len(ROOT), b"."))


class Worker(ColocatedHarness):
    def __init__(self, **changes: Any) -> None:
        super().__init__(has_prefix_cache=True, prefix_pool=POOL, **changes)
        self.do(PeerConnected(Role.KV_POOL, POOL))
        assert self.hear_pool(ARENA) == [MapArena(POOL, ARENA)]

    def hear_pool(self, message: Message) -> list[Any]:
        return self.do(Received(POOL, message))

    def ask(self, of: Request) -> FindPrefix:
        (command,) = [one for one in self.begin(of) if isinstance(one, Send)]
        assert isinstance(command, Send)
        assert isinstance(command.message, FindPrefix)
        return command.message

    def find(self, *numbers: int, packed: list[bytes] | None = None) -> list[Any]:
        """The pool has found these blocks of the prompt, in the arena."""
        tokens = tuple(packed if packed is not None else [name.packed_tokens for name in names()[: len(numbers)]])
        copy = BlockCopy(3, BLOCK_SIZE * len(numbers), tuple(BlockRun(number, 1, 50) for number in numbers))
        return self.hear_pool(PrefixFound(R1, LEASE, copy, tokens))

    def load(self, of: Request, duration_s: float, **changes: Any) -> None:
        """Load all blocks of a prompt, in so much time."""
        self.ask(of)
        self.end_load(self.begin_load(of), duration_s, **changes)

    def begin_load(self, of: Request) -> LoadBlocks:
        """The pool has all blocks of a prompt."""
        tokens = tuple(name.packed_tokens for name in names(of))
        copy = BlockCopy(3, len(tokens) * BLOCK_SIZE, tuple(BlockRun(number, 1, 50) for number in range(len(tokens))))
        (loading,) = self.hear_pool(PrefixFound(of.request_id, LEASE, copy, tokens))
        assert isinstance(loading, LoadBlocks)
        return loading

    def end_load(self, loading: LoadBlocks, duration_s: float, **changes: Any) -> list[Any]:
        self.now += duration_s
        return self.do(BlocksLoaded(POOL, loading.loads, duration_s=duration_s, **{"refused": frozenset()} | changes))

    @property
    def held_back(self) -> list[str]:
        """Requests that wait for the pool."""
        assert self.logic._pooled is not None
        return [str(request_id) for request_id in self.logic._pooled.waiting()]

    def compute(self) -> list[Any]:
        """Compute the prompt, in two iterations, and sample a token."""
        self.follow(Step(r1=10), Step(r1=3))
        return [*self.completed(), *self.sampled(r1=90)]

    @property
    def num_cached(self) -> int:
        """Tokens that the next request would find here."""
        prefixes = self.logic._prefixes
        assert prefixes is not None
        return len(prefixes.blocks.run_of(names())) * BLOCK_SIZE


@pytest.fixture
def worker() -> Worker:
    return Worker()


# --- loads


def test_a_request_waits_for_what_the_pool_has_and_then_finds_it_here(worker: Worker) -> None:
    assert worker.ask(shared()) == FindPrefix(R1, 0, b"".join(name.block_hash for name in names()))
    (loading,) = worker.find(4, 9, 5)
    assert isinstance(loading, LoadBlocks)
    (load,) = loading.loads
    assert load == Load(R1, BlockCopy(3, 12, tuple(BlockRun(at, 1, 50) for at in (4, 9, 5))), load.block_ids)
    assert worker.loads[-1].num_waiting == 1
    assert worker.do(BlocksLoaded(POOL, loading.loads, frozenset(), 1e-4))[-1] == Send(POOL, PrefixReleased(LEASE))
    (iteration,) = runs(worker.follow(Step(r1=1)))
    assert (iteration.additions[0].num_cached, iteration.additions[0].block_ids[:3]) == (12, load.block_ids)


def test_what_the_pool_lacks_is_computed(worker: Worker) -> None:
    worker.ask(shared())
    worker.hear_pool(PrefixFound(R1))
    (iteration,) = runs(worker.follow(Step(r1=10)))
    assert iteration.additions[0].num_cached == 0


def test_other_tokens_of_the_same_names_are_not_loaded(worker: Worker) -> None:
    worker.ask(shared())
    forged = [names()[0].packed_tokens, b"0123456789abcdef", names()[2].packed_tokens]
    (loading,) = worker.find(4, 9, 5, packed=forged)
    assert loading.loads[0].copy.runs == (BlockRun(4, 1, 50),)


def test_blocks_that_do_not_verify_are_not_kept(worker: Worker) -> None:
    worker.ask(shared())
    (loading,) = worker.find(4, 9, 5)
    commands = worker.do(BlocksLoaded(POOL, loading.loads, frozenset({R1})))
    assert Send(POOL, PrefixReleased(LEASE, is_damaged=True)) in commands
    assert (worker.num_cached, worker.loads[-1].num_free_blocks) == (0, 20)
    assert runs(worker.follow(Step(r1=10)))[0].additions[0].num_cached == 0


def test_a_pool_that_cannot_be_read_from_has_no_damaged_blocks_and_is_left_alone_for_a_while(worker: Worker) -> None:
    worker.ask(shared())
    commands = worker.end_load(worker.begin_load(shared()), 5.0, refused=frozenset({R1}), is_reached=False)
    assert Send(POOL, PrefixReleased(LEASE)) in commands
    assert worker.begin(shared("r2")) == []  # it would wait as long, in vain
    worker.now += 60.0
    assert worker.ask(rooted("r3", "later")).request_id == "r3"


def test_a_pool_that_was_lost_during_a_load_is_asked_again_once_it_is_back(worker: Worker) -> None:
    worker.ask(shared())
    load = worker.begin_load(shared())
    worker.do(PeerDisconnected(Role.KV_POOL, POOL))
    worker.end_load(load, 5.0, refused=frozenset({R1}), is_reached=False)
    worker.do(PeerConnected(Role.KV_POOL, POOL))
    worker.hear_pool(ARENA)
    assert worker.ask(rooted("r2", "later")).request_id == "r2"


# A block is computed in 4 ms here, and a load may begin after one.
def test_a_request_waits_for_no_load_of_another_that_lasts_longer_than_computing(worker: Worker) -> None:
    worker.load(rooted("r8", "learned"), 0.006)
    worker.ask(shared())
    document = worker.begin_load(shared())
    assert worker.begin(rooted("r2", "other")) == []  # 2 ms a block: 6 alone, 12 behind the document's
    assert worker.held_back == [R1]
    worker.end_load(document, 0.006)
    assert worker.ask(rooted("r3", "third")).num_before == 0


def test_nor_for_one_of_the_same_blocks_that_brings_far_more(worker: Worker) -> None:
    worker.load(rooted("r8", "learned"), 0.006)
    document = request("r9", prompt_len=61, prefix_root=ROOT)
    worker.ask(document)
    worker.begin(shared("r2"))  # 12 ms to compute, 30 to load with the rest of the document
    assert worker.held_back == ["r9"]


def test_a_long_load_lets_others_have_their_turn() -> None:
    worker = Worker(num_blocks=60)
    worker.load(rooted("r8", "learned"), 0.006)
    document = request("r9", prompt_len=61, prefix_root=ROOT)
    worker.ask(document)
    first = worker.begin_load(document)  # ten of fifteen blocks take 20 ms
    assert first.loads[0].copy.context_len == 40
    rest = next(one for one in worker.end_load(first, 0.02) if isinstance(one, LoadBlocks))
    assert rest.loads[0].copy == BlockCopy(3, 20, tuple(BlockRun(number, 1, 50) for number in range(10, 15)), 10)
    assert worker.held_back == ["r9"]
    assert Send(POOL, PrefixReleased(LEASE)) in worker.end_load(rest, 0.01)
    assert runs(worker.follow(Step(r8=1, r9=1)))[0].additions[-1].num_cached == 60


def test_a_long_load_that_is_aborted_ends_with_its_part() -> None:
    worker = Worker(num_blocks=60)
    worker.load(rooted("r8", "learned"), 0.006)
    document = request("r9", prompt_len=61, prefix_root=ROOT)
    worker.ask(document)
    first = worker.begin_load(document)
    free = worker.loads[-1].num_free_blocks
    worker.logic._abort(document.request_id, 1)
    assert Send(POOL, PrefixReleased(LEASE)) in worker.end_load(first, 0.02)
    assert worker.loads[-1].num_free_blocks == free + 15


def test_a_slow_link_is_known_from_its_first_load_on_and_when_it_is_renewed(worker: Worker) -> None:
    worker.load(shared(), 9.0)
    worker.do(PeerDisconnected(Role.KV_POOL, POOL))
    worker.do(PeerConnected(Role.KV_POOL, POOL))
    worker.hear_pool(ARENA)
    assert not any(
        isinstance(one, Send) and isinstance(one.message, FindPrefix) for one in worker.begin(rooted("r2", "b"))
    )
    worker.now += 900.0
    assert worker.ask(rooted("r3", "c")).num_before == 0  # it may be a better one by now


def test_an_answer_that_contradicts_itself_is_given_back(worker: Worker) -> None:
    worker.ask(shared())
    assert worker.find(4, 9, packed=[b"0123456789abcdef"]) == [Send(POOL, PrefixReleased(LEASE))]
    assert worker.hear_pool(PrefixFound(R1, LeaseId(8), BlockCopy(3, 4, (BlockRun(4, 1, 50),)), (b"",))) == [
        Send(POOL, PrefixReleased(LeaseId(8)))  # nothing waits for it any more
    ]


def test_a_lost_pool_keeps_no_request_waiting(worker: Worker) -> None:
    worker.ask(shared())
    assert worker.do(PeerDisconnected(Role.KV_POOL, POOL)) == [UnmapArena(POOL)]
    assert runs(worker.follow(Step(r1=10)))


def test_a_copy_under_way_when_the_pool_is_lost_ends(worker: Worker) -> None:
    worker.ask(shared())
    (loading,) = worker.find(4, 9, 5)
    worker.do(PeerDisconnected(Role.KV_POOL, POOL))
    worker.do(BlocksLoaded(POOL, loading.loads, frozenset()))
    assert worker.num_cached == 12


def test_a_request_that_is_aborted_while_it_waits_never_runs(worker: Worker) -> None:
    worker.ask(shared())
    worker.logic._abort(R1, 1)
    worker.hear_pool(PrefixFound(R1))
    assert worker.loads[-1].num_waiting == 0


def test_requests_that_lack_the_same_are_loaded_once(worker: Worker) -> None:
    worker.ask(shared())
    assert worker.begin(shared("r2")) == []
    (loading,) = worker.find(4, 9, 5)
    worker.do(BlocksLoaded(POOL, loading.loads, frozenset(), 1e-4))
    assert [one.num_cached for one in runs(worker.follow(Step(r1=1, r2=1)))[0].additions] == [12, 12]


def test_without_room_beside_those_that_have_begun_it_is_computed(worker: Worker) -> None:
    worker.begin(request("r9", prompt_len=70))
    worker.follow(Step(r9=10))
    worker.ask(shared())
    assert worker.find(4, 9, 5) == [Send(POOL, PrefixReleased(LEASE))]  # r9 will have 18 of the 20 blocks


def test_a_private_request_is_not_asked_for(worker: Worker) -> None:
    assert worker.begin(request("r1", prompt_len=13)) == []


# --- offers


def offers(commands: Sequence[Any]) -> list[StorePrefixBlocks]:
    return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, StorePrefixBlocks)]


def filled(worker: Worker) -> StorePrefixBlocks:
    """Compute a prompt; return the offer of its first two blocks, which awaits its answer."""
    worker.ask(shared())
    worker.hear_pool(PrefixFound(R1))
    (offer,) = offers(worker.compute())
    return offer


def test_what_fills_is_offered_copied_and_reported(worker: Worker) -> None:
    (part,) = filled(worker).parts
    assert [(one.block_hash, one.packed_tokens) for one in part.blocks] == names()[:2]
    answer = ReservedPart(1, LEASE, blocks(31))
    (offload,) = worker.hear_pool(PrefixBlocksReserved((answer,)))
    assert isinstance(offload, OffloadBlocks)
    assert (offload.target_block_ids, offload.generation, offload.num_before) == (answer.block_ids, LEASE, 1)
    written = tuple(BlockRun(block_id, 1, 60 + block_id) for block_id in answer.block_ids)
    commands = worker.do(BlocksOffloaded(offload, written))
    assert Send(POOL, PrefixBlocksWritten(LEASE, tuple(run.checksum for run in written))) in commands


def test_the_next_offer_comes_a_little_later(worker: Worker) -> None:
    filled(worker)
    assert offers(worker.hear_pool(PrefixBlocksReserved((ReservedPart(2),)))) == []
    worker.now += 0.9
    assert offers(worker.do(Ticked())) == []
    worker.now += 0.1
    ((part,),) = [one.parts for one in offers(worker.do(Ticked()))]
    assert (part.num_before, part.parent, len(part.blocks)) == (2, names()[1].block_hash, 1)


def test_many_blocks_are_offered_sooner() -> None:
    cached = CachedBlocks(4)
    made = PrefixOffers(cached)
    cached.observers.append(made)
    made.connected(POOL, block_bytes=1024)

    def fill(first: int, count: int) -> None:
        for number in range(first, first + count):
            cached.store(None, number.to_bytes(16, "little"), b"tokens", BlockId(number))

    def answered(commands: Sequence[Any]) -> int:
        made.reserved(PrefixBlocksReserved((ReservedPart(1),) * sum(len(one.parts) for one in offers(commands))), 0.0)
        return sum(len(one.parts) for one in offers(commands))

    fill(0, 1)
    assert answered(made.offer(0.0)) == 1
    fill(1, 63)
    assert made.offer(0.5) == []
    fill(64, 1)
    assert answered(made.offer(0.5)) == 64
    fill(65, 64)
    assert made.offer(0.7) == []
    assert answered(made.offer(0.75)) == 64


def test_an_orphan_is_offered_again_with_what_it_follows(worker: Worker) -> None:
    test_the_next_offer_comes_a_little_later(worker)
    worker.hear_pool(PrefixBlocksReserved((ReservedPart(0, is_orphan=True),)))
    worker.now += 1.0
    ((part,),) = [one.parts for one in offers(worker.do(Ticked()))]
    assert (part.num_before, len(part.blocks)) == (0, 3)


def test_what_has_no_place_is_offered_again_after_a_rest(worker: Worker) -> None:
    filled(worker)
    worker.hear_pool(PrefixBlocksReserved((ReservedPart(0),)))
    worker.now += 0.5
    assert offers(worker.do(Ticked())) == []
    worker.now += 0.6
    assert sum(len(part.blocks) for part in offers(worker.do(Ticked()))[0].parts) == 3


def test_a_block_that_left_during_its_copy_is_not_reported(worker: Worker) -> None:
    filled(worker)
    (offload,) = worker.hear_pool(PrefixBlocksReserved((ReservedPart(0, LEASE, blocks(30, 31)),)))
    worker.hear(AbortRequest(R1, 1))
    prefixes = worker.logic._prefixes
    assert prefixes is not None
    prefixes.blocks.evict(2)  # the third, and the second
    commands = worker.do(BlocksOffloaded(offload, (BlockRun(30, 1, 90), BlockRun(31, 1, 91))))
    assert Send(POOL, PrefixBlocksWritten(LEASE, (90,))) in commands


def test_a_pool_that_comes_back_is_offered_everything(worker: Worker) -> None:
    filled(worker)
    worker.do(PeerDisconnected(Role.KV_POOL, POOL))
    (again,) = offers(worker.hear_pool(replace(ARENA, path="/another")))
    assert len(again.parts[0].blocks) == 3


def test_a_copy_that_failed_is_reported_as_nothing(worker: Worker) -> None:
    filled(worker)
    (offload,) = worker.hear_pool(PrefixBlocksReserved((ReservedPart(0, LEASE, blocks(0, 1)),)))
    assert Send(POOL, PrefixBlocksWritten(LEASE, ())) in worker.do(BlocksOffloaded(offload, None))


def test_an_answer_to_another_offer_is_ignored(worker: Worker) -> None:
    filled(worker)
    assert worker.hear_pool(PrefixBlocksReserved(())) == []

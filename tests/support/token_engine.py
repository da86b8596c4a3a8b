"""A stand-in for the engine with the engine's one rule: the next token is a function of the tokens before it.

So whatever the schedule, the right answer of a request is known.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SampledToken
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    IterationCompleted,
    LoadBlocks,
    OffloadBlocks,
    RelayBlocks,
    RunIteration,
    Swaps,
)

BLOCK_SIZE = 4
VOCAB_SIZE = 50
EOS = 0


def next_token(token_ids: Sequence[int]) -> int:
    """Return the model's next token: any function of all before; now and then it ends the answer."""
    return random.Random(hash(tuple(token_ids))).randrange(VOCAB_SIZE)


def state_of(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the recurrent state behind these tokens, which no block of tokens holds."""
    return (-1, *token_ids)


def right_answer(request: Request) -> list[int]:
    """Return the tokens of one undisturbed run."""
    answer: list[int] = []
    while len(answer) < request.sampling.max_tokens and (not answer or answer[-1] != EOS):
        answer.append(next_token((*request.prompt_token_ids, *answer)))
    return answer


@dataclass
class FakeArena:
    """Blocks that others see: what is stamped on each, and the tokens whose cache it holds."""

    stamps: dict[int, int] = field(default_factory=dict)
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_buffer: bool = False

    def read(self, copy: BlockCopy) -> list[tuple[int, ...]] | None:
        """Return the content of the copy's blocks; None: it is not what its writer wrote."""
        rows = []
        for run in copy.runs:
            numbers = range(run.first_block, run.first_block + run.num_blocks)
            if any(self.stamps.get(number) != copy.generation for number in numbers):
                return None
            part = [self.content.get(number, ()) for number in numbers]
            if hash(tuple(part)) != run.checksum:
                return None
            rows += part
        return rows

    def write(
        self, rows: list[tuple[int, ...]], block_ids: Sequence[int], generation: int, *, is_by_block: bool = False
    ) -> tuple[BlockRun, ...] | None:
        if self.is_buffer:
            self.stamps.update(dict.fromkeys(block_ids, generation))
        if any(self.stamps.get(number) != generation for number in block_ids):
            return None
        self.content.update(zip(block_ids, rows, strict=True))
        numbers = [BlockId(number) for number in block_ids]
        written = [(number, 1) for number in numbers] if is_by_block else contiguous_runs(numbers)
        return tuple(
            BlockRun(first, count, hash(tuple(self.content[first + offset] for offset in range(count))))
            for first, count in written
        )


@dataclass
class FakeEngine:
    """Performs commands on token lists and checks what the real engine would assert, and that every cache is right."""

    tokens: dict[RequestId, list[int]] = field(default_factory=dict)
    num_computed: dict[RequestId, int] = field(default_factory=dict)
    blocks: dict[RequestId, list[int]] = field(default_factory=dict)
    storage: dict[int, tuple[int, ...]] = field(default_factory=dict)
    arenas: dict[str, FakeArena] = field(default_factory=dict)  # by peer
    host: dict[RequestId, list[tuple[int, ...]]] = field(default_factory=dict)  # caches swapped out
    refuse: float = 0.0
    hidden_ratio: float = 1.0  # bytes of a hidden cache by bytes of keys and values
    hidden: set[RequestId] = field(default_factory=set)  # with such a cache: what lies in its blocks is not checked
    begun: RunIteration | None = None  # whose changes are made
    state_blocks: int = 0  # of each sequence, before those of its tokens
    states: dict[RequestId, list[int]] = field(default_factory=dict)

    def run(self, command: RunIteration) -> IterationCompleted:
        """Run an iteration; an urgent one ends within the one that has begun, which is to be run then."""
        if command is not self.begun:
            self.begin(command)
        before = dict(self.num_computed)
        sampled = [self._step(*part) for part in command.slices]
        for kept in command.states:
            assert before[kept.request_id] < kept.num_tokens <= self.num_computed[kept.request_id], "not passed"
            self.storage |= dict.fromkeys(kept.block_ids, state_of(self.tokens[kept.request_id][: kept.num_tokens]))
        tokens = tuple(token for token in sampled if token is not None)
        return IterationCompleted(tokens, is_urgent=command.is_urgent)

    def begin(self, command: RunIteration) -> None:
        """Make the changes of an iteration, before it computes."""
        if not command.is_urgent:
            self.begun = command
        copied = [self.storage[copy.source] for copy in command.copies]
        if command.swaps is not None:
            self._swap(command.swaps)
        self.storage.update(zip((copy.target for copy in command.copies), copied, strict=True))
        for one in command.replacements:
            blocks, known = self.blocks[one.request_id], self.tokens[one.request_id]
            tokens = tuple(known[one.place * BLOCK_SIZE : (one.place + 1) * BLOCK_SIZE])
            assert self.storage[one.block_id] == tokens, "replaced by another"
            blocks[one.place] = one.block_id
        for request_id in command.removals:
            del self.tokens[request_id], self.num_computed[request_id], self.blocks[request_id]
            del self.states[request_id]
        for addition in command.additions:
            request_id = addition.request.request_id
            assert request_id not in self.tokens, "added twice"
            self.tokens[request_id] = [*addition.request.prompt_token_ids, *addition.generated_token_ids]
            self.num_computed[request_id] = addition.num_cached
            self.states[request_id] = list(addition.block_ids[: self.state_blocks])
            self.blocks[request_id] = list(addition.block_ids[self.state_blocks :])
            (self.hidden.add if addition.is_hidden else self.hidden.discard)(request_id)
            self._check_cached(request_id)
        for request_id, block_ids in command.extensions:
            self.blocks[request_id] += block_ids
        self._check_owners()

    def _check_owners(self) -> None:
        """Check that sequences share full blocks of the same contexts alone."""
        owners: dict[int, list[tuple[RequestId, int]]] = {}
        for request_id, block_ids in self.blocks.items():
            for place, block_id in enumerate(block_ids):
                owners.setdefault(block_id, []).append((request_id, (place + 1) * BLOCK_SIZE))
        of_states = [block_id for block_ids in self.states.values() for block_id in block_ids]
        assert len(set(of_states)) == len(of_states), "states that are shared"
        assert not owners.keys() & set(of_states), "states among tokens"
        for uses in owners.values():
            if len(uses) > 1:
                assert len({tuple(self.tokens[request_id][:end]) for request_id, end in uses}) == 1, "shared by others"
                assert all(end <= self.num_computed[request_id] for request_id, end in uses), "shared and being filled"

    def _check_cached(self, request_id: RequestId) -> None:
        """Check that all that is computed of a sequence lies in its blocks."""
        count = 0 if request_id in self.hidden else self.num_computed[request_id]
        for place, block_id in enumerate(self.blocks[request_id][: -(-count // BLOCK_SIZE)]):
            known = tuple(self.tokens[request_id][place * BLOCK_SIZE : min((place + 1) * BLOCK_SIZE, count)])
            assert self.storage.get(block_id, ())[: len(known)] == known, "a cache of other tokens"
        if count:
            state = state_of(self.tokens[request_id][:count])
            assert all(self.storage[block_id] == state for block_id in self.states[request_id]), "a state of others"

    def _swap(self, swaps: Swaps) -> None:
        for request_id in swaps.forgotten:
            del self.host[request_id]
        for swap in swaps.outs:
            assert swap.request_id not in self.host, "swapped out twice"
            self.host[swap.request_id] = [self.storage[block_id] for block_id in swap.block_ids]
        for swap in swaps.ins:
            rows = self.host.pop(swap.request_id)
            assert sum(map(len, rows[self.state_blocks :])) == swap.num_tokens, "other tokens than went out"
            self.storage.update(zip(swap.block_ids, rows, strict=False))

    def load(self, command: LoadBlocks, rng: random.Random) -> BlocksLoaded:
        refused = set()
        for part in command.loads:
            arena = self.arenas.get(command.source)
            rows = arena.read(part.copy) if arena is not None and rng.random() >= self.refuse else None
            if rows is None:
                refused.add(part.request_id)
            else:
                assert len(rows) <= len(part.block_ids), "more blocks than were set aside"
                self.storage.update(zip(part.block_ids, rows, strict=False))
        return BlocksLoaded(command.source, command.loads, frozenset(refused), duration_s=1e-4)

    def offload(self, command: OffloadBlocks) -> BlocksOffloaded:
        arena = self.arenas.get(command.target)
        rows = [self.storage.get(block_id, ()) for block_id in command.block_ids]
        if arena is None:
            return BlocksOffloaded(command, None)
        is_by_block = command.num_before is not None
        runs = arena.write(rows, command.target_block_ids, command.generation, is_by_block=is_by_block)
        return BlocksOffloaded(command, runs)

    def relay(self, command: RelayBlocks) -> BlocksRelayed:
        source, target = self.arenas.get(command.source), self.arenas.get(command.target)
        rows = source.read(command.copy) if source is not None else None
        if rows is None or target is None:
            return BlocksRelayed(command, None)
        return BlocksRelayed(command, target.write(rows, command.target_block_ids, command.generation))

    def _step(self, request_id: RequestId, num_tokens: int) -> SampledToken | None:
        self._check_cached(request_id)
        self.num_computed[request_id] += num_tokens
        tokens, computed = self.tokens[request_id], self.num_computed[request_id]
        assert computed <= len(tokens), "computes unknown tokens"
        ratio = self.hidden_ratio if request_id in self.hidden else 1.0
        assert computed * ratio <= len(self.blocks[request_id]) * BLOCK_SIZE, "computes beyond its blocks"
        for index, block_id in enumerate(self.blocks[request_id]):
            self.storage[block_id] = tuple(tokens[index * BLOCK_SIZE : min((index + 1) * BLOCK_SIZE, computed)])
        self.storage |= dict.fromkeys(self.states[request_id], state_of(tokens[:computed]))
        if computed < len(tokens):
            return None
        token_id = next_token(tokens)
        tokens.append(token_id)
        return SampledToken(request_id, token_id)

"""Random histories of requests over two engines, whose copies happen in any order that their streams allow.

Between iterations requests are started, preempted to be recomputed, swapped to host memory and back, moved through an
arena to the other engine, and finished; blocks that one leaves are another's at once. What a request generates depends
on nothing but its prompt and parameters, so every token is compared with what the request generates alone.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.device.streams import DeviceStreams
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.swap_space import HostCaches, SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import ShmTransfer
from tests.support.models.tiny_engines import random_tokens

BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT_LEN = 4, 14, 24
NUM_TURNS, MAX_RUNNING, NUM_PROMPTS = 14, 4, 24
ITERATIONS_PER_TURN = 2
NUM_LENT = 4  # blocks of an engine's own: at times too few
HIDDEN_BLOCK_TOKENS = 8  # of a model whose query heads have keys of their own


@dataclass(slots=True, eq=False)
class Request:
    """One request, wherever it is."""

    request_id: RequestId
    kind: int  # which prompt and parameters
    tokens: list[int]  # prompt and what was generated
    num_computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    copy: BlockCopy | None = None

    @property
    def prompt_len(self) -> int:
        return len(prompt_of(self.kind))

    @property
    def is_hidden(self) -> bool:
        """Return whether it has layer inputs in its blocks, as every fourth kind has."""
        return self.kind % 4 == 1

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, HIDDEN_BLOCK_TOKENS if self.is_hidden else BLOCK_SIZE)


def prompt_of(kind: int) -> list[int]:
    return random_tokens(kind, 1 + kind % 11)


def sampling_of(kind: int) -> SamplingParams:
    if kind % 3:
        return SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return SamplingParams(temperature=1.0, top_p=0.9, seed=kind, max_tokens=40, ignore_eos=True)


class Place:
    """One engine, the owner of its blocks, and its host memory."""

    def __init__(
        self,
        decoder: Decoder,
        streams: DeviceStreams,
        arena: Arena | None,
        rng: random.Random,
        *,
        has_int8_swaps: bool = False,
        launches_ahead: bool = False,
        stops_passes: bool = False,
    ) -> None:
        layout = decoder.config.block_layout(BLOCK_SIZE, decoder.dtype_name)
        self.storage = BlockStorage(layout, NUM_BLOCKS + NUM_LENT, decoder.device)
        self.engine = Engine(
            model=decoder,
            storage=self.storage,
            options=EngineOptions(
                max_sequences=MAX_RUNNING,
                max_context_len=MAX_CONTEXT_LEN,
                hidden_block_tokens=HIDDEN_BLOCK_TOKENS,
                launches_ahead=launches_ahead,
                stops_passes=stops_passes,
            ),
            streams=streams,
            own_blocks=OwnBlocks(lent=[BlockId(NUM_BLOCKS + index) for index in range(NUM_LENT)]),
        )
        self.swap_space: HostCaches = SwapSpace(self.storage, streams, is_int8=has_int8_swaps)
        self.has_whole_swaps = not has_int8_swaps  # of whatever is in blocks
        self.transfer = None if arena is None else ShmTransfer(self.storage, arena, stamps=True)
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.computing: Sequence[Request] = ()  # in the iteration in progress
        self.free = [BlockId(block) for block in range(NUM_BLOCKS)]
        self._random = rng
        rng.shuffle(self.free)

    def take(self, count: int) -> list[BlockId] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, request: Request) -> None:
        """Free its blocks, which are allocated next, so that a remaining use of them shows."""
        self.free = request.blocks + self.free
        request.blocks = []

    def run(self, request: Request) -> None:
        self.engine.add_sequence(
            NewSequence(
                request.request_id,
                tuple(request.tokens),
                request.prompt_len,
                request.num_computed,
                tuple(request.blocks),
                sampling_of(request.kind),
                request.is_hidden,
            )
        )
        self.running.append(request)

    def stop(self, request: Request) -> None:
        self.running.remove(request)
        request.num_computed = self.engine.num_computed(request.request_id)
        self.engine.remove_sequence(request.request_id)

    def iterate(self) -> None:
        """Compute one step over some of the sequences, the prompts in chunks."""
        chosen = {}
        for request in self.running:
            computed, known = self.engine.num_computed(request.request_id), len(request.tokens)
            count = known - computed if known - computed == 1 else self._random.randint(1, known - computed)
            if known < MAX_CONTEXT_LEN and self._random.random() >= 0.2 and self.make_room(request, computed + count):
                chosen[request] = count
        if chosen:
            self.computing = [*chosen]
            self.compute(chosen)
            self.computing = ()

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a request blocks for so many tokens of its context; False: there are none."""
        needed = request.blocks_for(num_tokens) - len(request.blocks)
        more = self.take(max(needed, 0))
        if more is None:
            return False
        if more:
            self.engine.append_blocks(request.request_id, more)
            request.blocks += more
        return True

    def compute(self, chosen: Mapping[Request, int]) -> None:
        """Compute so many tokens of each of these."""
        by_id = {request.request_id: request for request in chosen}
        output = self.engine.execute([(request.request_id, count) for request, count in chosen.items()])
        assert not output.failed, "logits that are not numbers"
        for token in output.sampled:
            by_id[token.request_id].tokens.append(token.token_id)


class EngineHistory:
    """One history. The same seed gives the same one."""

    def __init__(
        self,
        decoder: Decoder,
        make_streams: Callable[[int], DeviceStreams],
        seed: int,
        folder: Path,
        *,
        has_int8_swaps: bool = False,
        launches_ahead: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._decoder = decoder
        self._make_streams = make_streams
        self._seed = seed
        self._options = {"has_int8_swaps": has_int8_swaps, "launches_ahead": launches_ahead}
        layout = decoder.config.block_layout(BLOCK_SIZE, decoder.dtype_name)
        self._arena = Arena.create(folder / "pool.arena", layout, NUM_BLOCKS)
        self._places = [self._make_place(number) for number in range(2)]
        self._arena_free = [BlockId(block) for block in range(NUM_BLOCKS)]
        self._generation = 0
        self._moving: list[Request] = []
        self.requests: list[Request] = []

    def _make_place(self, number: int) -> Place:
        streams = self._make_streams(2 * self._seed + number)
        return Place(self._decoder, streams, self._arena, self._random, **self._options)

    def _actions(self) -> dict[Callable[[Place], None], int]:
        """Return what may happen, and how often."""
        return {
            self._start: 4,
            self._preempt: 1,
            self._swap_out: 3,
            self._swap_in: 4,
            self._offload: 2,
            self._fetch: 4,
            self._end: 1,
        }

    def run(self, num_turns: int = NUM_TURNS) -> None:
        """Take turns: something happens to the requests of each place, then it iterates."""
        actions = self._actions()
        for _ in range(num_turns):
            for number in range(len(self._places)):
                for action in self._random.choices([*actions], [*actions.values()], k=2):
                    action(self._places[number])
                for _ in range(self._random.randint(0, ITERATIONS_PER_TURN)):
                    self._places[number].iterate()

    def close(self) -> None:
        """Remove the arena."""
        self._arena.close(unlink=True)

    # --- what may happen to a request; nothing where there is none, or no room

    def _start(self, place: Place) -> None:
        if len(place.running) == MAX_RUNNING:
            return
        kind = self._random.randrange(NUM_PROMPTS)
        request = Request(RequestId(f"r{len(self.requests)}"), kind, prompt_of(kind))
        self.requests.append(request)
        place.run(request)

    def _end(self, place: Place) -> None:
        if place.running:
            request = self._random.choice(place.running)
            place.stop(request)
            place.give(request)

    def _preempt(self, place: Place) -> None:
        """Preempt a sequence, to be recomputed at once and in other blocks."""
        if place.running:
            request = self._random.choice(place.running)
            place.stop(request)
            place.give(request)
            request.num_computed = 0
            place.run(request)

    def _swap_out(self, place: Place) -> None:
        able = (request for request in place.running if place.has_whole_swaps or not request.is_hidden)
        computed = [request for request in able if place.engine.num_computed(request.request_id)]
        if computed:
            request = self._random.choice(computed)
            place.stop(request)
            self._cut(place, request)
            swap = Swap(request.request_id, request.num_computed, tuple(request.blocks))
            place.swap_space.perform(Swaps((), (swap,), ()))
            place.give(request)
            place.swapped.append(request)

    def _swap_in(self, place: Place) -> None:
        if not place.swapped or len(place.running) == MAX_RUNNING:
            return
        request = place.swapped[0]
        blocks = place.take(request.blocks_for(request.num_computed))
        if blocks is not None:
            place.swapped.remove(request)
            request.blocks = blocks
            place.swap_space.perform(Swaps((), (), (Swap(request.request_id, request.num_computed, tuple(blocks)),)))
            place.run(request)

    def _offload(self, place: Place) -> None:
        """Offload a cache of keys and values into the arena, for either engine."""
        running = (request for request in place.running if not request.is_hidden)
        computed = [request for request in running if place.engine.num_computed(request.request_id)]
        if not computed or place.transfer is None:
            return
        request = self._random.choice(computed)
        count = blocks_for(place.engine.num_computed(request.request_id), BLOCK_SIZE)
        if count > len(self._arena_free):
            return
        place.stop(request)
        self._cut(place, request)
        target, self._arena_free = self._arena_free[:count], self._arena_free[count:]
        self._generation += 1
        (runs,) = place.transfer.offload([OffloadRequest(request.blocks, target, self._generation)])
        assert runs is not None, "an offload was refused"
        request.copy = BlockCopy(self._generation, request.num_computed, runs)
        place.give(request)
        self._moving.append(request)

    def _fetch(self, place: Place) -> None:
        if not self._moving or len(place.running) == MAX_RUNNING or place.transfer is None:
            return
        request = self._moving[0]
        assert request.copy is not None
        blocks = place.take(request.copy.num_blocks)
        if blocks is None:
            return
        self._moving.remove(request)
        assert place.transfer.fetch([FetchRequest(request.copy, blocks)]) == [True], "a copy does not verify"
        for run in request.copy.runs:
            self._arena_free += [BlockId(run.first_block + offset) for offset in range(run.num_blocks)]
        request.blocks, request.copy = blocks, None
        place.run(request)

    def _cut(self, place: Place, request: Request) -> None:
        """Give back the blocks behind those with computed tokens."""
        count = request.blocks_for(request.num_computed)
        place.free = request.blocks[count:] + place.free
        request.blocks = request.blocks[:count]


def generated_alone(decoder: Decoder, make_streams: Callable[[int], DeviceStreams]) -> list[list[int]]:
    """Return the undisturbed tokens of every kind of request, up to the end of the context."""
    return [alone_of_kind(decoder, make_streams, kind) for kind in range(NUM_PROMPTS)]


def alone_of_kind(decoder: Decoder, make_streams: Callable[[int], DeviceStreams], kind: int) -> list[int]:
    """Return the undisturbed tokens of one kind."""
    place = Place(decoder, make_streams(kind), None, _Steady(0))
    request = Request(RequestId("alone"), kind, prompt_of(kind))
    place.run(request)
    while len(request.tokens) < MAX_CONTEXT_LEN:
        place.iterate()
    return request.tokens


class _Steady(random.Random):
    """Never skips, and takes whole prompts."""

    @override
    def random(self) -> float:
        return 0.999

    @override
    def randint(self, a: int, b: int) -> int:
        return b


def undisturbed(requests: Sequence[Request], alone: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]) -> bool:
    """Return whether every request has, so far, the tokens that its kind generates alone."""
    return all(request.tokens == list(alone[request.kind][: len(request.tokens)]) for request in requests)

"""A small model of an engine's loop over the streams of a device, and what it must come to.

Requests have blocks in a storage. An iteration computes, on all running ones, a token and new content of their blocks,
both functions of what lies there; the tokens are read one iteration later. In between, requests are started, evicted,
offloaded to staging, prefetched into whatever blocks are free, resumed and finished, all at random. What a request
comes to depends on nothing but its number and how often it was computed: any other request's bytes in its blocks, and
any of its own that are older or newer than they should be, change it for good.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.device.streams import DeviceStreams, Event

BLOCKS_PER_REQUEST = 2
NUM_BLOCKS = 6
NUM_SLOTS = 4
NUM_TURNS = 32
ACTION_WEIGHTS = (2, 1, 2, 4, 4, 1)  # what brings requests to run is often impossible, and then nothing happens
ITERATION_PROBABILITY = 0.6
BLOCK_SHAPE = (2, 2)

COMPUTE, OFFLOAD, PREFETCH = "compute", "offload", "prefetch"
BLOCKS, STAGING = "blocks", "staging"


class Dependency(NamedTuple):
    """A stream's work on some memory that must come after another stream's last use of it."""

    waiter: str
    awaited: str
    memory: str

    @override
    def __str__(self) -> str:
        return f"{self.memory}: {self.waiter} after {self.awaited}"


DEPENDENCIES = (
    Dependency(OFFLOAD, COMPUTE, BLOCKS),  # what is copied out has been computed
    Dependency(COMPUTE, PREFETCH, BLOCKS),  # what is computed on has been copied in
    Dependency(COMPUTE, OFFLOAD, BLOCKS),  # blocks that an offload leaves, given to a new request
    Dependency(PREFETCH, OFFLOAD, BLOCKS),  # the same, given to one that comes back
    Dependency(PREFETCH, OFFLOAD, STAGING),  # what is copied in has been copied out
    Dependency(OFFLOAD, PREFETCH, STAGING),  # staging that a prefetch leaves, written again
    Dependency(OFFLOAD, PREFETCH, BLOCKS),  # offloaded again before it was computed on
    Dependency(PREFETCH, COMPUTE, BLOCKS),  # blocks of a request that finished
)


class Place(Enum):
    """Places that a request can be in."""

    RUNNING = 1
    CANDIDATE = 2
    POOLED = 3
    FINISHED = 4


@dataclass(slots=True, eq=False)
class Request:
    """One request: its blocks while it is on the device, its slots of staging while it is not."""

    number: int
    place: Place
    memory: Sequence[int]
    tokens: list[int] = field(default_factory=list)


class Use(NamedTuple):
    """The last use of a block or slot: by which stream, and the event behind it."""

    stream: str
    event: Event


class Pending(NamedTuple):
    """An iteration whose tokens have not been read."""

    event: Event
    running: list[Request]
    tokens: Tensor


class DeviceLoop:
    """One random sequence. `without`: the dependency that it does not keep."""

    def __init__(
        self,
        streams: DeviceStreams,
        seed: int,
        *,
        without: Dependency | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008  (immutable)
    ) -> None:
        self._random = random.Random(seed)
        self._without = without
        is_cuda = device.type == "cuda"
        self._storage = torch.zeros((NUM_BLOCKS, *BLOCK_SHAPE), dtype=torch.int64, device=device)
        self._tokens = torch.zeros(NUM_BLOCKS, dtype=torch.int64, device=device)
        self._staging = torch.zeros((NUM_SLOTS, *BLOCK_SHAPE), dtype=torch.int64, pin_memory=is_cuda)
        self._read_tokens = torch.zeros((2, NUM_BLOCKS), dtype=torch.int64, pin_memory=is_cuda)
        self._streams = {name: streams.stream(name) for name in (COMPUTE, OFFLOAD, PREFETCH)}
        self._free = {BLOCKS: list(range(NUM_BLOCKS)), STAGING: list(range(NUM_SLOTS))}
        self._uses: dict[tuple[str, int], Use] = {}
        self._requests: list[Request] = []
        self._pending: Pending | None = None
        self._num_iterations = 0

    def outcome_is_undisturbed(self) -> bool:
        """Go through the sequence; whether every token, and every byte that is left, is as it should be."""
        actions = (self._start, self._evict, self._offload, self._prefetch, self._resume, self._finish)
        for _ in range(NUM_TURNS):
            self._random.choices(actions, ACTION_WEIGHTS)[0]()
            if self._random.random() < ITERATION_PROBABILITY:
                self._iterate()
        for stream in self._streams.values():
            stream.record().synchronize()
        self._read_pending()
        return all(map(self._is_undisturbed, self._requests))

    # --- what may happen between iterations; nothing where there is no such request, or no room

    def _start(self) -> None:
        blocks = self._take(BLOCKS)
        if blocks is None:
            return
        request = Request(len(self._requests), Place.RUNNING, blocks)
        self._requests.append(request)
        self._await(COMPUTE, BLOCKS, blocks)
        self._streams[COMPUTE].run(lambda: _fill(self._storage, blocks, request.number))
        self._used(COMPUTE, {BLOCKS: blocks})

    def _evict(self) -> None:
        if request := self._any(Place.RUNNING):
            request.place = Place.CANDIDATE

    def _resume(self) -> None:
        if request := self._any(Place.CANDIDATE):
            request.place = Place.RUNNING

    def _finish(self) -> None:
        if request := self._any(Place.RUNNING):
            request.place = Place.FINISHED
            self._free[BLOCKS] += request.memory

    def _offload(self) -> None:
        request = self._any(Place.RUNNING, Place.CANDIDATE)
        slots = self._take(STAGING) if request else None
        if request is None or slots is None:
            return
        self._await(OFFLOAD, BLOCKS, request.memory)
        self._await(OFFLOAD, STAGING, slots)
        for block, slot in zip(request.memory, slots, strict=True):
            self._streams[OFFLOAD].copy_out(self._storage[block], self._staging[slot])
        self._used(OFFLOAD, {BLOCKS: request.memory, STAGING: slots})
        self._free[BLOCKS] += request.memory
        request.place, request.memory = Place.POOLED, slots

    def _prefetch(self) -> None:
        request = self._any(Place.POOLED)
        blocks = self._take(BLOCKS) if request else None
        if request is None or blocks is None:
            return
        self._await(PREFETCH, STAGING, request.memory)
        self._await(PREFETCH, BLOCKS, blocks)
        for block, slot in zip(blocks, request.memory, strict=True):
            self._streams[PREFETCH].copy_in(self._staging[slot], self._storage[block])
        self._used(PREFETCH, {BLOCKS: blocks, STAGING: request.memory})
        self._free[STAGING] += request.memory
        request.place, request.memory = Place.CANDIDATE, blocks

    # --- the iteration

    def _iterate(self) -> None:
        running = [request for request in self._requests if request.place is Place.RUNNING]
        if not running:
            return
        blocks = [list(request.memory) for request in running]
        every_block = [block for of_one in blocks for block in of_one]
        compute, tokens = self._streams[COMPUTE], self._tokens[: len(running)]
        self._await(COMPUTE, BLOCKS, every_block)
        compute.run(lambda: _compute(self._storage, blocks, tokens))
        read = self._read_tokens[self._num_iterations % 2, : len(running)]
        compute.copy_out(tokens, read)
        event = self._used(COMPUTE, {BLOCKS: every_block})
        self._read_pending()  # of the iteration before: this one goes on meanwhile
        self._pending = Pending(event, running, read)
        self._num_iterations += 1

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        self._pending.event.synchronize()
        for request, token in zip(self._pending.running, self._pending.tokens.tolist(), strict=True):
            request.tokens.append(token)

    # --- whose memory is whose, and when

    def _any(self, *places: Place) -> Request | None:
        found = [request for request in self._requests if request.place in places]
        return self._random.choice(found) if found else None

    def _take(self, memory: str) -> list[int] | None:
        free = self._free[memory]
        if len(free) < BLOCKS_PER_REQUEST:
            return None
        return [free.pop(self._random.randrange(len(free))) for _ in range(BLOCKS_PER_REQUEST)]

    def _await(self, waiter: str, memory: str, numbers: Sequence[int]) -> None:
        """Let the stream wait for the last use of this memory by others."""
        for use in dict.fromkeys(self._uses.get((memory, number)) for number in numbers):
            if use is None or use.stream == waiter:
                continue
            if Dependency(waiter, use.stream, memory) != self._without:
                self._streams[waiter].wait(use.event)

    def _used(self, name: str, memory: dict[str, Sequence[int]]) -> Event:
        use = Use(name, self._streams[name].record())
        self._uses |= {(kind, number): use for kind, numbers in memory.items() for number in numbers}
        return use.event

    def _is_undisturbed(self, request: Request) -> bool:
        expected = undisturbed(request.number, len(request.tokens))
        if request.tokens != expected.tokens:
            return False
        if request.place is Place.FINISHED:
            return True
        held = self._staging if request.place is Place.POOLED else self._storage
        return held[list(request.memory)].tolist() == expected.content


# --- what is computed


class Undisturbed(NamedTuple):
    """A request that has the device for itself: its tokens, and what its blocks hold after them."""

    tokens: list[int]
    content: list[object]


@cache
def undisturbed(number: int, num_tokens: int) -> Undisturbed:
    """Return the request of this number, computed so often."""
    storage, blocks = torch.zeros((BLOCKS_PER_REQUEST, *BLOCK_SHAPE), dtype=torch.int64), range(BLOCKS_PER_REQUEST)
    _fill(storage, list(blocks), number)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    for index in range(num_tokens):
        _compute(storage, [list(blocks)], tokens[index : index + 1])
    return Undisturbed(tokens.tolist(), storage.tolist())


def _fill(storage: Tensor, blocks: list[int], number: int) -> None:
    storage[blocks] = _weights(storage.device) + 1_000 * number


def _compute(storage: Tensor, blocks: list[list[int]], tokens: Tensor) -> None:
    """Blocks [requests, blocks of each]. Integers that wrap around: the same to the bit on every device."""
    index = torch.tensor(blocks, device=storage.device)
    content = storage[index]
    sums = (content * _weights(storage.device)).sum((1, 2, 3))
    storage[index] = content * 3 + sums.view(-1, 1, 1, 1)
    tokens.copy_(sums)


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd, and all different: no two places of a request's content can stand for each other."""
    size = BLOCKS_PER_REQUEST * BLOCK_SHAPE[0] * BLOCK_SHAPE[1]
    return torch.arange(1, 2 * size, 2).view(BLOCKS_PER_REQUEST, *BLOCK_SHAPE).to(device)

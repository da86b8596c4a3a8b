"""An engine of several ranks on threads of this process: the same engines, commands and exchange as in processes."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import msgspec
from typing_extensions import override

from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.device.collectives import Collectives, SharedMemoryCollectives
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.streams import Event, streams_of
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.native_pass import DecoderRanks
from alignedserve.runtime.engine.ranks.follower_process import FollowerEngine
from alignedserve.runtime.engine.ranks.rank_commands import Command
from alignedserve.runtime.engine.ranks.rank_group import FrameCount, MirroredRanks
from alignedserve.runtime.engine.steps.step_passes import Capture
from alignedserve.runtime.engine.swap_space import SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weight_files import load_weights
from kernels.cpu.rank_exchange import ExchangeBroken, RankExchange, make_exchange_memory
from tests.support.models.tiny_engines import BLOCK_SIZE, MAX_CONTEXT_LEN, TinyEngine, poisoned_storage

_TIMEOUT_S = 60.0
_SLOT_BYTES = 4096  # so that larger arrays take several calls

MakeStorage = Callable[[Decoder], BlockStorage]


def make_collectives(size: int, slot_bytes: int = _SLOT_BYTES) -> list[Collectives]:
    """Return every rank's end."""
    memory = make_exchange_memory(size, slot_bytes)
    ends = [RankExchange(memory, rank, size, timeout_s=_TIMEOUT_S, slot_bytes=slot_bytes) for rank in range(size)]
    os.close(memory)
    return [SharedMemoryCollectives(end) for end in ends]


def shard_decoder(
    folder: Path, collectives: Collectives, dtype: str = "float32", quantization: str | None = None
) -> Decoder:
    """Load one rank's share of a model."""
    config = read_config(folder)
    ranks = DecoderRanks(collectives, config)
    shard = TensorShard(collectives.rank, collectives.size)
    weights = load_weights(folder, config, torch_dtype(dtype), "cpu", quantization, shard=shard)
    return Decoder(ranks.local_config, weights, ranks)


class ThreadRanks(MirroredRanks):
    """The ranks beside the first; their engines are made on their threads. See RankMirror."""

    def __init__(self, makers: Sequence[Callable[[], FollowerEngine]]) -> None:
        super().__init__()
        self.num_frames = 0
        self.performed = [FrameCount() for _ in makers]
        self._queues: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in makers]
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._follow, args=each, daemon=True)
            for each in zip(makers, self._queues, self.performed, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @override
    def kill(self) -> None: ...

    @override
    def close(self) -> None:
        self._told = []
        for queue in self._queues:
            queue.put(b"")
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        assert not self.errors, self.errors

    @override
    def wait_for(self, event: Event) -> None:
        event.synchronize()
        if self.errors:
            raise ExchangeBroken("a rank of this worker has ended")

    @override
    def _send(self, payload: bytes) -> None:
        self.num_frames += 1
        for queue in self._queues:
            queue.put(payload)

    def _follow(self, make: Callable[[], FollowerEngine], queue: "SimpleQueue[bytes]", performed: FrameCount) -> None:
        decoder = msgspec.msgpack.Decoder(list[Command])
        try:
            engine = make()
            swap_space = SwapSpace(engine.storage, streams_of(engine.storage.device))
            while message := queue.get():
                for command in decoder.decode(message):
                    engine.perform(command, swap_space)
                performed.add()
        except BaseException as error:  # noqa: BLE001  (raised by close)
            self.errors.append(error)


class RankedEngine(TinyEngine):
    """A tiny engine whose model is computed by several ranks."""

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        dtype: str = "float32",
        quantization: str | None = None,
        cache_dtype: str | None = None,
        attention: str = AUTO,
        max_sequences: int = 16,
        collectives: Sequence[Collectives] | None = None,
        captures: Sequence[Capture | None] | None = None,
        **options: object,
    ) -> None:
        """`captures`: of each rank's graphs."""
        first, *others = collectives or make_collectives(size)
        captures = captures or [None] * size

        def maker(collectives: Collectives, capture: Capture | None) -> Callable[[], FollowerEngine]:
            def make() -> FollowerEngine:
                decoder = shard_decoder(folder, collectives, dtype, quantization)
                return FollowerEngine(
                    model=decoder,
                    storage=poisoned_storage(decoder, has_scratch=capture is not None, cache_dtype=cache_dtype),
                    options=EngineOptions(
                        max_sequences=max_sequences, max_context_len=MAX_CONTEXT_LEN, attention=attention
                    ),
                    capture=capture,
                )

            return make

        self.ranks = ThreadRanks([maker(other, capture) for other, capture in zip(others, captures[1:], strict=True)])
        decoder = shard_decoder(folder, first, dtype, quantization)
        sizes = {"attention": attention, "max_sequences": max_sequences}
        alike = {"cache_dtype": cache_dtype, "capture": captures[0], **sizes}
        super().__init__(decoder, ranks=self.ranks, **alike, **options)  # type: ignore[arg-type]


__all__ = ["BLOCK_SIZE", "RankedEngine", "ThreadRanks", "make_collectives", "shard_decoder"]

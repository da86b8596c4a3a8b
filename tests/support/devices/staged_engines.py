"""An engine of several stages on threads of this process: the same engines, frames and memory as in processes."""

import os
import socket
import threading
from pathlib import Path

import torch

from alignedserve.core.ids import BlockId
from alignedserve.runtime.device.memory_maps import map_file
from alignedserve.runtime.engine.engine_options import OwnBlocks
from alignedserve.runtime.engine.ranks.frames import encode
from alignedserve.runtime.engine.ranks.rank_group import make_block_memory
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.weight_files import ModelSpec
from plugins.stages.stage_group import StageGroup
from plugins.stages.stage_process import serve_stage
from plugins.stages.stage_spec import (
    StageSpec,
    StageStart,
    load_stage,
    make_stage_storage,
    make_whole_storage,
)
from plugins.stages.stage_wire import FrameKind, StageWire
from plugins.stages.staged_engine import StagedEngine, Stages
from tests.support.models.tiny_engines import BLOCK_SIZE, MAX_CONTEXT_LEN, NUM_BLOCKS, TinyEngine, shuffled_blocks

_JOIN_S = 60.0


class ThreadStage:
    """See StageLink: a stage on a thread."""

    def __init__(self, spec: StageSpec, index: int, blocks: int | None) -> None:
        (ours, theirs), (our_results, their_results) = socket.socketpair(), socket.socketpair()
        self.commands, self.results = StageWire(ours), StageWire(our_results)
        self._thread = threading.Thread(
            target=self._serve, args=(StageWire(theirs), StageWire(their_results)), daemon=True
        )
        self._thread.start()
        self.commands.send(
            FrameKind.SPECIFICATION, encode(StageStart(index, spec, None if blocks is None else os.dup(blocks)))
        )

    def kill(self) -> None:
        self.commands.close()

    def close(self) -> None:
        self.commands.close()
        self._thread.join(_JOIN_S)
        self.results.close()

    def _serve(self, commands: StageWire, results: StageWire) -> None:
        try:
            serve_stage(commands, results)
        finally:
            commands.close()
            results.close()


class StagedTinyEngine(TinyEngine):
    """A tiny engine whose model is computed by several stages; unused slots are poisoned in all of them."""

    def __init__(  # not TinyEngine's: its engine has other memories
        self,
        folder: Path,
        size: int,
        *,
        dtype: str = "float32",
        quantization: str | None = None,
        cache_dtype: str | None = None,
        masks: TokenMasks | None = None,
        num_lent: int = 0,
        max_sequences: int = 16,
        shares_memory: bool = True,
        seed: int = 0,
    ) -> None:
        """`shares_memory`: of all blocks, as on one host."""
        spec = StageSpec(
            model=ModelSpec(read_config(folder), folder, dtype, quantization),
            size=size,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_sequences=max_sequences,
            max_context_len=MAX_CONTEXT_LEN,
            attention="auto",
            cache_dtype=cache_dtype or dtype,
            num_threads=1,
        )
        blocks = make_block_memory(spec.memory_bytes) if shares_memory else None
        if blocks is not None:
            torch.frombuffer(map_file(blocks, spec.memory_bytes), dtype=torch.uint8).fill_(0xFF)
        self.stages = StageGroup(spec, [ThreadStage(spec, index, blocks) for index in range(1, size)])
        self.storage = make_stage_storage(spec, 0, blocks)
        decoder = load_stage(spec, 0)
        self.stages.wait()
        self.engine = StagedEngine(
            model=decoder,
            storage=self.storage,
            options=spec.engine_options,
            stages=Stages(
                self.stages,
                self.storage if blocks is None else make_whole_storage(spec, blocks),
                goes_ahead=not spec.whole_layout.has_states,
            ),
            masks=masks,
            own_blocks=OwnBlocks(lent=[BlockId(NUM_BLOCKS - 1 - index) for index in range(num_lent)]),
        )
        if blocks is not None:
            os.close(blocks)
        self.free_blocks = [block for block in shuffled_blocks(seed) if block < NUM_BLOCKS - num_lent]
        self.blocks: dict[str, tuple[BlockId, ...]] = {}

    def close(self) -> None:
        self.stages.close()

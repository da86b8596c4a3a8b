"""An engine whose single iterations are timed, over as many blocks as they need."""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from alignedserve.core.block_layout import FP8
from alignedserve.costmodel.iteration_points import Point
from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from alignedserve.runtime.kv.block_storage import BlockStorage

BLOCK_SIZE = 16
SPARE = 16  # tokens that a sequence grows by while it is measured, at most


class TimedEngine:
    """An engine with recorded graphs; its blocks have content and lie in no order."""

    def __init__(
        self,
        decoder: Decoder,
        points: Sequence[Point],
        *,
        cache: str | None = None,
        attention: str = AUTO,
        num_more_blocks: int = 0,
    ) -> None:
        """`points`: that fit in it, one at a time. `cache`: its dtype. `num_more_blocks`: at the end, for others."""
        layout = decoder.config.block_layout(BLOCK_SIZE, cache or decoder.dtype_name)
        num_blocks = max(point.num_blocks(BLOCK_SIZE, SPARE) for point in points)
        self.storage = BlockStorage(layout, num_blocks + num_more_blocks, decoder.device)
        with torch.inference_mode():  # a GPU takes less power, and runs faster, over zeros
            if layout.dtype == FP8:
                self.storage.bytes.fill_(0x31)  # small numbers and scales
            else:
                self.storage.blocks.normal_()
        lengths = [length for point in points for length in point.contexts]
        lengths += [chunk.num_cached + chunk.num_tokens for point in points for chunk in point.chunks]
        options = EngineOptions(
            max_sequences=max(len(point.contexts) + len(point.chunks) for point in points),
            max_context_len=max(lengths) + SPARE,
            attention=attention,
        )
        engine = Engine(model=decoder, storage=self.storage, options=options)
        engine.record_graphs()
        block_ids = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.timer = IterationTimer(engine, block_ids=block_ids, clock=time.perf_counter)

    def seconds(self, point: Point, num_rounds: int) -> float:
        self.timer.measure(point)  # compiles and warms up
        return statistics.median(self.timer.measure(point) for _ in range(num_rounds))

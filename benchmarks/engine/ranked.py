"""An engine of several ranks for measurements, without a worker around it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from alignedserve.runtime.device.devices import rank_devices
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.ranks.rank_group import RankGroup
from alignedserve.runtime.engine.ranks.rank_spec import RankEngineSpec, load_shard, make_storage
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.named_models import model_path
from alignedserve.runtime.model.weight_files import ModelSpec
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from lab.profiling.shapes import SHAPES

_RANK_TIMEOUT_S = 60.0


@contextmanager
def started_ranks(spec: RankEngineSpec, *, uses_process_group: bool = False) -> Iterator[Engine]:
    """Start the ranks and give the first one's engine, which the others follow. Raises ModelError.

    `uses_process_group`: they add up by torch.distributed even where shared memory would do.
    """
    group = RankGroup(spec, uses_process_group=uses_process_group)
    try:
        decoder = load_shard(spec, group.collectives)
        storage = make_storage(spec, 0, group.meeting)
        group.wait()
        engine = Engine(model=decoder, storage=storage, options=spec.engine_options, ranks=group)
        engine.record_graphs()
        yield engine
    finally:
        group.close()


def rank_spec(spec: EngineBenchmarkSpec, config: ModelConfig) -> RankEngineSpec:
    folder = None if spec.model in SHAPES else model_path(spec.model)
    return RankEngineSpec(
        model=ModelSpec(config, folder, spec.dtype, spec.quantization, spec.seed),
        size=spec.tensor_parallel,
        devices=rank_devices(spec.device, spec.tensor_parallel),
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        max_sequences=spec.max_sequences,
        max_context_len=spec.max_context_len,
        attention=spec.attention,
        cache_dtype=spec.cache_dtype,
        num_threads=torch.get_num_threads(),
        timeout_s=_RANK_TIMEOUT_S,
    )

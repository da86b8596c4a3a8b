"""What a worker's ranks or stages are told of its model and sizes, and what its measured costs depend on."""

import torch
from msgspec.structs import asdict

from alignedserve.runtime.device.devices import CPU, device_type, rank_devices
from alignedserve.runtime.engine.engine_sizes import EngineSizes, threads_per_rank
from alignedserve.runtime.engine.experts.expert_spec import ExpertSpec
from alignedserve.runtime.engine.model_loading import model_spec_of
from alignedserve.runtime.engine.ranks.part_spec import PartSpec
from alignedserve.runtime.engine.ranks.rank_spec import RankEngineSpec
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.model.sharding.layer_stages import LayerStage, layer_stages
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard

# For which a rank waits for others within a step before it takes them for hung.
_RANK_TIMEOUT_S = 60.0


def rank_spec_of(served: ServedModel, sizes: EngineSizes, num_blocks: int) -> RankEngineSpec:
    devices = rank_devices(sizes.device, served.tensor_parallel)
    return RankEngineSpec(devices=devices, timeout_s=_RANK_TIMEOUT_S, **asdict(part_spec_of(served, sizes, num_blocks)))


def expert_spec_of(served: ServedModel, sizes: EngineSizes) -> ExpertSpec:
    threads = threads_per_rank(sizes, served.processes_per_host)
    return ExpertSpec(model_spec_of(served), served.expert_parallel, threads, _RANK_TIMEOUT_S)


def share_of_first(served: ServedModel) -> TensorShard | LayerStage | None:
    """Return what the worker's own process has of its model; None: all of it."""
    if served.tensor_parallel > 1:
        return TensorShard(0, served.tensor_parallel)
    return layer_stages(served.decoder, served.pipeline_parallel)[0] if served.pipeline_parallel > 1 else None


def described(served: ServedModel, sizes: EngineSizes) -> tuple[str, ...]:
    stored = "" if served.stored is None else served.stored.description
    model = (repr(served.config), served.dtype, f"{served.quantization} {stored}", str(served.cache_dtype))
    threads = threads_per_rank(sizes, served.processes_per_host)
    engine = f"{sizes.attention_backend} {sizes.block_size} {sizes.hidden_block_tokens} {sizes.has_int8_swaps}"
    has_gpu = device_type(sizes.device) != CPU
    gpu = torch.cuda.get_device_properties(sizes.device).name if has_gpu else ""
    ranks = f"{served.tensor_parallel} ranks of {threads} threads"
    stages = (f"{served.pipeline_parallel} stages",) if served.pipeline_parallel > 1 else ()
    shares = (f"{served.expert_parallel} shares of experts",) if served.expert_parallel > 1 else ()
    return (*model, engine, ranks, gpu, f"lora {served.lora.is_enabled}", *stages, *shares)


def part_spec_of(served: ServedModel, sizes: EngineSizes, num_blocks: int) -> PartSpec:
    size = served.num_processes
    return PartSpec(
        model=model_spec_of(served),
        size=size,
        block_size=sizes.block_size,
        num_blocks=num_blocks,
        max_sequences=sizes.max_sequences,
        max_context_len=served.max_context_len,
        max_running=sizes.max_running,
        attention=sizes.attention_backend,
        cache_dtype=served.cache_dtype or served.dtype,
        num_threads=threads_per_rank(sizes, served.processes_per_host),
        has_int8_swaps=sizes.has_int8_swaps,
        wants_shared_blocks=sizes.wants_shared_blocks,
        swap_space_bytes=sizes.swap_space_bytes // size,
        lora=served.lora,
    )

"""Makes the engine of a worker: divides its memory into blocks, and loads the part of the model that it computes.

Loads a worker's model, or the first rank's share of it while others load theirs, once it fits."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from llguidance import LLTokenizer
from msgspec.structs import asdict

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.core.ids import BlockId
from alignedserve.core.plugins import load_plugin
from alignedserve.gguf.file import is_gguf
from alignedserve.process.loading_progress import LoadingProgress
from alignedserve.process.worker_threads import run_quietly
from alignedserve.runtime.attention.registry import check_libraries
from alignedserve.runtime.attention.ring_tables import num_scratch_blocks
from alignedserve.runtime.device.accelerator import free_bytes, used_by_others
from alignedserve.runtime.device.devices import CPU, CUDA, cache_folder, device_type, rank_devices, require_kinds
from alignedserve.runtime.device.streams import DeviceStreams
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.engine_sizes import EngineSizes, engine_blocks, threads_per_rank
from alignedserve.runtime.engine.expert_group import ExpertGroup, ExpertSpec
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.ranks.rank_group import MirroredRanks, RankGroup
from alignedserve.runtime.engine.ranks.rank_spec import (
    PartSpec,
    RankEngineSpec,
    load_shard,
    make_storage,
    whole_storage,
)
from alignedserve.runtime.engine.steps.next_step import num_lent_blocks
from alignedserve.runtime.grammar.memory import grammar_bytes
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.device_kinds import kinds_of
from alignedserve.runtime.model.served_model import ServedModel, load_tokenizer
from alignedserve.runtime.model.sharding.layer_stages import LayerStage, layer_stages
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weight_files import ModelSpec, load_or_draw
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading
from alignedserve.runtime.model.weights.weight_loader import leave_rounded_rows_unwritten

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_OTHERS_BYTES = 1024 * _MIB  # of a GPU, more than this process and the driver take before anything is loaded


def load_vocabulary(served: ServedModel) -> LLTokenizer:
    """Load what grammars know of the model's tokens. Raises ModelError."""
    config = served.decoder
    tokenizer = load_tokenizer(served)
    return grammar_vocabulary(tokenizer, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)


def model_spec_of(served: ServedModel) -> ModelSpec:
    folder = None if served.has_random_weights else served.folder
    return ModelSpec(served.decoder.for_context(served.max_context_len), folder, served.dtype, served.quantization)


def load_decoder(
    served: ServedModel, device: torch.device, progress_path: Path | None, sharing: ExpertReading | None = None
) -> Decoder:
    """Load the whole model, which one rank computes; by `sharing` with one process's experts. Raises ModelError."""
    model = model_spec_of(served)
    with noted_progress(served, progress_path) as progress:
        weights = load_or_draw(model, device, observer=progress, sharing=sharing)
    if not served.lora.is_enabled:
        leave_rounded_rows_unwritten(weights, model.config)
    return Decoder(model.config, weights)


class LoadedDecoder(NamedTuple):
    """A model that this process computes."""

    decoder: Decoder
    experts: ExpertGroup | None = None  # other processes that have some of its experts


def load_alone(served: ServedModel, device: torch.device, progress: Path | None) -> LoadedDecoder:
    """Load all of it here. Raises ModelError; ConfigError where a GPU does not compute its layers as a CPU does."""
    _check_kinds(served, device)
    return LoadedDecoder(load_decoder(served, device, progress))


def _check_kinds(served: ServedModel, device: torch.device) -> None:
    if device.type == CUDA:
        kinds = kinds_of(served.decoder, has_rings=served.has_rings, is_gguf=is_gguf(served.folder))
        require_kinds(str(device), kinds, cache_folder())


def load_divided(served: ServedModel, spec: ExpertSpec, progress: Path | None) -> LoadedDecoder:
    """Start the processes that share a model's experts, and load the rest beside them. Raises ModelError,
    ExchangeBroken when one has ended."""
    group = ExpertGroup(spec)
    try:
        sharing = ExpertReading(spec.share(0), group.of_layer)
        decoder = load_decoder(served, torch.device("cpu"), progress, sharing)
        group.wait()
    except BaseException:
        group.close()
        raise
    return LoadedDecoder(decoder, group)


class LoadedRank(NamedTuple):
    """The first rank of a model. The other ranks are loaded as well."""

    decoder: Decoder
    storage: BlockStorage  # its own
    whole_storage: BlockStorage | None  # of all ranks; None: each rank moves its own blocks
    group: RankGroup


def load_ranks(served: ServedModel, spec: RankEngineSpec, layout: BlockLayout, progress: Path | None) -> LoadedRank:
    """Start the other ranks of a model and load the first's share beside them; `layout` of the worker's blocks. Raises
    ModelError, ExchangeBroken when a rank has ended; ConfigError as `load_alone`."""
    _check_kinds(served, spec.device(0))
    group = RankGroup(spec)
    try:
        storage = make_storage(spec, 0, group.meeting)
        whole = whole_storage(spec, layout, group.meeting)
        with noted_progress(served, progress) as noted:
            decoder = load_shard(spec, group.collectives, noted)
            group.wait()
    except BaseException:
        group.close()
        raise
    return LoadedRank(decoder, storage, whole, group)


@contextmanager
def noted_progress(served: ServedModel, progress_path: Path | None) -> Iterator[LoadingProgress]:
    config, began_s = served.decoder, time.monotonic()
    progress = LoadingProgress(progress_path, config.weight_bytes(served.dtype), config.num_layers)
    yield progress
    progress.finish()
    logger.info("loaded %d MiB of weights in %.1f s", served.weight_bytes // _MIB, time.monotonic() - began_s)


def check_memory(served: ServedModel, kv_cache_bytes: int, device: torch.device, *, lent_bytes: int = 0) -> None:
    """Raise NotEnoughMemory unless a worker's memories fit what is free: on the host, or on the GPU of each rank.

    `lent_bytes`: candidate buffers in the device's memory. On the host what grammars take counts as well."""
    available = free_bytes(device) * (served.tensor_parallel if device.type == CUDA else served.num_hosts)
    if device.type == CUDA:  # for intermediate results, graphs and libraries
        available -= max(available // 10, 256 * _MIB)
    has_grammars = device.type != CUDA and served.encoder is None
    for_grammars = grammar_bytes(served.config.vocab_size) if has_grammars else 0
    beside_blocks = (
        served.weight_bytes
        + served.vision_bytes
        + served.lora.worker_bytes
        + lent_bytes
        + for_grammars
        + served.unpacking_bytes
    )
    if beside_blocks + kv_cache_bytes <= available:
        return
    left = available - beside_blocks
    fits = (
        f"at most {left // _MIB} MiB of blocks would fit: set prefill.kv_cache_bytes and decode.kv_cache_bytes lower, "
        "or choose a smaller model"
        if left > 0
        else "the weights alone do not fit: choose a smaller model"
    )
    others = used_by_others(device)
    if others > _OTHERS_BYTES:
        fits += f"; other processes have {others // _MIB} MiB of it"
    raise NotEnoughMemory(
        f"a worker on {device} needs {(beside_blocks + kv_cache_bytes) // _MIB} MiB (packed weights "
        f"{served.weight_bytes // _MIB}, blocks {kv_cache_bytes // _MIB}, adapters "
        f"{served.lora.worker_bytes // _MIB}, candidate buffers {lent_bytes // _MIB}, grammars "
        f"{for_grammars // _MIB}, unpacking {served.unpacking_bytes // _MIB}), "
        f"{max(available, 0) // _MIB} MiB are available; {fits}"
    )


# A rank that is waited for longer within a step counts as hung.
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


class EngineBlocks(NamedTuple):
    """How many blocks an engine's memory has, by who uses them; they are numbered in this order."""

    num_blocks: int  # of requests
    num_lent: int  # of the engine itself, see BlockLoans and BlockLender
    num_scratch: int  # of rings

    @classmethod
    def of(cls, served: ServedModel, sizes: EngineSizes, layout: BlockLayout) -> "EngineBlocks":
        """Divide an engine's memory. Raises NotEnoughMemory where it has no room for one block."""
        max_running = sizes.most_running
        num_scratch = num_scratch_blocks(layout, sizes.max_tokens, max_running)
        num_blocks, num_lent = engine_blocks(layout, sizes, num_scratch), 0
        if served.pipeline_parallel > 1:
            num_lent = _stages_plugin().num_stage_loans(num_blocks, max_running)
        elif _launches_ahead(served, sizes):
            num_lent = num_lent_blocks(num_blocks, max_running, sizes.block_size)
        return cls(num_blocks - num_lent, num_lent, num_scratch)

    @property
    def num_kept(self) -> int:
        return self.num_blocks + self.num_lent

    @property
    def own(self) -> OwnBlocks:
        first_scratch = self.num_kept
        return OwnBlocks(
            lent=[BlockId(self.num_blocks + index) for index in range(self.num_lent)],
            ring_scratch=[BlockId(first_scratch + index) for index in range(self.num_scratch)],
        )


class LoadedParts(NamedTuple):
    """The part of a model that this process computes, with its blocks, and the processes that compute the rest."""

    decoder: Decoder
    storage: BlockStorage  # of its own parts of the blocks
    whole_storage: BlockStorage  # of all parts that are on this host; its own where ranks move theirs
    ranks: MirroredRanks | None = None
    experts: ExpertGroup | None = None


ConnectStages = Callable[[Any], Sequence[Any]]  # from a specification of stages to their links, as the plugin has them


class StagesPlugin(Protocol):
    """What the plugin `stages` does for a worker whose model is divided by layers."""

    def num_stage_loans(self, num_blocks: int, max_running: int) -> int:
        """Return how many of the worker's blocks the engine keeps for itself."""

    def load_stages(
        self, served: ServedModel, part: PartSpec, progress_path: Path | None, connect: ConnectStages | None
    ) -> LoadedParts:
        """Start the other stages on this host, or `connect` to other hosts, and load the first stage beside them.
        Raises ModelError, NotEnoughMemory, PeerLost, ExchangeBroken when a stage has ended."""

    def make_engine(self, parts: LoadedParts, *, goes_ahead: bool, **engine: Any) -> Engine:
        """Make the engine of the first stage. `goes_ahead`: sequences decode after their prompts, and have no states.

        `engine`: the keyword arguments of Engine."""


def _stages_plugin() -> StagesPlugin:
    plugin: StagesPlugin = load_plugin("stages")
    return plugin


def load_parts(
    served: ServedModel,
    sizes: EngineSizes,
    blocks: EngineBlocks,
    progress_path: Path | None,
    connect_stages: ConnectStages | None,
) -> LoadedParts:
    """Load the model here and in the other processes of the worker. Raises what `load_ranks`,
    `StagesPlugin.load_stages`, `load_divided` and `load_alone` do."""
    layout, num_kept = served.block_layout(sizes.block_size), blocks.num_kept
    if served.tensor_parallel > 1:
        rank = load_ranks(served, rank_spec_of(served, sizes, num_kept), layout, progress_path)
        return LoadedParts(rank.decoder, rank.storage, rank.whole_storage or rank.storage, rank.group)
    if served.pipeline_parallel > 1:
        part = part_spec_of(served, sizes, num_kept)
        return _stages_plugin().load_stages(served, part, progress_path, connect_stages)
    device = torch.device(sizes.device)
    load: Callable[[], LoadedDecoder] = partial(load_alone, served, device, progress_path)
    if served.expert_parallel > 1:
        load = partial(load_divided, served, expert_spec_of(served, sizes), progress_path)
    decoder, experts = run_quietly(load) if sizes.loads_quietly else load()
    num_stored = num_kept + blocks.num_scratch
    check_libraries(sizes.attention_backend, layout, num_stored, decoder.config, device)
    storage = BlockStorage(layout, num_stored, device)
    return LoadedParts(decoder, storage, storage, experts=experts)


def make_engine(
    served: ServedModel,
    sizes: EngineSizes,
    blocks: EngineBlocks,
    parts: LoadedParts,
    *,
    streams: DeviceStreams,
    masks: TokenMasks,
) -> Engine:
    options = EngineOptions(
        max_sequences=sizes.max_sequences,
        max_context_len=served.max_context_len,
        max_running=sizes.most_running,
        attention=sizes.attention_backend,
    )
    make: Callable[..., Engine]
    if served.pipeline_parallel > 1:
        goes_ahead = sizes.is_decoding and not served.block_layout(sizes.block_size).has_states
        make = partial(_stages_plugin().make_engine, parts, goes_ahead=goes_ahead)
    else:
        make = partial(Engine, ranks=parts.ranks)
        options = replace(
            options,
            hidden_block_tokens=sizes.hidden_block_tokens,
            launches_ahead=_launches_ahead(served, sizes),
            stops_passes=sizes.stops_passes,
        )
    return make(
        model=parts.decoder, storage=parts.storage, options=options, own_blocks=blocks.own, streams=streams, masks=masks
    )


def _launches_ahead(served: ServedModel, sizes: EngineSizes) -> bool:
    return sizes.may_launch_ahead and served.num_processes == 1

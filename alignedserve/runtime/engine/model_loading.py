"""Loads a worker's model, or the first rank's share of it while others load theirs, once it fits."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from llguidance import LLTokenizer

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.gguf.file import is_gguf
from alignedserve.process.loading_progress import LoadingProgress
from alignedserve.runtime.device.device_work import free_bytes, used_by_others
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.device.verdicts import cache_folder, require_kinds
from alignedserve.runtime.engine.expert_group import ExpertGroup, ExpertSpec
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.ranks.rank_group import RankGroup
from alignedserve.runtime.engine.ranks.rank_spec import RankEngineSpec, load_shard, make_storage, whole_storage
from alignedserve.runtime.grammar.memory import grammar_bytes
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.device_kinds import kinds_of
from alignedserve.runtime.model.served_model import ServedModel, load_tokenizer
from alignedserve.runtime.model.weight_files import ModelSpec, load_or_draw
from alignedserve.runtime.model.weights.decoder_weights import leave_rounded_rows_unwritten
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading

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
    """Start the processes that share a model's experts, and load the rest beside them.

    Raises ModelError, ExchangeBroken when one has ended.
    """
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
    """Start the other ranks of a model and load the first's share beside them; `layout` of the worker's blocks.

    Raises ModelError, ExchangeBroken when a rank has ended; ConfigError as `load_alone`.
    """
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

    `lent_bytes`: candidate buffers in the device's memory. On the host what grammars take counts as well.
    """
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

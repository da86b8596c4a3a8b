"""The model that a cluster serves, resolved once at its start without loading weights (and without torch)."""

import logging
import os
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from alignedserve.config.sections import EngineConfig, LoraConfig, ModelSectionConfig, PrefixCacheConfig
from alignedserve.core.block_layout import LARGEST_BLOCK, BlockLayout
from alignedserve.core.errors import ConfigError, ModelError
from alignedserve.core.plugins import load_plugin
from alignedserve.core.request import LoraAdapter
from alignedserve.core.seeing import PictureEncoder
from alignedserve.costmodel.model_shapes import rings_pay
from alignedserve.gguf.file import GgufFile, gguf_stem, is_gguf
from alignedserve.process.addresses import ROUTER
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.model_files import (
    StoredWeights,
    fingerprint_of,
    read_served_config,
    unused_parts,
    weights_in_files,
)
from alignedserve.runtime.model.named_models import BUILT_IN, POCKET, model_path, own_template
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.sampling_defaults import SamplingDefaults, sampling_defaults
from alignedserve.runtime.model.sharding.layer_stages import check_pipeline_parallel, staged_layout
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard, check_expert_parallel, check_tensor_parallel
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import read_template

logger = logging.getLogger(__name__)

AUTO, WHOLE, RING = "auto", "whole", "ring"
_CPU = "cpu"
_BLOCK_SIZE = 16  # tokens
_ON_ONE_CPU = EngineConfig(device="cpu", window_cache=WHOLE)
_WIDEST_STATES = 1.25  # smaller blocks are chosen where a context's states take no more by these than in any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model's facts, fixed when the cluster starts. Plain values, so that every actor can receive it."""

    name: str  # what clients call it
    folder: Path  # or GGUF file
    config: ModelConfig | EncoderConfig
    dtype: str  # of weights, and of the cache unless cache_dtype is set
    max_context_len: int
    has_random_weights: bool
    quantization: str | None = None  # of the linear layers: None or int8
    stored: StoredWeights | None = None  # of files that have them packed
    cache_dtype: str | None = None  # of keys and values: int8, or None: as `dtype`
    chat_template: str | None = None  # instead of the model's own
    tool_format: str | None = None  # as in the configuration, like the next
    reasoning_format: str | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)  # which adapters its requests may have
    adapters: tuple[LoraAdapter, ...] = ()  # those of the configuration
    aliases: tuple[str, ...] = ()  # further names that clients may call it by
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that name nothing
    tensor_parallel: int = 1  # ranks of a worker, which compute the model together
    pipeline_parallel: int = 1  # stages of a worker, each with layers of its own
    expert_parallel: int = 1  # processes of a worker that share the experts
    num_hosts: int = 1  # that the stages of a worker are on, one each; 1: all on its own
    vision: PictureEncoder | None = None  # by which it sees pictures; None: it does not
    states_apart: bool = False  # large recurrent states have blocks of their own, not a part of each block of tokens
    has_rings: bool = False  # layers with a window keep no more than it
    weights: str = ""  # the fingerprint of those that every worker is to load; empty: it is not checked

    @property
    def encoder(self) -> EncoderConfig | None:
        """Return the config of an encoder; None: the model is a decoder."""
        return self.config if isinstance(self.config, EncoderConfig) else None

    @property
    def decoder(self) -> ModelConfig:
        """Return the config of a decoder, which the model must be."""
        assert isinstance(self.config, ModelConfig), "an encoder where a decoder belongs"
        return self.config

    @property
    def weight_bytes(self) -> int:
        if self.stored is not None:
            return self.stored.num_bytes
        return self.config.loaded_weight_bytes(self.dtype, self.quantization)

    @property
    def vision_bytes(self) -> int:
        """Return the bytes of a worker for seeing: weights, and embeddings of pictures; 0: the model does not see."""
        return 0 if self.vision is None else self.vision.worker_bytes(self.dtype)

    @property
    def unpacking_bytes(self) -> int:
        """Return the bytes of a worker's GPUs in which products of many rows unpack their weights; 0: none do."""
        return 0 if self.stored is None else self.stored.unpacking_bytes

    @property
    def rank_config(self) -> ModelConfig | EncoderConfig:
        """Return the config of what one rank computes; sizes of the first, which has the least."""
        if self.tensor_parallel == 1 or not isinstance(self.config, ModelConfig):
            return self.config
        return TensorShard(0, self.tensor_parallel).local(self.config)

    @property
    def default_block_size(self) -> int:
        """Return the tokens of a block unless they are set. Blocks with states are so long that states take no more
        room than keys and values; states with blocks of their own fill these well."""
        sizes = [_BLOCK_SIZE << power for power in range((LARGEST_BLOCK // _BLOCK_SIZE).bit_length())]
        layouts = {size: self.block_layout(size) for size in sizes}
        least = min((layout.context_bytes for layout in layouts.values() if layout.state_blocks), default=0)
        if least:
            suited = (size for size, layout in layouts.items() if 0 < layout.context_bytes <= _WIDEST_STATES * least)
        else:
            suited = (size for size, layout in layouts.items() if layout.state_bytes <= layout.kv_bytes)
        return next(suited, LARGEST_BLOCK)

    @property
    def num_processes(self) -> int:
        """Return how many processes compute a worker's steps: its ranks, or its stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def processes_per_host(self) -> int:
        """Return how many of them share the cores of a host."""
        return self.num_processes * self.expert_parallel // self.num_hosts

    def block_layout(self, block_size: int) -> BlockLayout:
        """Return the layout of a worker's KV blocks: of each its ranks' parts, one after another, as if more layers."""
        layout = self.rank_config.block_layout(block_size, self.cache_dtype or self.dtype)
        if self.states_apart:
            return self.decoder.layout_apart(layout)
        if self.has_rings:
            return self.decoder.layout_of_rings(layout)
        if layout.state_bytes and self.pipeline_parallel > 1:
            return staged_layout(self.decoder, self.pipeline_parallel, block_size, layout.dtype)
        return replace(layout, num_layers=layout.num_layers * self.tensor_parallel)


def resolve_model(
    section: ModelSectionConfig,
    engine: EngineConfig = _ON_ONE_CPU,
    *,
    has_bfloat16: bool = False,
    has_float8: bool = False,
    states_apart: bool = False,
) -> ServedModel:
    """Read the model's config. `engine`: with its device decided. `has_bfloat16`, `has_float8`: the processor, or
    GPU, multiplies them. `states_apart`: large recurrent states may have blocks of their own. Raises ModelError,
    ConfigError."""
    folder = model_path(section.path)
    file = GgufFile(folder) if is_gguf(folder) else None
    config = read_served_config(folder) if file is None else gguf_config(file)
    _check_engine(config, engine)
    if isinstance(config, EncoderConfig):
        _check_encoder(section)
    longest, device = config.max_position_embeddings, engine.device
    if section.max_context_len is not None and section.max_context_len > longest:
        raise ConfigError(f"model.max_context_len is {section.max_context_len}; the model was made for {longest}")
    dtype = section.dtype
    if dtype == "auto":
        dtype = _default_dtype(device, has_bfloat16=has_bfloat16 and section.path != POCKET)
    stored = None
    if not section.random_weights and isinstance(config, ModelConfig):
        stored = weights_in_files(file or folder, config, Computing(device, dtype, has_float8), section.quantization)
    cache_dtype = None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    max_context_len = section.max_context_len or longest
    template = own_template(section.path, None if file is None else file.metadata.get("tokenizer.chat_template"))
    template = template if section.chat_template is None else read_template(Path(section.chat_template))
    unused = unused_parts(folder) if file is None else []
    if unused:
        logger.warning("Not used of %s: %s.", folder, "; ".join(unused))
    return ServedModel(
        name=section.served_model_name or _default_name(section.path, folder),
        folder=folder,
        config=config,
        dtype=dtype,
        max_context_len=max_context_len,
        has_random_weights=section.random_weights,
        quantization=section.quantization,
        stored=stored,
        cache_dtype=cache_dtype,
        chat_template=template,
        tool_format=section.tool_format,
        reasoning_format=section.reasoning_format,
        aliases=section.aliases,
        sampling=_sampling(section, config, file or folder, template),
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        expert_parallel=engine.expert_parallel,
        vision=_vision(config, folder if file is None else None, engine.num_processes),
        states_apart=states_apart and engine.pipeline_parallel == 1 and _has_large_states(config, dtype),
        has_rings=has_rings(
            engine.window_cache,
            config,
            cache_dtype or dtype,
            max_context_len,
            device=device,
            num_processes=engine.num_processes,
        ),
        weights="" if section.random_weights else fingerprint_of(folder),
    )


def _has_large_states(config: ModelConfig | EncoderConfig, dtype: str) -> bool:
    if isinstance(config, EncoderConfig):
        return False
    layout = config.block_layout(_BLOCK_SIZE, dtype)
    return layout.state_bytes > layout.kv_bytes


def _sampling(
    section: ModelSectionConfig, config: ModelConfig | EncoderConfig, files: Path | GgufFile, template: str | None
) -> SamplingDefaults:
    if isinstance(config, EncoderConfig):
        return SamplingDefaults()
    return sampling_defaults(section.sampling, files, template)


def _vision(config: ModelConfig | EncoderConfig, folder: Path | None, num_ranks: int) -> PictureEncoder | None:
    if folder is None or num_ranks > 1 or isinstance(config, EncoderConfig):
        return None
    try:
        plugin = load_plugin("vision")
    except ConfigError:  # whoever sends a picture is told of it
        return None
    encoder: PictureEncoder | None = plugin.read_encoder(folder, config)
    return encoder


def _check_encoder(section: ModelSectionConfig) -> None:
    for name in ("chat_template", "tool_format", "reasoning_format", "sampling"):
        if getattr(section, name) not in (None, "auto"):
            raise ConfigError(f"model.{name} has no effect on an encoder, which writes nothing; leave it out")


def _check_engine(config: ModelConfig | EncoderConfig, engine: EngineConfig) -> None:
    if isinstance(config, ModelConfig):
        check_tensor_parallel(config, engine.tensor_parallel)
        check_pipeline_parallel(config, engine.pipeline_parallel, engine.tensor_parallel, engine.device)
        check_expert_parallel(config, engine.expert_parallel, engine.num_processes, engine.device)
        return
    useless = {
        "kv_cache_dtype": (engine.kv_cache_dtype != "auto", "which keeps no cache"),
        "tensor_parallel": (engine.tensor_parallel > 1, "which one rank computes"),
        "pipeline_parallel": (engine.pipeline_parallel > 1, "which is one stage"),
        "expert_parallel": (engine.expert_parallel > 1, "which has no experts"),
    }
    for name, (is_set, reason) in useless.items():
        if is_set:
            raise ConfigError(f"engine.{name} has no effect on an encoder, {reason}; leave it out")


def load_tokenizer(served: ServedModel) -> Tokenizer:
    """Load the model's tokenizer. Raises ModelError, also when prompts may need tokens that the embedding lacks."""
    tokenizer = Tokenizer.load(served.folder, served.config.vocab_size, served.chat_template)
    if tokenizer.vocab_size > served.config.vocab_size:
        raise ModelError(
            f"{served.folder}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
            f"{served.config.vocab_size} rows; they are of different models, or tokens were added without rows."
        )
    return tokenizer


def _default_name(name: str, path: Path) -> str:
    if name in BUILT_IN:
        return name
    return gguf_stem(path.name) if is_gguf(path) else Path(os.path.abspath(path)).name  # a link's own


def _default_dtype(device: str, *, has_bfloat16: bool) -> str:
    """Return bfloat16 where it is fast. The pocket model stays in float32: its answers are the same on every
    machine."""
    return "bfloat16" if has_bfloat16 or device.startswith("cuda") else "float32"


def has_rings(
    choice: str,
    config: ModelConfig | EncoderConfig,
    cache_dtype: str,
    max_context_len: int,
    *,
    device: str = _CPU,
    num_processes: int = 1,
) -> bool:
    """Return whether layers with a window keep no more than it, in rings: see BlockLayout.with_rings, decision 81.

    `choice`: as in engine.window_cache. Raises ConfigError where rings are asked for and cannot be."""
    obstacle = _obstacle(config, num_processes)
    if choice == RING and obstacle is not None:
        raise no_rings(obstacle)
    if choice == WHOLE or obstacle is not None or isinstance(config, EncoderConfig):
        return False
    if choice == RING:
        return True
    whole, is_on_cpu = config.block_layout(_BLOCK_SIZE, cache_dtype), device.startswith(_CPU)
    return is_on_cpu and rings_pay(whole, config.layout_of_rings(whole), max_context_len)


def no_rings(obstacle: str) -> ConfigError:
    return ConfigError(f"engine.window_cache=ring: {obstacle}; leave it at auto")


def _obstacle(config: ModelConfig | EncoderConfig, num_processes: int) -> str | None:
    if isinstance(config, EncoderConfig) or not config.may_have_rings:
        return "this model has no layers with a window beside plain ones without, all with the same heads"
    return "the ranks and stages of a worker have none" if num_processes > 1 else None


class DeploymentPhase(Enum):
    """What a deployment may be asked for."""

    PREPARING = "preparing"  # nothing yet: gateways connect to it, load its tokenizer and wait for a token
    SERVING = "serving"  # requests that name its model; of one name at most one serves
    DRAINING = "draining"  # no more requests; those that it has are finished
    SLEEPING = "sleeping"  # it has no processes: requests that name its model wait until it is loaded


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """One deployment. Plain values, so that every actor can receive it."""

    served: ServedModel
    block_size: int  # of its workers' blocks, which requests may share
    prefix_cache: PrefixCacheConfig
    deployment_id: str = ""  # as in the names of its processes; empty: the first of a cluster
    router: str = ROUTER  # its router's name
    phase: DeploymentPhase = DeploymentPhase.SERVING
    problem: str = ""  # of one that sleeps: why it cannot be loaded at present
    is_failing: bool = False  # those of its workers that do not serve have failed to start again and again


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A deployment, from a gateway or the batch worker."""

    deployment_id: str
    missing: str | None  # why no request could be answered from here; None: a token has come through
    num_open: int  # requests that hold it here, from when their model was looked up to their last token
    num_documents: int = 0  # of them, lines of batches
    has_lines: bool = False  # batches have lines for its model that wait
    idle_s: float | None = None  # since its last request here; None: there was none
    keep_alive_s: float | None = None  # by its last request; None: it set none
    waited_s: float | None = None  # how long a real-time request has waited for it here; None: none waits
    documents_waited_s: float | None = None  # the same of best effort
    is_hopeless: bool = False  # what is missing does not come by waiting

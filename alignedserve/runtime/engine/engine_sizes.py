"""The sizes of a worker's engine, and how its memory is divided into blocks."""

from dataclasses import dataclass, replace

from alignedserve.config.sections import EngineConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout, recomputed_blocks
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import CPU, device_type
from alignedserve.runtime.kv.transfers.kv_transfer import lends_device_memory
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.policies import wanted_mechanisms
from alignedserve.scheduling.policy import Mechanism

LAYERS_AHEAD = 2  # of what a GPU computes, where a pass may stop: it has work while the host launches the next layer


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The resources of one worker's engine, and its options."""

    kv_cache_bytes: int  # block storage
    max_sequences: int
    block_size: int
    num_threads: int | None = None  # CPU threads of one forward pass; all cores when None
    attention_backend: str = "auto"  # one of CHOICES of runtime.attention
    device: str = CPU  # as torch spells it
    has_int8_swaps: bool = False  # caches in host memory are rounded to 8 bits per channel
    hidden_block_tokens: int | None = None  # tokens whose layer inputs a block may hold; None: only keys and values
    wants_shared_blocks: bool = False  # two requests may fill a block from its two ends, if attention allows it
    jumps_ahead: bool = False  # tokens that a grammar forces are computed several at once
    may_draft: bool = False  # tokens are guessed, and several are verified at once
    loads_quietly: bool = False  # at low priority, as other models serve on these cores
    lent_bytes: int = 0  # candidate buffers in the device's memory
    is_decoding: bool = True  # its sequences go on after their prompts
    swap_space_bytes: int = 0  # of caches in host memory, that is registered with a GPU at the start
    max_running: int | None = None  # sequences of one step, of those that it holds; None: all
    max_tokens: int = 2048  # of one step, for which memory is kept where layers with a window have rings
    stops_passes: bool = False  # iterations of chats run between the layers of others

    @property
    def most_running(self) -> int:
        return self.max_running or self.max_sequences

    @property
    def may_launch_ahead(self) -> bool:
        """Return whether a step may be launched for sequences that may turn out to have ended. A CPU is not idle
        meanwhile; slots behind a sequence whose blocks are shared from both ends may be another's."""
        return self.is_decoding and not self.wants_shared_blocks and device_type(self.device) != CPU

    def configured(self, config: EngineConfig) -> "EngineSizes":
        """Return these with the engine's configuration, whose device and threads are decided. `lent_bytes` may be on
        the host, where they take nothing from the engine."""
        is_lending = device_type(config.device) != CPU and lends_device_memory(config)
        may_jump = self.is_decoding and not self.wants_shared_blocks  # else slots behind a sequence may be another's
        return replace(
            self,
            block_size=config.block_size,
            num_threads=config.threads_per_worker,
            attention_backend=config.attention_backend,
            device=config.device,
            jumps_ahead=may_jump and jumps_ahead(config.jump_ahead, config.device),
            may_draft=may_jump and config.speculation,
            lent_bytes=self.lent_bytes if is_lending else 0,
        )


def jumps_ahead(wanted: bool | None, device: str) -> bool:
    """Return whether tokens of one request are computed several at once; by default where that is measured to pay."""
    return wanted if wanted is not None else device_type(device) == CPU


def can_stop(device: str, served: ServedModel) -> bool:
    """Return whether the engine stops passes between two layers unasked: not on a GPU, where it has not been measured,
    nor where ranks or stages go through the layers together; an encoder's passes are short."""
    return device_type(device) == CPU and served.num_processes == 1 and served.encoder is None


def num_stops(layout: BlockLayout, device: str) -> int:
    """Return at how many places of a pass the engine can stop it: behind each layer, or on a GPU each group of layers
    that may be launched and not computed."""
    num_layers = layout.num_layers + layout.ring_layers
    return num_layers if device_type(device) == CPU else max(num_layers // (1 + LAYERS_AHEAD), 1)


def engine_mechanisms(
    *, has_int8_swaps: bool, has_hidden_cache: bool, has_shared_blocks: bool = False
) -> frozenset[Mechanism]:
    available = {
        Mechanism.SWAP: True,
        Mechanism.INT8_SWAP: has_int8_swaps,
        Mechanism.HIDDEN_CACHE: has_hidden_cache,
        Mechanism.SHARED_BLOCKS: has_shared_blocks,
    }
    return frozenset(mechanism for mechanism, is_available in available.items() if is_available)


def hidden_block_tokens(served: ServedModel, scheduling: SchedulingConfig, block_size: int) -> int | None:
    """Return the tokens whose layer inputs a block holds; None: policy or model exclude hidden caches."""
    wants = Mechanism.HIDDEN_CACHE in wanted_mechanisms(scheduling)
    return served.rank_config.hidden_block_tokens(block_size) if wants else None


def swapped_bytes(swap_space_bytes: int, scheduling: SchedulingConfig) -> int:
    """Return the bytes of host memory that a policy may swap caches to."""
    return swap_space_bytes if Mechanism.SWAP in wanted_mechanisms(scheduling) else 0


def storage_blocks(layout: BlockLayout, kv_cache_bytes: int, hidden_block_tokens: int | None) -> int:
    """Return the blocks that fit an engine's memory. Hidden caches need a part of it to recompute keys and values, one
    layer at a time."""
    if hidden_block_tokens is None:
        return layout.blocks_in(kv_cache_bytes)
    return kv_cache_bytes // (layout.block_bytes + recomputing_bytes(layout, hidden_block_tokens))


def engine_blocks(layout: BlockLayout, sizes: EngineSizes, num_scratch: int) -> int:
    """Return the blocks of an engine's memory but for scratch blocks, for which a host has room beside it. Raises
    NotEnoughMemory where there are none."""
    num_beside = 0 if device_type(sizes.device) == CPU else num_scratch
    num_blocks = storage_blocks(layout, sizes.kv_cache_bytes, sizes.hidden_block_tokens) - num_beside
    if num_blocks < 1:
        needed = layout.block_bytes * (1 + num_beside)
        raise NotEnoughMemory(f"kv_cache_bytes is {sizes.kv_cache_bytes}, less than the {needed} of one block")
    return num_blocks


def recomputing_bytes(layout: BlockLayout, hidden_block_tokens: int | None) -> int:
    """Return the bytes beside each block in which one layer of a hidden cache is recomputed; 0: there are none."""
    if hidden_block_tokens is None:
        return 0
    return recomputed_blocks(hidden_block_tokens, layout.block_size) * layout.block_bytes // layout.num_layers


def bytes_beside_blocks(served: ServedModel, scheduling: SchedulingConfig, block_size: int) -> int:
    """Return the bytes beside each block of a decode worker, where the policy keeps hidden caches."""
    block_tokens = hidden_block_tokens(served, scheduling, block_size)
    return recomputing_bytes(served.block_layout(block_size), block_tokens)


def threads_per_rank(sizes: EngineSizes, tensor_parallel: int) -> int:
    return max((sizes.num_threads or num_cores()) // tensor_parallel, 1)

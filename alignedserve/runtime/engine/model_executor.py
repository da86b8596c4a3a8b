"""The model executor of a worker: the model, its blocks, a computing thread and a copying thread per peer.

Prefill and decode workers differ in their decisions, not in how these are performed, so both own one of these.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer

from alignedserve.config.sections import EngineConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.iterations import (
    Addition,
    IterationCompleted,
    IterationTimes,
    PromptScores,
    RunIteration,
)
from alignedserve.messages.wire import Message
from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import CPU, free_bytes, use_device
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.calibration import measure_iterations
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepTimes
from alignedserve.runtime.engine.hidden_cache import recomputed_blocks
from alignedserve.runtime.engine.slot_swap_space import SlotSwapSpace
from alignedserve.runtime.engine.swap_space import HostCaches, SwapSpace
from alignedserve.runtime.grammar.arrivals import prepare_grammars
from alignedserve.runtime.grammar.compiler import GrammarCompiler
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.runtime.kv.block_copier import BlockCopier
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.registry import AUTO as AUTO_TRANSPORT
from alignedserve.runtime.model.random_weights import random_weights
from alignedserve.runtime.model.served_model import ServedModel, load_tokenizer
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.runtime.process.links import Identity
from alignedserve.runtime.process.loading_progress import LoadingProgress
from alignedserve.runtime.process.worker_threads import WorkerThreads
from alignedserve.scheduling.policies import wanted_mechanisms
from alignedserve.scheduling.policy import Mechanism

logger = logging.getLogger(__name__)

_COMPUTE = "compute"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The resources of one worker's engine, and its options."""

    kv_cache_bytes: int  # block storage
    max_sequences: int
    block_size: int
    num_threads: int | None = None  # CPU threads of one forward pass; all cores when None
    attention_backend: str = AUTO  # one of CHOICES of runtime.attention
    device: str = CPU  # as torch spells it
    has_int8_swaps: bool = False  # caches in host memory are rounded to 8 bits per channel
    hidden_block_tokens: int | None = None  # tokens whose layer inputs a block may hold; None: only keys and values
    wants_shared_blocks: bool = False  # two requests may fill a block from its two ends, if attention allows it


def engine_sizes(
    config: EngineConfig,
    kv_cache_bytes: int,
    max_sequences: int,
    *,
    has_int8_swaps: bool = False,
    hidden_block_tokens: int | None = None,
    wants_shared_blocks: bool = False,
) -> EngineSizes:
    """Combine the engine's configuration, whose device and threads are decided, with one worker's sizes."""
    return EngineSizes(
        kv_cache_bytes,
        max_sequences,
        config.block_size,
        config.threads_per_worker,
        config.attention_backend,
        config.device,
        has_int8_swaps,
        hidden_block_tokens,
        wants_shared_blocks,
    )


def engine_mechanisms(
    *, has_int8_swaps: bool, has_hidden_cache: bool, has_shared_blocks: bool = False
) -> frozenset[Mechanism]:
    """Return the mechanisms that a scheduling policy can use beyond chunks and pauses."""
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
    return served.config.hidden_block_tokens(block_size) if wants else None


def storage_blocks(layout: BlockLayout, kv_cache_bytes: int, hidden_block_tokens: int | None) -> int:
    """Return the blocks that fit an engine's memory.

    Hidden caches need a part of it to recompute keys and values, one layer at a time.
    """
    if hidden_block_tokens is None:
        return layout.blocks_in(kv_cache_bytes)
    return kv_cache_bytes // (layout.block_bytes + recomputing_bytes(layout, hidden_block_tokens))


def recomputing_bytes(layout: BlockLayout, hidden_block_tokens: int | None) -> int:
    """Return the bytes beside each block in which one layer of a hidden cache is recomputed; 0: there are none."""
    if hidden_block_tokens is None:
        return 0
    return recomputed_blocks(hidden_block_tokens, layout.block_size) * layout.block_bytes // layout.num_layers


def bytes_beside_blocks(served: ServedModel, scheduling: SchedulingConfig, block_size: int) -> int:
    """Return the bytes beside each block of a decode worker, where the policy keeps hidden caches."""
    block_tokens = hidden_block_tokens(served, scheduling, block_size)
    return recomputing_bytes(served.block_layout(block_size), block_tokens)


class ModelExecutor:
    """Performs RunIteration. `start_iteration` returns at once; the result goes to the callback on the loop.

    Construction takes as long as loading the weights, and raises NotEnoughMemory, ConfigError or ModelError.
    """

    def __init__(self, served: ServedModel, sizes: EngineSizes, progress_path: Path | None = None) -> None:
        """`progress_path`: the file for how far the loading has come."""
        torch.set_num_threads(sizes.num_threads or num_cores())
        device = torch.device(sizes.device)
        _check_memory(served, sizes, device)
        use_device(device)
        layout = served.block_layout(sizes.block_size)
        self.num_blocks = storage_blocks(layout, sizes.kv_cache_bytes, sizes.hidden_block_tokens)
        if self.num_blocks < 1:
            raise NotEnoughMemory(
                f"kv_cache_bytes is {sizes.kv_cache_bytes}, less than one block of {layout.block_bytes}"
            )
        self.layout = layout
        self.eos_token_ids = frozenset(served.config.eos_token_ids)
        self._grammars = GrammarCompiler(partial(_load_vocabulary, served))
        self._masks = TokenMasks(
            self._grammars,
            vocab_size=served.config.vocab_size,
            eos_token_ids=served.config.eos_token_ids,
            num_threads=sizes.num_threads or num_cores(),
        )
        self._storage = BlockStorage(layout, self.num_blocks, device)
        streams = streams_of(device)
        self._engine = Engine(
            model=_load_decoder(served, device, progress_path),
            storage=self._storage,
            max_sequences=sizes.max_sequences,
            max_context_len=served.max_context_len,
            attention=sizes.attention_backend,
            streams=streams,
            hidden_block_tokens=sizes.hidden_block_tokens,
            masks=self._masks,
        )
        self.has_shared_blocks = sizes.wants_shared_blocks and self._engine.can_share_blocks
        self._swap_space: HostCaches
        if sizes.wants_shared_blocks and not self.has_shared_blocks:
            logger.warning("blocks are not shared: attention in torch reads slots that a sequence does not use")
        if self.has_shared_blocks:
            self._swap_space = SlotSwapSpace(self._storage, streams)
        else:
            self._swap_space = SwapSpace(self._storage, streams, is_int8=sizes.has_int8_swaps)
        self._engine.record_graphs()
        self._threads = WorkerThreads(partial(use_device, device))
        self._sizes, self._max_context_len = sizes, served.max_context_len
        self._grammars.wait()  # until then it takes time from what is measured next

    def copier(self, identity: Identity, *, transport: str = AUTO_TRANSPORT) -> BlockCopier:
        """Return a copier of this engine's blocks; `transport` as in engine.kv_transport."""
        return BlockCopier(self._storage, self._threads, identity, transport=transport)

    def measure_iterations(self, duration_s: float, max_tokens: int) -> tuple[Sample, ...]:
        """Measure the initial costs of iterations of up to `max_tokens`, on the calling thread, before serving."""
        return measure_iterations(
            self._engine,
            self._swap_space,
            max_sequences=self._sizes.max_sequences,
            max_context_len=self._max_context_len,
            max_tokens=max_tokens,
            duration_s=duration_s,
        )

    def prepare(self, message: Message) -> "Future[LLMatcher] | None":
        """Begin what the requests of a message need; return what a new one waits for, if anything."""
        return prepare_grammars(self._grammars, message)

    def check_grammar(self, grammar: str) -> None:
        """Raise InvalidRequest for a grammar that answers of this model cannot follow; empty: there is none."""
        if grammar:
            self._grammars.check(grammar)

    def start_iteration(self, command: RunIteration, on_completed: Callable[[IterationCompleted], None]) -> None:
        """Perform one iteration on the compute thread."""
        self._threads.submit(_COMPUTE, lambda: self.run_iteration(command), on_completed)

    def close(self) -> None:
        """Wait for the threads to end; pending work is cancelled without a callback."""
        self._threads.close()
        self._masks.close()
        self._grammars.close()

    # --- on the threads

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """Perform one iteration on the calling thread, which must be the only one to do so."""
        started = time.monotonic()
        self._change_sequences(command)
        changed = time.monotonic()
        if not command.slices:  # copies to the host alone
            times = IterationTimes(started, time.monotonic(), changed - started, 0.0, 0.0)
            return IterationCompleted((), times=times)
        output = self._engine.execute(command.slices)
        scores = tuple(
            PromptScores(part.request_id, part.first_position, part.entries) for part in output.prompt_logprobs
        )
        sampled, failed = tuple(output.sampled), tuple(output.failed)
        reasons = tuple(output.reasons.items())
        return IterationCompleted(sampled, scores, failed, reasons, _times_of(output.times, started, changed))

    def _change_sequences(self, command: RunIteration) -> None:
        """Apply the command's changes to the engine's sequences."""
        copied = self._engine.read_blocks([copy.source for copy in command.copies]) if command.copies else None
        if command.swaps is not None:
            self._swap_space.perform(command.swaps)
        if copied is not None:
            self._engine.write_blocks([copy.target for copy in command.copies], copied)
        for replacement in command.replacements:
            self._engine.replace_block(replacement.request_id, replacement.place, replacement.block_id)
        for request_id in command.removals:
            self._engine.remove_sequence(request_id)
        for addition in command.additions:
            self._engine.add_sequence(_sequence_of(addition))
        for request_id, block_ids in command.extensions:
            self._engine.append_blocks(request_id, block_ids)


def _sequence_of(addition: Addition) -> NewSequence:
    request = addition.request
    return NewSequence(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids + addition.generated_token_ids,
        prompt_len=request.prompt_len,
        num_cached=addition.num_cached,
        block_ids=addition.block_ids,
        sampling=request.sampling,
        is_hidden=addition.is_hidden,
        is_reversed=addition.is_reversed,
    )


def _times_of(step: StepTimes, started: float, changed: float) -> IterationTimes:
    """Return the times of an iteration that ends now and whose sequences were changed until `changed`."""
    return IterationTimes(
        started_s=started,
        finished_s=time.monotonic(),
        prepare_s=changed - started + step.prepare_s,
        forward_s=step.forward_s,
        sampling_s=step.sampling_s,
        attention_s=step.attention_s,
        padded_share=step.padded_share,
    )


def _load_vocabulary(served: ServedModel) -> LLTokenizer:
    config = served.config
    tokenizer = load_tokenizer(served)
    return grammar_vocabulary(tokenizer, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)


def _load_decoder(served: ServedModel, device: torch.device, progress_path: Path | None) -> Decoder:
    config = served.config.for_context(served.max_context_len)
    dtype, quantization = torch_dtype(served.dtype), served.quantization
    began_s = time.monotonic()
    progress = LoadingProgress(progress_path, config.weight_bytes(served.dtype), config.num_layers)
    if served.has_random_weights:
        weights = random_weights(config, 0, dtype, device, quantization, observer=progress)
    else:
        weights = load_weights(served.folder, config, dtype, device, quantization, observer=progress)
    progress.finish()
    logger.info("loaded %d MiB of weights in %.1f s", served.weight_bytes // _MIB, time.monotonic() - began_s)
    return Decoder(config, weights)


def _check_memory(served: ServedModel, sizes: EngineSizes, device: torch.device) -> None:
    available = free_bytes(device)
    if device.type == "cuda":  # for intermediate results, graphs and libraries
        available -= max(available // 10, 256 * _MIB)
    if served.weight_bytes + sizes.kv_cache_bytes <= available:
        return
    left = available - served.weight_bytes
    fits = (
        f"at most {left // _MIB} MiB of blocks would fit: set prefill.kv_cache_bytes and decode.kv_cache_bytes lower, "
        "or choose a smaller model"
        if left > 0
        else "the weights alone do not fit: choose a smaller model"
    )
    raise NotEnoughMemory(
        f"a worker on {device} needs {(served.weight_bytes + sizes.kv_cache_bytes) // _MIB} MiB (packed weights "
        f"{served.weight_bytes // _MIB}, blocks {sizes.kv_cache_bytes // _MIB}), {max(available, 0) // _MIB} MiB are "
        f"available; {fits}"
    )

"""A worker's heavy half: the model, its blocks and two threads, one that computes and one that copies.

Prefill and decode workers differ in what they decide, not in how it is performed, so both own one of these.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from alignedserve.core.errors import HandoffRejected, NotEnoughMemory, PeerError
from alignedserve.messages.iterations import Addition, IterationCompleted, OffloadBlocks, PromptScores, RunIteration
from alignedserve.messages.links import ArenaOffered, BlockRun, Handoff
from alignedserve.runtime.arena import Arena
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.decoder import Decoder
from alignedserve.runtime.dtypes import torch_dtype
from alignedserve.runtime.engine import Engine, NewSequence
from alignedserve.runtime.served_model import ServedModel
from alignedserve.runtime.transfer import Incoming, KVTransfer, Outgoing, ShmTransfer
from alignedserve.runtime.weight_files import load_weights
from alignedserve.runtime.weights import random_weights

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How much of the machine one worker takes."""

    memory_bytes: int  # block storage
    max_sequences: int
    block_size: int
    num_threads: int | None = None  # CPU threads of one forward pass; all cores when None


class WorkerEngine:
    """Performs RunIteration and OffloadBlocks. The methods return at once; results go to the callbacks on the loop.

    Raises NotEnoughMemory or ModelError when made; making it takes as long as loading the weights.
    """

    def __init__(self, served: ServedModel, sizes: EngineSizes) -> None:
        torch.set_num_threads(sizes.num_threads or len(os.sched_getaffinity(0)))
        _check_memory(served, sizes)
        layout = served.block_layout(sizes.block_size)
        self.num_blocks = sizes.memory_bytes // layout.block_bytes
        if self.num_blocks < 1:
            raise NotEnoughMemory(f"memory_bytes is {sizes.memory_bytes}, less than one block of {layout.block_bytes}")
        self.eos_token_ids = frozenset(served.config.eos_token_ids)
        self._layout = layout
        self._storage = BlockStorage(layout, self.num_blocks)
        self._engine = Engine(
            model=_load_decoder(served),
            storage=self._storage,
            max_sequences=sizes.max_sequences,
            max_context_len=served.max_context_len,
        )
        self._transfer: KVTransfer | None = None
        self._compute_thread = ThreadPoolExecutor(1, "compute")
        self._copy_thread = ThreadPoolExecutor(1, "copy")
        self._is_closed = False

    # --- called on the loop

    def map_arena(self, offered: ArenaOffered) -> None:
        """Use this arena from now on. One that cannot be mapped makes every handoff a miss."""
        try:
            arena = Arena.attach(Path(offered.path), self._layout)
        except HandoffRejected as error:
            logger.error("%s", error)
            self._transfer = None
            return
        self._transfer = ShmTransfer(self._storage, arena)

    def start_iteration(self, command: RunIteration, on_completed: Callable[[IterationCompleted], None]) -> None:
        """Perform one iteration on the compute thread."""
        self._submit(self._compute_thread, lambda: self.run_iteration(command), on_completed)

    def start_offload(
        self, command: OffloadBlocks, on_completed: Callable[[tuple[BlockRun, ...] | None], None]
    ) -> None:
        """Copy blocks out on the copy thread, beside whatever is computed; None: the lease did not hold."""
        self._submit(self._copy_thread, lambda: self._offload(command), on_completed)

    def close(self) -> None:
        """Wait for the threads to end; whatever was asked for and is not done calls nobody back."""
        self._is_closed = True
        self._compute_thread.shutdown(cancel_futures=True)
        self._copy_thread.shutdown(cancel_futures=True)

    def _submit(self, executor: ThreadPoolExecutor, work: Callable[[], T], on_completed: Callable[[T], None]) -> None:
        """Run on the executor, then call back on the loop; by hand, as futures cost a tenth of an iteration's gap."""
        loop = asyncio.get_running_loop()

        def deliver(outcome: Callable[[], T]) -> None:
            if not self._is_closed:
                on_completed(outcome())  # what the work raised is raised here, where a broken room ends its process

        executor.submit(lambda: loop.call_soon_threadsafe(deliver, _outcome_of(work)))

    # --- on the threads

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """Perform one iteration on the calling thread, which must be the only one to do so."""
        engine = self._engine
        for request_id in command.removals:
            engine.remove_sequence(request_id)
        refused = tuple(addition.request.request_id for addition in command.additions if not self._add(addition))
        for request_id, block_ids in command.extensions:
            engine.append_blocks(request_id, block_ids)
        slices = [part for part in command.slices if part[0] not in refused] if refused else command.slices
        if not slices:
            return IterationCompleted((), refused=refused)
        output = engine.execute(slices)
        scores = (PromptScores(part.request_id, part.first_position, part.entries) for part in output.prompt_logprobs)
        return IterationCompleted(tuple(output.sampled), tuple(scores), refused, tuple(output.failed))

    def _add(self, addition: Addition) -> bool:
        """Bring one sequence in; False when its handoff does not hold."""
        request, handoff = addition.request, addition.handoff
        if handoff is not None and not self._fetch(addition):
            return False
        sequence = NewSequence(
            request_id=request.request_id,
            token_ids=request.prompt_token_ids + addition.generated_token_ids,
            prompt_len=request.prompt_len,
            num_cached=handoff.copy.context_len if handoff is not None else 0,
            block_ids=addition.block_ids,
            sampling=request.sampling,
        )
        self._engine.add_sequence(sequence)
        return True

    def _fetch(self, addition: Addition) -> bool:
        request_id, copy = addition.request.request_id, _handoff_of(addition).copy
        try:
            (is_held,) = self._checked_transfer(addition).fetch([Incoming(copy, addition.block_ids)])
        except PeerError as error:
            logger.warning("request %s: handoff refused: %s", request_id, error)
            return False
        if not is_held:
            logger.warning("request %s: handoff refused (generation %d)", request_id, copy.generation)
        return is_held

    def _checked_transfer(self, addition: Addition) -> KVTransfer:
        handoff = _handoff_of(addition)
        num_tokens = addition.request.prompt_len + len(addition.generated_token_ids)
        if handoff.request.request_id != addition.request.request_id or handoff.copy.context_len != num_tokens - 1:
            raise HandoffRejected("the handoff is of another request or another length")
        if self._transfer is None:
            raise HandoffRejected("no arena is mapped")
        return self._transfer

    def _offload(self, command: OffloadBlocks) -> tuple[BlockRun, ...] | None:
        reserved = command.reserved
        try:
            if self._transfer is None:
                raise HandoffRejected("no arena is mapped")
            outgoing = Outgoing(command.block_ids, reserved.block_ids, reserved.generation)
            (runs,) = self._transfer.offload([outgoing])
        except PeerError as error:
            logger.warning("request %s: offload given up: %s", command.request_id, error)
            return None
        if runs is None:
            logger.warning("request %s: offload given up (generation %d)", command.request_id, reserved.generation)
        return runs


def _outcome_of(work: Callable[[], T]) -> Callable[[], T]:
    """Do the work and return what returns its result, or raises what it raised, on whichever thread that is wanted."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (raised again by the caller of the outcome)
        future.set_exception(error)
    return future.result


def _handoff_of(addition: Addition) -> Handoff:
    assert addition.handoff is not None, "an addition without a handoff is computed, not fetched"
    return addition.handoff


def _load_decoder(served: ServedModel) -> Decoder:
    dtype = torch_dtype(served.dtype)
    if served.has_random_weights:
        return Decoder(served.config, random_weights(served.config, 0, dtype))
    return Decoder(served.config, load_weights(served.folder, served.config, dtype))


def _check_memory(served: ServedModel, sizes: EngineSizes) -> None:
    needed = served.config.weight_bytes(served.dtype) + sizes.memory_bytes
    available = psutil.virtual_memory().available
    if needed > available:
        mib = 1024 * 1024
        raise NotEnoughMemory(
            f"a worker needs {needed // mib} MiB (weights {served.config.weight_bytes(served.dtype) // mib}, "
            f"blocks {sizes.memory_bytes // mib}), {available // mib} MiB are available; "
            "set prefill.memory_bytes and decode.memory_bytes lower or choose a smaller model"
        )

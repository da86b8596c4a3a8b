"""The model executor of a worker: the model, its blocks, a computing thread and a copying thread per peer.

Prefill and decode workers differ in their decisions, not in how these are performed, so both own one of these."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignedserve.core.errors import FailureKind
from alignedserve.core.plugins import load_plugin
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.iterations import Addition, IterationCompleted, IterationTimes, PromptScores, RunIteration
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import requests_of
from alignedserve.process.links import Identity
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device.accelerator import use_device, working
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import cache_folder
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.device_turns import DeviceTurns
from alignedserve.runtime.engine.engine import COMPUTE, NewSequence, StepTimes
from alignedserve.runtime.engine.engine_sizes import EngineSizes, can_stop, threads_per_rank
from alignedserve.runtime.engine.measured_iterations import KeptCalibration, measure_iterations
from alignedserve.runtime.engine.swap_space import make_swap_space
from alignedserve.runtime.engine.urgent_iterations import UrgentIterations
from alignedserve.runtime.engine.worker_engine import (
    ConnectStages,
    EngineBlocks,
    check_memory,
    described,
    load_parts,
    load_vocabulary,
    make_engine,
    share_of_first,
)
from alignedserve.runtime.grammar.compiler import GrammarCompiler
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.kv.candidate_memory import BlockCopier
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO as AUTO_TRANSPORT
from alignedserve.runtime.lora.adapter_cache import SequenceAdapters
from alignedserve.runtime.model.model_files import unchanged_weights
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.pictures import NoPictures, Pictures, SequenceEmbeddings, Turn, rope_places
from alignedserve.scheduling.picture_turns import TurnLengths
from kernels.cpu.rank_exchange import ExchangeBroken
from kernels.lora import AdapterMatrices

logger = logging.getLogger(__name__)

_THREAD = "compute"  # which computes


class ModelExecutor:
    """Performs RunIteration. `start_iteration` returns at once; the result goes to the callback on the loop.
    Construction takes as long as loading the weights, and raises NotEnoughMemory, ConfigError or ModelError."""

    def __init__(
        self,
        served: ServedModel,
        sizes: EngineSizes,
        progress_path: Path | None = None,
        shared_device: SharedDevice | None = None,
        connect_stages: ConnectStages | None = None,
    ) -> None:
        """`progress_path`: notes how far the loading has come. `shared_device`: None: it gives way to no other worker.
        `connect_stages`: to stages on other hosts; None: all stages are on this host."""
        self._is_again = progress_path is not None and progress_path.exists()  # which an earlier start has left
        self._turns = DeviceTurns(shared_device)
        torch.set_num_threads(threads_per_rank(sizes, served.processes_per_host))
        device = torch.device(sizes.device)
        check_memory(served, sizes.kv_cache_bytes, device, lent_bytes=sizes.lent_bytes)
        use_device(device)
        self.layout = served.block_layout(sizes.block_size)
        blocks = EngineBlocks.of(served, sizes, self.layout)
        self.num_blocks = blocks.num_blocks
        self.eos_token_ids = frozenset(served.config.eos_token_ids)
        self._grammars = GrammarCompiler(partial(load_vocabulary, served))
        self._masks = TokenMasks(
            self._grammars,
            vocab_size=served.config.vocab_size,
            eos_token_ids=served.config.eos_token_ids,
            num_threads=sizes.num_threads or num_cores(),
            jumps_ahead=sizes.jumps_ahead and served.pipeline_parallel == 1,
            may_skip=sizes.is_decoding,
        )
        shard = share_of_first(served)
        self._adapters = SequenceAdapters(served.lora, served.decoder, torch_dtype(served.dtype), device, shard)
        with unchanged_weights(served.folder, served.weights):
            parts = load_parts(served, sizes, blocks, progress_path, connect_stages)
        self._storage, self._ranks, self._experts = parts.whole_storage, parts.ranks, parts.experts
        self._moves_all = self._storage.layout == self.layout
        streams = streams_of(device)
        self._engine = make_engine(served, sizes, blocks, parts, streams=streams, masks=self._masks)
        self.has_shared_blocks = sizes.wants_shared_blocks and self._engine.can_share_blocks
        if sizes.wants_shared_blocks and not self.has_shared_blocks:
            reason = "a block has one state" if self.layout.has_states else "attention in torch reads slots not in use"
            logger.warning("blocks are not shared by two requests: %s", reason)
        self._swap_space = make_swap_space(
            self._storage,
            streams,
            shares_blocks=self.has_shared_blocks,
            is_int8=sizes.has_int8_swaps,
            host_bytes=sizes.swap_space_bytes // served.num_processes,  # of this rank's parts
        )
        self._engine.record_graphs(has_adapters=served.lora.is_enabled)
        self._threads = WorkerThreads(partial(use_device, device))
        self._pictures = self._see(served, device)
        self._turn_lengths = TurnLengths()
        rope = served.decoder.rope
        self._has_axes = rope is not None and bool(rope.axes)
        stops_queue = sizes.stops_passes and device.type != "cpu"
        self._urgent = UrgentIterations(streams.stream(COMPUTE) if stops_queue else None)
        if stops_queue or can_stop(sizes.device, served):
            parts.decoder.stop_for(self._between_layers)
        self._sizes, self._max_context_len = sizes, served.max_context_len
        self._described = described(served, sizes)
        self._computes_alone = device.type == "cpu" and served.num_processes == 1 and self._experts is None
        self._num_in_flight = 0  # iterations

    @property
    def lanes(self) -> CopyLanes | None:
        """The lanes of the device's copies; None: the blocks are on the host."""
        return self._storage.lanes

    def copier(self, identity: Identity, *, transport: str = AUTO_TRANSPORT) -> BlockCopier:
        """Return a copier of this engine's blocks; `transport` as in engine.kv_transport."""
        ranks = None if self._ranks is None or self._moves_all else self._ranks.copies
        return BlockCopier(self._storage, self._threads, identity, transport=transport, ranks=ranks)

    def measure_iterations(self, duration_s: float, max_tokens: int) -> tuple[Sample, ...]:
        """Measure the initial costs of iterations of up to `max_tokens`, on the calling thread, before serving."""
        return measure_iterations(
            self._engine,
            self._swap_space,
            max_sequences=self._sizes.most_running,
            max_context_len=self._max_context_len,
            max_tokens=max_tokens,
            duration_s=duration_s,
            # Not while other processes have the cores: at a start they make one iteration a hundred times as long.
            computing_clock=time.thread_time if self._computes_alone else None,
            kept=KeptCalibration(cache_folder(), self._described, is_again=self._is_again),
            turn=self._turns.giving_way,
        )

    def prepare(self, message: Message) -> "Sequence[Future[Any]]":
        self._turns.on_message(message)
        grammars = [
            self._grammars.compile(request.sampling.grammar, is_real_time=request.is_real_time)
            for request in requests_of(message)
            if request.sampling.grammar
        ]
        return [*grammars, *self._adapters.prepare(message), *self._pictures.prepare(message)]

    def check_grammar(self, grammar: str) -> None:
        """Raise InvalidRequest for a grammar that answers of this model cannot follow; empty: there is none."""
        if grammar:
            self._grammars.check(grammar)

    def start_iteration(self, command: RunIteration, on_completed: Callable[[IterationCompleted], None]) -> None:
        """Perform one iteration on the compute thread; an urgent one within that in flight, if it still is."""
        self._num_in_flight += 1
        self._adapters.rest(has_ended=False)

        def complete(completed: IterationCompleted) -> None:
            self._num_in_flight -= 1
            on_completed(completed)  # which may start the next one
            self._adapters.rest(has_ended=not self._num_in_flight)

        if not command.is_urgent:
            self._threads.submit(_THREAD, lambda: self.run_iteration(command), complete)
            return
        self._urgent.add(self._threads, lambda: self._run_urgent(command), complete)
        self._threads.submit(_THREAD, self._urgent.perform_left, lambda _: None)

    def close(self) -> None:
        """Wait for the threads to end; pending work is cancelled without a callback."""
        self._pictures.close()
        self._threads.close()
        self._masks.close()
        self._grammars.close()
        self._adapters.close()
        self._turns.close()
        for group in (self._ranks, self._experts):
            if group is not None:
                group.close()

    def _see(self, served: ServedModel, device: torch.device) -> Pictures:
        if served.vision is None:
            return NoPictures()
        pictures: Pictures = load_plugin("vision").worker_pictures(
            served.vision,
            None if served.has_random_weights else served.folder,
            torch_dtype(served.dtype),
            device,
            take_turn=self._take_picture_turn,
            has_real_time=self._turns.has_real_time,
        )
        return pictures

    def _take_picture_turn(self, turn: Turn, is_real_time: bool) -> "Future[bool]":
        def perform() -> bool:
            with self._turns.taken(is_real_time=is_real_time), working(self._storage.device):
                began = time.monotonic()
                try:
                    return turn(self._turn_lengths.turn_s)
                finally:
                    self._turn_lengths.took(time.monotonic() - began)

        return self._threads.call(_THREAD, perform)

    # --- on the threads

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """Perform one iteration on the calling thread; no other thread may."""
        with self._turns.taken_for(command), working(self._storage.device):
            try:
                return self._run(command)
            except ExchangeBroken:
                for group in (self._ranks, self._experts):
                    if group is not None:
                        group.kill()
                raise

    def _run_urgent(self, command: RunIteration) -> IterationCompleted:
        if not self._urgent.is_within:
            return self.run_iteration(command)
        with self._turns.taken_within(command):
            return self._run(command)

    def _between_layers(self) -> None:
        if self._engine.may_stop:
            self._urgent.between_layers()
            self._turns.between_layers()

    def _run(self, command: RunIteration) -> IterationCompleted:
        started = time.monotonic()
        self._change_sequences(command)
        changed = time.monotonic()
        if not command.slices:  # copies to the host alone
            if self._ranks is not None:
                self._ranks.flush()
            times = IterationTimes(started, time.monotonic(), changed - started, 0.0, 0.0)
            return IterationCompleted((), times=times)
        self._urgent.pass_begins(command.slices)
        # Else a step of this model would run in the turn of another that somebody waits for.
        output = self._engine.execute(command.slices, may_go_on=self._turns.is_alone())
        scores = tuple(
            PromptScores(part.request_id, part.first_position, part.entries) for part in output.prompt_logprobs
        )
        lacking = self._adapters.failures(part[0] for part in command.slices)
        lacking |= self._pictures.failures(part[0] for part in command.slices)
        sampled = tuple(output.sampled)
        if lacking:
            sampled = tuple(token for token in sampled if token.request_id not in lacking)
        failed = (*(request_id for request_id in output.failed if request_id not in lacking), *lacking)
        reasons = output.reasons | {lost: (FailureKind.UNSERVABLE, why) for lost, why in lacking.items()}
        forced = tuple(count for count in output.forced if count[0] not in lacking)
        yielded_s = 0.0 if command.is_urgent else self._urgent.take_stopped_s() + self._turns.take_stopped_s()
        turn_s = 0.0 if command.is_urgent else self._turn_lengths.before_iteration()
        times = _times_of(output.times, started, changed, yielded_s, turn_s)
        self._turn_lengths.ran(times.computed_s)
        outcome = sampled, scores, failed, tuple(reasons.items()), forced
        return IterationCompleted(*outcome, times, command.is_urgent, output.skipped)

    def _change_sequences(self, command: RunIteration) -> None:
        copied = self._engine.read_blocks([copy.source for copy in command.copies]) if command.copies else None
        if command.swaps is not None:
            self._swap_space.perform(command.swaps)
            if self._ranks is not None and not self._moves_all:
                self._ranks.perform_swaps(command.swaps)
        if copied is not None:
            self._engine.write_blocks([copy.target for copy in command.copies], copied)
        for replacement in command.replacements:
            self._engine.replace_block(replacement.request_id, replacement.place, replacement.block_id)
        for request_id in command.removals:
            self._engine.remove_sequence(request_id)
            self._adapters.remove(request_id)
            self._pictures.remove(request_id)
            self._turn_lengths.leave(request_id)
        for addition in command.additions:
            self._turn_lengths.enter(addition.request)
            adapter = self._adapters.add(addition.request)
            pictures = self._pictures.add(addition.request, addition.num_cached)
            self._engine.add_sequence(_sequence_of(addition, adapter, pictures, has_axes=self._has_axes))
        for request_id, block_ids in command.extensions:
            self._engine.append_blocks(request_id, block_ids)
        for state in command.states:
            self._engine.keep_states(*state)


def _sequence_of(
    addition: Addition, adapter: AdapterMatrices | None, pictures: SequenceEmbeddings | None, *, has_axes: bool
) -> NewSequence:
    request = addition.request
    return NewSequence(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids + addition.generated_token_ids,
        prompt_len=request.prompt_len,
        num_cached=addition.num_cached,
        block_ids=addition.block_ids,
        sampling=request.sampling,
        tenant=request.tenant,
        is_real_time=request.is_real_time,
        is_hidden=addition.is_hidden,
        is_reversed=addition.is_reversed,
        adapter=adapter,
        lora=None if adapter is None else request.adapter,
        places=rope_places(request.prompt_len, request.pictures) if has_axes else None,
        pictures=pictures,
        whole_runs=request.whole_runs,
    )


def _times_of(step: StepTimes, started: float, changed: float, yielded_s: float, turn_s: float) -> IterationTimes:
    """Return the times of an iteration that ends now, whose sequences were changed until `changed` and whose pass stood
    still for `yielded_s`, after a turn of `turn_s`."""
    return IterationTimes(
        started_s=started,
        finished_s=time.monotonic(),
        prepare_s=changed - started + step.prepare_s,
        forward_s=step.forward_s - yielded_s,
        sampling_s=step.sampling_s,
        attention_s=step.attention_s,
        straggler_share=step.padded_share,
        grammar_s=step.grammar_s,
        is_ahead=step.is_ahead,
        yielded_s=yielded_s,
        turn_s=turn_s,
    )

"""The model executor of a worker: the model, its blocks, a computing thread and a copying thread per peer.

Prefill and decode workers differ in their decisions, not in how these are performed, so both own one of these.

The turns of a worker on a shared device: its iterations for chats go before iterations for documents.

Iterations that run within another one: its pass stands still between two layers meanwhile, and loses nothing.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from alignedserve.config.sections import EngineConfig
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.plugins import load_plugin
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.iterations import Addition, IterationCompleted, IterationTimes, PromptScores, RunIteration
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import requests_of
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device.accelerator import use_device, working
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import CPU, cache_folder, device_type
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.device.streams import Event, Stream, streams_of
from alignedserve.runtime.engine.engine import COMPUTE, NewSequence, StepTimes
from alignedserve.runtime.engine.engine_sizes import LAYERS_AHEAD, EngineSizes, can_stop, threads_per_rank
from alignedserve.runtime.engine.measured_iterations import KeptCalibration, measure_iterations
from alignedserve.runtime.engine.swap_space import make_swap_space
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

_LEAST_TOKENS = 512  # of such a pass: the layers of shorter ones take hardly longer than launching them


class PassPace:
    """The layers of the pass in progress that were launched last, on a stream of a GPU."""

    def __init__(self, stream: Stream, layers_ahead: int) -> None:
        """`stream`: of forward passes. `layers_ahead`: that may be launched and not computed."""
        self._stream, self._layers_ahead = stream, layers_ahead
        self._launched: deque[Event] = deque()
        self._is_kept = False

    def begin(self, num_tokens: int) -> None:
        self._is_kept = num_tokens >= _LEAST_TOKENS
        self._launched.clear()

    def layer_launched(self) -> None:
        if self._is_kept:
            self._launched.append(self._stream.record())
            if len(self._launched) > self._layers_ahead:
                self._launched.popleft().synchronize()


_ANSWER_S = 0.02  # at most, until what follows one that has ended is decided: mostly a millisecond

T = TypeVar("T")


class UrgentIterations:
    """Those that wait for the pass in progress to come to the end of a layer. For its thread, except `add`.

    A pass has its state on the stack of its thread, and an urgent pass runs on top of that stack. Sequences,
    blocks and results are its own: nothing of the other changes, to the last bit.

    When one has ended, the pass stands still until its worker has dealt with that: the next one, which has come
    meanwhile, would wait for a whole layer otherwise."""

    def __init__(self, stream: Stream | None = None) -> None:
        """`stream`: on which passes are launched; None: they are computed as they are called."""
        self._pace = None if stream is None else PassPace(stream, LAYERS_AHEAD)
        self._waiting: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._is_performing = False
        self._stopped_s = 0.0
        self.is_within = False  # what is performed now, in another pass

    def add(self, threads: WorkerThreads, work: Callable[[], T], on_completed: Callable[[T], None]) -> None:
        """Add an iteration, on the event loop, which also gets the result, as from `threads`."""
        is_dealt_with = threading.Event()

        def completed(result: T) -> None:
            on_completed(result)
            is_dealt_with.set()

        self._waiting.append((threads.performer(work, completed), is_dealt_with))

    def pass_begins(self, slices: Iterable[tuple[RequestId, int]]) -> None:
        if self._pace is not None and not self.is_within:
            self._pace.begin(sum(num_tokens for _, num_tokens in slices))

    def between_layers(self) -> None:
        if self._pace is not None and not self.is_within:
            self._pace.layer_launched()
        if not self._waiting or self._is_performing:
            return
        began = time.monotonic()
        self.is_within = True
        self._perform(_ANSWER_S)
        self._stopped_s += time.monotonic() - began

    def perform_left(self) -> None:
        self._perform(0.0)

    def _perform(self, answer_s: float) -> None:
        self._is_performing = True
        try:
            while self._waiting:
                perform, is_dealt_with = self._waiting.popleft()
                perform()
                is_dealt_with.wait(answer_s)
        finally:
            self._is_performing = self.is_within = False

    def take_stopped_s(self) -> float:
        stopped_s, self._stopped_s = self._stopped_s, 0.0
        return stopped_s


class DeviceTurns:
    """Knows the sequences of an executor that somebody waits for. For its compute thread, except `on_message`."""

    def __init__(self, device: SharedDevice | None) -> None:
        """`device`: None: every turn is taken at once."""
        self._device = device
        self._real_time: set[RequestId] = set()

    def on_message(self, message: Message) -> None:
        """End a wait when a message brings a request that somebody waits for. From any thread."""
        if self._device is not None and any(request.is_real_time for request in requests_of(message)):
            self._device.on_arrival()

    @contextlib.contextmanager
    def taken_for(self, command: RunIteration) -> Iterator[None]:
        """Take the device for one iteration, once no other worker's is more urgent; see SharedDevice."""
        self.note(command)
        urgent = [num_tokens for request_id, num_tokens in command.slices if request_id in self._real_time]
        with self.taken(is_real_time=bool(urgent), has_prompt=max(urgent, default=0) > 1):
            yield

    @contextlib.contextmanager
    def taken_within(self, command: RunIteration) -> Iterator[None]:
        self.note(command)
        with self._device.taken_within() if self._device is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def taken(self, *, is_real_time: bool, has_prompt: bool = False, may_stop: bool = True) -> Iterator[None]:
        if self._device is None:
            yield
            return
        self._device.begin(is_real_time=is_real_time, has_prompt=has_prompt, may_stop=may_stop)
        try:
            yield
        finally:
            self._device.end(is_real_time=is_real_time)

    def between_layers(self) -> None:
        if self._device is not None:
            self._device.between_layers()

    def take_stopped_s(self) -> float:
        return self._device.take_stopped_s() if self._device is not None else 0.0

    def note(self, command: RunIteration) -> None:
        self._real_time.difference_update(command.removals)  # first: a later attempt may be added with the same id
        for addition in command.additions:
            if addition.request.is_real_time:
                self._real_time.add(addition.request.request_id)

    def has_real_time(self) -> bool:
        """Return whether somebody waits for a sequence of the executor. From any thread."""
        return bool(self._real_time)

    def is_alone(self) -> bool:
        """Return whether no other worker asks for the device: what is launched now may run on behind the turn."""
        return self._device is None or self._device.is_alone()

    def giving_way(self) -> contextlib.AbstractContextManager[None]:
        """Take the device for work that is timed before the worker serves, and for which nobody waits."""
        return self.taken(is_real_time=False, may_stop=False)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()


def shared_device_of(spec: ProcessSpec, config: EngineConfig) -> SharedDevice | None:
    """Return the rules of a worker on its device; None: it gives way to no other worker."""
    num_threads = (config.threads_per_worker or num_cores()) if device_type(config.device) == CPU else 0
    folder, share = spec.addresses.folder, config.best_effort_share
    return SharedDevice.of(folder, config.device, spec.deployment_id, share, num_threads)


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
    def may_draft(self) -> bool:
        """Whether iterations may have drafts."""
        return self._sizes.may_draft and self._engine.may_draft

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
        drafts = dict(command.drafts)
        output = self._engine.execute(command.slices, may_go_on=self._turns.is_alone(), drafts=drafts)
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
        return IterationCompleted(*outcome, times, command.is_urgent, output.skipped, output.drafted)

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

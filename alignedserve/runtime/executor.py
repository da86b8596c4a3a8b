"""Makes the executor of a worker, which performs its iterations, by the kind of its model, and the buffers it lends."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from alignedserve.config.sections import EngineConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.messages.wire import Message
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.encoder.executor import EncoderExecutor
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.engine.worker_engine import ConnectStages
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import BlockCopier, CandidateMemory
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.kv_transfer import lends_device_memory
from alignedserve.runtime.model.served_model import ServedModel


class Executor(Protocol):
    """What workers that do both phases use of ModelExecutor and EncoderExecutor alike."""

    num_blocks: int
    layout: BlockLayout
    eos_token_ids: frozenset[int]
    has_shared_blocks: bool

    @property
    def may_draft(self) -> bool:
        """Whether iterations may have drafts."""

    @property
    def lanes(self) -> CopyLanes | None:
        """The lanes of the device's copies; None: the blocks are on the host."""

    def copier(self, identity: Identity, *, transport: str = ...) -> BlockCopier:
        """Return a copier of the executor's blocks."""

    def measure_iterations(self, duration_s: float, max_tokens: int) -> tuple[Sample, ...]:
        """Measure the initial costs of iterations, before serving."""

    def prepare(self, message: Message) -> "Sequence[Future[Any]]":
        """Begin what the requests of a message need; return what they wait for."""

    def check_grammar(self, grammar: str) -> None:
        """Raise InvalidRequest for a grammar that answers of this model cannot follow; empty: there is none."""

    def start_iteration(self, command: RunIteration, on_completed: Callable[[IterationCompleted], None]) -> None:
        """Perform one iteration on the compute thread; the result goes to the callback on the loop."""

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """Perform one iteration on the calling thread."""

    def close(self) -> None:
        """Wait for the threads to end."""


def make_executor(
    served: ServedModel,
    sizes: EngineSizes,
    progress_path: Path | None = None,
    shared_device: SharedDevice | None = None,
    connect_stages: ConnectStages | None = None,
) -> Executor:
    """Load the model and return an executor for it. Arguments and errors as of ModelExecutor."""
    if served.encoder is not None:
        return EncoderExecutor(served, sizes, progress_path, shared_device)
    return ModelExecutor(served, sizes, progress_path, shared_device, connect_stages)


def make_candidate_memory(
    executor: Executor, budget: BufferBudget, process_spec: ProcessSpec, config: EngineConfig
) -> CandidateMemory:
    """Return the buffers that a worker lends: in its device's memory if its transport moves blocks between those."""
    lanes = executor.lanes if lends_device_memory(config) else None
    return CandidateMemory(executor.layout, budget, process_spec, transport=config.kv_transport, lanes=lanes)

"""The executor of a worker that serves an encoder.

A prompt's tokens all read each other, so it is computed as a whole once its last slice is scheduled; the slices before
only count. Its blocks hold the keys and values of the layer that is computed, and nothing between iterations: so swaps
and copies of them change nothing, and a prompt that resumes after them is computed from its tokens."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import torch

from alignedserve.core.errors import InvalidRequest, NotEnoughMemory
from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.iterations import IterationCompleted, IterationTimes, RunIteration
from alignedserve.messages.wire import Message
from alignedserve.process.heap import keep_freed_memory
from alignedserve.process.links import Identity
from alignedserve.process.loading_progress import LoadingProgress
from alignedserve.process.worker_threads import WorkerThreads, run_quietly
from alignedserve.runtime.device.accelerator import use_device
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.encoder.encoder import Encoder, prompt_attention
from alignedserve.runtime.encoder.prompt_batch import EncoderPrompt, PromptBatch
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import DeviceTurns
from alignedserve.runtime.engine.worker_engine import check_memory
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.candidate_memory import BlockCopier
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO as AUTO_TRANSPORT
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.encoder.encoder_weights import EncoderWeights, load_encoder_weights
from alignedserve.runtime.model.model_files import unchanged_weights
from alignedserve.runtime.model.served_model import ServedModel

logger = logging.getLogger(__name__)

_COMPUTE = "compute"
_PASS_TOKENS = 1024  # of several prompts: more would only take more memory for what lies between layers
_NO_TEXT = 0  # the token that stands for the end of a prompt; nobody reads it


class EncoderExecutor:
    """Performs RunIteration as ModelExecutor does. Each prompt ends with an empty token and its vector. Construction
    takes as long as loading the weights, and raises NotEnoughMemory, ConfigError or ModelError."""

    has_shared_blocks = may_draft = False

    def __init__(
        self,
        served: ServedModel,
        sizes: EngineSizes,
        progress_path: Path | None = None,
        shared_device: SharedDevice | None = None,
    ) -> None:
        """`served`: an encoder. `progress_path`: the file for how far the loading has come.

        `shared_device`: None: it gives way to none."""
        self._turns = DeviceTurns(shared_device)
        config = served.encoder
        assert config is not None, "a decoder where an encoder belongs"
        torch.set_num_threads(sizes.num_threads or num_cores())
        device = torch.device(sizes.device)
        check_memory(served, sizes.kv_cache_bytes, device)
        use_device(device)
        self.layout = served.block_layout(sizes.block_size)
        self.num_blocks = self.layout.blocks_in(sizes.kv_cache_bytes)
        if self.num_blocks < 1:
            needed = self.layout.block_bytes
            raise NotEnoughMemory(f"kv_cache_bytes is {sizes.kv_cache_bytes}, less than one block of {needed}")
        self.eos_token_ids: frozenset[int] = frozenset()
        self._storage = BlockStorage(self.layout, self.num_blocks, device)
        attention = prompt_attention(sizes.attention_backend, config, self._storage, torch_dtype(served.dtype))
        load = partial(_load_weights, served, config, device, progress_path)
        self._encoder = Encoder(config, run_quietly(load) if sizes.loads_quietly else load(), attention)
        if device.type == "cpu":
            keep_freed_memory()
        self._threads = WorkerThreads(partial(use_device, device))
        self._prompts: dict[RequestId, EncoderPrompt] = {}
        self._num_computed: dict[RequestId, int] = {}

    @property
    def lanes(self) -> CopyLanes | None:
        """The lanes of the device's copies; None: the blocks are on the host."""
        return self._storage.lanes

    def copier(self, identity: Identity, *, transport: str = AUTO_TRANSPORT) -> BlockCopier:
        """Return a copier of the blocks, as requests that move between workers need one."""
        return BlockCopier(self._storage, self._threads, identity, transport=transport)

    def measure_iterations(self, duration_s: float, max_tokens: int) -> tuple[Sample, ...]:
        """Return nothing: costs are learnt while it serves."""
        return ()

    def prepare(self, message: Message) -> "Sequence[Future[None]]":
        """Return nothing: a prompt waits for nothing."""
        self._turns.on_message(message)
        return ()

    def check_grammar(self, grammar: str) -> None:
        """Raise InvalidRequest for any grammar: an encoder writes nothing."""
        if grammar:
            raise InvalidRequest("An encoder writes no text that could follow a grammar.", param="response_format")

    def start_iteration(self, command: RunIteration, on_completed: Callable[[IterationCompleted], None]) -> None:
        """Perform one iteration on the compute thread."""
        self._threads.submit(_COMPUTE, lambda: self.run_iteration(command), on_completed)

    def close(self) -> None:
        """Wait for the threads to end; pending work is cancelled without a callback."""
        self._threads.close()
        self._turns.close()

    # --- on the threads

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """Perform one iteration on the calling thread. No second thread may."""
        with self._turns.taken_for(command):
            return self._run(command)

    def _run(self, command: RunIteration) -> IterationCompleted:
        started = time.monotonic()
        self._change_prompts(command)
        complete = [prompt for request_id, count in command.slices for prompt in self._advance(request_id, count)]
        prepared = time.monotonic()
        sampled: list[SampledToken] = []
        failed: list[RequestId] = []
        attention_s = 0.0
        for prompts in passes_of(complete):
            batch = PromptBatch(prompts, self.layout.block_size, self._storage.slot_stride)
            for prompt, vector in zip(prompts, self._encoder.encode(batch), strict=True):
                embedding = vector.numpy().astype("<f4").tobytes() if prompt.wants_embedding else b""
                if bool(vector.isfinite().all()):
                    sampled.append(SampledToken(prompt.request_id, _NO_TEXT, None, embedding))
                else:
                    failed.append(prompt.request_id)
            attention_s += self._encoder.attention_s
        finished = time.monotonic()
        times = IterationTimes(started, finished, prepared - started, finished - prepared, 0.0, attention_s)
        return IterationCompleted(tuple(sampled), failed=tuple(failed), times=times)

    def _change_prompts(self, command: RunIteration) -> None:
        for replacement in command.replacements:
            self._prompts[replacement.request_id].block_ids[replacement.place] = replacement.block_id
        for request_id in command.removals:
            del self._prompts[request_id], self._num_computed[request_id]
        for addition in command.additions:
            request = addition.request
            self._prompts[addition.request.request_id] = EncoderPrompt(
                request_id=request.request_id,
                token_ids=np.array(request.prompt_token_ids, np.int64),
                second_text_at=request.second_text_at,
                block_ids=list(addition.block_ids),
                wants_embedding=request.sampling.wants_embedding,
            )
            self._num_computed[addition.request.request_id] = addition.num_cached
        for request_id, block_ids in command.extensions:
            self._prompts[request_id].block_ids.extend(block_ids)

    def _advance(self, request_id: RequestId, count: int) -> Iterator[EncoderPrompt]:
        self._num_computed[request_id] += count
        prompt = self._prompts[request_id]
        if self._num_computed[request_id] >= prompt.length:
            yield prompt


def passes_of(prompts: Sequence[EncoderPrompt]) -> Iterator[list[EncoderPrompt]]:
    """Divide prompts among passes of about equal memory, in their order; no pass is empty."""
    batch: list[EncoderPrompt] = []
    num_tokens = 0
    for prompt in prompts:
        if batch and num_tokens + prompt.length > _PASS_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(prompt)
        num_tokens += prompt.length
    if batch:
        yield batch


def _load_weights(
    served: ServedModel, config: EncoderConfig, device: torch.device, progress_path: Path | None
) -> EncoderWeights:
    progress = LoadingProgress(progress_path, config.weight_bytes(served.dtype), config.num_layers)
    folder = None if served.has_random_weights else served.folder
    dtype = torch_dtype(served.dtype)
    with unchanged_weights(served.folder, served.weights):
        weights = load_encoder_weights(folder, config, dtype, device, served.quantization, observer=progress)
    progress.finish()
    return weights

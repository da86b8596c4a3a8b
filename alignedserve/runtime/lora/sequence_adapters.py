"""The adapters of the sequences of one engine, from the messages that announce them to their last iteration."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import AdapterError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter, Request
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest, requests_of
from alignedserve.runtime.lora.adapter_cache import AdapterCache
from alignedserve.runtime.lora.adapter_folders import read_adapter
from alignedserve.runtime.lora.adapter_weights import load_adapter
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from kernels.lora import AdapterMatrices


class SequenceAdapters:
    """Loads, lends and takes back adapters."""

    def __init__(
        self,
        lora: LoraConfig,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        shard: TensorShard | LayerStage | None = None,
    ) -> None:
        """`model`: the whole one; `shard`: the rank or stage whose products adapters add to; None: there is one."""
        load = partial(_load, lora=lora, model=model, dtype=dtype, device=device, shard=shard)
        self.cache = AdapterCache(load, max_adapters=lora.max_adapters, max_bytes=lora.memory_bytes)
        self._used: dict[RequestId, tuple[LoraAdapter, bool]] = {}  # and whether it is for a real-time request
        self._failures: dict[RequestId, str] = {}

    def prepare(self, message: Message) -> "Sequence[Future[None]]":
        """Begin to load the adapters of the requests that a message brings; return what they wait for.

        A new request waits for room among the adapters as well; a request from another worker only for its adapter.
        An AbortRequest cancels what a new request waits for.
        """
        if isinstance(message, AbortRequest):
            self.cache.withdraw(message.request_id, message.attempt)
            return ()
        prepare = self.cache.prepare_at_once
        if isinstance(message, PrefillRequest):
            prepare = partial(self.cache.prepare, attempt=message.attempt)
        prepared = [
            prepare(request.adapter, request.request_id, is_real_time=request.is_real_time)
            for request in requests_of(message)
            if request.adapter is not None
        ]
        return [future for future in prepared if future is not None]

    def add(self, request: Request) -> AdapterMatrices | None:
        """Return the adapter of a sequence that is added; None: it has none, or fails."""
        if request.adapter is None:
            return None
        try:
            return self.acquire(request.request_id, request.adapter, is_real_time=request.is_real_time)
        except AdapterError as error:
            self._failures[request.request_id] = f"its adapter cannot be loaded: {error}"
            return None

    def acquire(self, request_id: RequestId, adapter: LoraAdapter, *, is_real_time: bool = True) -> AdapterMatrices:
        """Return the adapter of a sequence that is added. Raises AdapterError.

        Ranks and stages that follow the first are not told the class: what waits, and for what, is decided there.
        """
        matrices = self.cache.acquire(adapter, request_id, is_real_time=is_real_time)
        self._used[request_id] = adapter, is_real_time
        return matrices

    def remove(self, request_id: RequestId) -> None:
        self._failures.pop(request_id, None)
        used = self._used.pop(request_id, None)
        if used is not None:
            adapter, is_real_time = used
            self.cache.release(adapter, is_real_time=is_real_time)

    def rest(self, *, has_ended: bool) -> None:
        """Note that no iteration is to be computed (`has_ended`), or that one is again."""
        self.cache.rest(has_ended=has_ended)

    def close(self) -> None:
        """End the thread that loads."""
        self.cache.close()

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        if not self._failures:
            return {}
        return {request_id: self._failures[request_id] for request_id in request_ids if request_id in self._failures}


def _load(
    adapter: LoraAdapter,
    *,
    lora: LoraConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: TensorShard | LayerStage | None,
) -> AdapterMatrices:
    return load_adapter(read_adapter(adapter, lora), model, dtype, device, max_rank=lora.max_rank, shard=shard)

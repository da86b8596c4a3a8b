"""Sampling and adapters of the Python API, checked before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from alignedserve.config.sections import LoraConfig
from alignedserve.core import request
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.loaded_adapters import find_adapter
from alignedserve.runtime.model.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class SamplingParams(request.SamplingParams):
    """Parameters of sampling, with what the HTTP APIs have beside them and workers need not know.

    Raises InvalidRequest naming the field.
    """

    n: int = 1  # answers to each prompt: the first has `seed`, the rest seeds derived from it
    stop: str | tuple[str, ...] = ()  # the first to come ends the text before it

    @override
    def __post_init__(self) -> None:
        try:
            request.SamplingParams.__post_init__(self)
            are_some, are_stops = self.n >= 1, all(self.stop_strings)
        except TypeError:
            _in_own_types(self)  # which names the field
            raise
        if not are_some:
            raise InvalidRequest("n must be at least 1", param="n")
        if not are_stops:
            raise InvalidRequest("stop must not be empty, nor hold an empty string", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_worker(self) -> request.SamplingParams:
        return request.SamplingParams(**_values(self, request.SamplingParams))


Samplings = request.SamplingParams | Sequence[request.SamplingParams] | None  # for all, or one for each; None: greedily


def samplings_of(sampling: Samplings, count: int) -> list[SamplingParams | None]:
    """Return how each of `count` prompts is sampled, in the fields' own types. Raises InvalidRequest."""
    if sampling is None:
        return [None] * count
    if isinstance(sampling, request.SamplingParams):
        return [_in_own_types(sampling)] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(params, request.SamplingParams) for params in sampling):
        raise InvalidRequest("sampling must be SamplingParams, or a list of them", param="sampling")
    if len(sampling) != count:
        raise InvalidRequest("sampling must be one, or one for each prompt", param="sampling")
    return list(map(_in_own_types, sampling))


def _in_own_types(sampling: request.SamplingParams) -> SamplingParams:
    try:
        return msgspec.convert(_values(sampling, type(sampling)), SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling: {error}", param="sampling") from None


def _values(sampling: request.SamplingParams, of: type[request.SamplingParams]) -> dict[str, Any]:
    return {field.name: getattr(sampling, field.name) for field in fields(of)}


ANY_FOLDER = LoraConfig(allowed_folder="/")  # the caller's own program names them


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to generate with: a PEFT folder, under a name of your choice."""

    name: str
    path: str | Path


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or one for each


def adapters_of(lora_request: LoRARequests, count: int, served: ServedModel) -> list[LoraAdapter | None]:
    """Return the adapter of each of `count` prompts. Raises AdapterError, InvalidRequest."""
    each = (
        [lora_request] * count if lora_request is None or isinstance(lora_request, LoRARequest) else list(lora_request)
    )
    if len(each) != count:
        raise InvalidRequest("lora_request must be one, or one for each prompt", param="lora_request")
    if any(each) and served.encoder is not None:
        raise InvalidRequest("encoders have no adapters", param="lora_request")
    if any(each) and not served.lora.is_enabled:
        raise InvalidRequest("LLM(..., enable_lora=True) is needed for adapters", param="lora_request")
    adapters = {
        adapter: find_adapter(adapter.name, str(adapter.path), served.lora, served.decoder)
        for adapter in each
        if adapter is not None
    }
    return [None if adapter is None else adapters[adapter] for adapter in each]

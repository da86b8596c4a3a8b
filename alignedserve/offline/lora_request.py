"""Adapters of the Python API."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.adapter_folders import find_adapter
from alignedserve.runtime.model.served_model import ServedModel

ANY_FOLDER = LoraConfig(allowed_folder="/")  # the caller's own program names them


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to generate with: a PEFT folder, under a name of your choice."""

    name: str
    path: str | Path


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or one for each


def adapters_of(asked: LoRARequests, count: int, served: ServedModel) -> list[LoraAdapter | None]:
    """Return the adapter of each of `count` prompts. Raises AdapterError, InvalidRequest."""
    each = [asked] * count if asked is None or isinstance(asked, LoRARequest) else list(asked)
    if len(each) != count:
        raise InvalidRequest("lora_request must be one, or one for each prompt", param="lora_request")
    if any(each) and served.encoder is not None:
        raise InvalidRequest("encoders have no adapters", param="lora_request")
    if any(each) and not served.lora.is_enabled:
        raise InvalidRequest("LLM(..., enable_lora=True) is needed for adapters", param="lora_request")
    found = {one: find_adapter(one.name, str(one.path), served.lora, served.decoder) for one in each if one is not None}
    return [None if one is None else found[one] for one in each]

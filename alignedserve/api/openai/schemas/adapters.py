"""Bodies of the calls that load and unload LoRA adapters, as vLLM has them."""

from typing import Annotated

from pydantic import Field

from alignedserve.api.schema import Schema
from alignedserve.core.request import MAX_ADAPTER_NAME_LEN, MAX_ADAPTER_PATH_LEN

_Name = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME_LEN)]


class LoadAdapterRequest(Schema):
    """Body of /v1/load_lora_adapter."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_PATH_LEN)]
    load_inplace: bool = False  # an adapter of this name is replaced
    base_model_name: str | None = None  # the model that it is for; None: the first one


class UnloadAdapterRequest(Schema):
    """Body of /v1/unload_lora_adapter."""

    lora_name: _Name
    base_model_name: str | None = None

"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes: their bodies and routes."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from alignedserve.api.errors import Forbidden
from alignedserve.api.models.adapter_directory import AdapterDirectory
from alignedserve.api.openai.parsing import parse
from alignedserve.api.schema import Schema
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import MAX_ADAPTER_NAME_LEN, MAX_ADAPTER_PATH_LEN
from alignedserve.gateway.routes.dependencies import ignored_fields_of, key_of, model_of, rate_limited_services
from alignedserve.gateway.routes.request_bodies import read_body

_Name = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME_LEN)]

router = APIRouter()


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


@router.post("/v1/load_lora_adapter", response_model=None)
async def load_adapter(http: Request) -> Response:
    """Let requests name an adapter whose folder is inside lora.allowed_folder."""
    services = await rate_limited_services(http)
    body = await read_body(http, services, partial(parse, LoadAdapterRequest, ignored=ignored_fields_of(http)))
    _check_name(http, body.lora_name)
    adapters = _adapters_of(http, body.base_model_name)
    if body.lora_name in services.models and not adapters.find(body.lora_name):
        raise InvalidRequest("A model of this name is served.", param="lora_name")
    load = partial(adapters.load, body.lora_name, body.lora_path, replaces=body.load_inplace, key=key_of(http))
    await asyncio.to_thread(load)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None)
async def unload_adapter(http: Request) -> Response:
    """Let no new request name an adapter that was loaded while serving."""
    services = await rate_limited_services(http)
    body = await read_body(http, services, partial(parse, UnloadAdapterRequest, ignored=ignored_fields_of(http)))
    _check_name(http, body.lora_name)
    await asyncio.to_thread(_adapters_of(http, body.base_model_name).unload, body.lora_name, key_of(http))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_name(http: Request, name: str) -> None:
    """Raise Forbidden for a name that the key could not use, and other clients perhaps can."""
    key = key_of(http)
    if not key.may_use(name):
        message = f"The key {key.name} may not use a model of this name."
        raise Forbidden(message, param="lora_name", code="model_not_allowed")


def _adapters_of(http: Request, model: str | None) -> AdapterDirectory:
    adapters = model_of(http, model).adapters
    if adapters is None:
        raise InvalidRequest("This model has no adapters here.", param="base_model_name", code="unsupported_parameter")
    return adapters

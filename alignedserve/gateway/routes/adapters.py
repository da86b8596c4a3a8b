"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes."""

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from alignedserve.api.models.adapter_directory import AdapterDirectory
from alignedserve.api.openai.parsing import parse
from alignedserve.api.openai.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services
from alignedserve.gateway.routes.request_bodies import read_body

router = APIRouter()


@router.post("/v1/load_lora_adapter", response_model=None)
async def load_adapter(http: Request) -> Response:
    """Let requests name an adapter whose folder is inside lora.allowed_folder."""
    services = await rate_limited_services(http)
    asked = await read_body(http, services, partial(parse, LoadAdapterRequest, ignored=ignored_fields_of(http)))
    adapters = _adapters_of(http, asked.base_model_name)
    if asked.lora_name in services.models and not adapters.find(asked.lora_name):
        raise InvalidRequest("A model of this name is served.", param="lora_name")
    load = partial(adapters.load, asked.lora_name, asked.lora_path, replaces=asked.load_inplace)
    await asyncio.to_thread(load)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None)
async def unload_adapter(http: Request) -> Response:
    """Let no new request name an adapter that was loaded while serving."""
    services = await rate_limited_services(http)
    asked = await read_body(http, services, partial(parse, UnloadAdapterRequest, ignored=ignored_fields_of(http)))
    await asyncio.to_thread(_adapters_of(http, asked.base_model_name).unload, asked.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _adapters_of(http: Request, model: str | None) -> AdapterDirectory:
    adapters = model_of(http, model).adapters
    if adapters is None:
        raise InvalidRequest("This model has no adapters here.", param="base_model_name", code="unsupported_parameter")
    return adapters

"""Models in the shapes of OpenAI, or of Anthropic for its clients; adapters that are loaded and unloaded, in vLLM's."""

import asyncio
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from alignedserve.api.errors import Forbidden
from alignedserve.api.models.model_registry import check_usable, usable_cards
from alignedserve.api.models.model_services import AdapterDirectory, ModelCard
from alignedserve.api.openai.parsing import parse
from alignedserve.api.schema import Schema
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import MAX_ADAPTER_NAME_LEN, MAX_ADAPTER_PATH_LEN
from alignedserve.gateway.call import Call, RouteTable
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.message_batches import timestamp
from alignedserve.gateway.routes.request_bodies import read_body
from alignedserve.pocket.phrases import EXAMPLE_QUESTIONS
from alignedserve.runtime.model.named_models import pocket_folder

ROUTES = RouteTable()

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


@ROUTES.add("POST", "/v1/load_lora_adapter")
async def load_adapter(call: Call) -> Response:
    body = await read_body(call, partial(parse, LoadAdapterRequest, ignored=call.ignored))
    adapters = _adapters_of(call, body)
    if body.lora_name in call.services.models and not adapters.find(body.lora_name):
        raise InvalidRequest("A model of this name is served.", param="lora_name")
    load = partial(adapters.load, body.lora_name, body.lora_path, replaces=body.load_inplace, key=call.key)
    await asyncio.to_thread(load)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@ROUTES.add("POST", "/v1/unload_lora_adapter")
async def unload_adapter(call: Call) -> Response:
    """Let no new request name an adapter that was loaded while serving."""
    body = await read_body(call, partial(parse, UnloadAdapterRequest, ignored=call.ignored))
    await asyncio.to_thread(_adapters_of(call, body).unload, body.lora_name, call.key)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapters_of(call: Call, body: LoadAdapterRequest | UnloadAdapterRequest) -> AdapterDirectory:
    """Return the adapters of the body's model. Raises Forbidden for a name that other keys perhaps can use."""
    if not call.key.may_use(body.lora_name):
        message = f"The key {call.key.name} may not use a model of this name."
        raise Forbidden(message, param="lora_name", code="model_not_allowed")
    adapters = call.model(body.base_model_name).adapters
    if adapters is None:
        raise InvalidRequest("This model has no adapters here.", param="base_model_name", code="unsupported_parameter")
    return adapters


@ROUTES.add("GET", "/v1/models", is_counted=False)
async def list_models(call: Call) -> Response:
    models = list(usable_cards(call.services.models, call.key))
    if call.is_anthropic:
        return JsonResponse(model_list(models))
    return JsonResponse({"object": "list", "data": list(map(_model_view, models))})


@ROUTES.add("GET", "/v1/models/{name:path}", is_counted=False)
async def get_model(call: Call, name: str) -> Response:
    models = call.services.models
    check_usable(models, name, call.key)
    model = models.card(name)
    return JsonResponse(model_info(model) if call.is_anthropic else _model_view(model))


def _model_view(model: ModelCard) -> dict[str, Any]:
    sampling = model.sampling
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_context_len,
        "supported_tasks": model.supported_tasks,
        **({"input_modalities": ("text", "image")} if model.picture_form is not None else {}),
        # Defaults of a request and their source; null: OpenAI's defaults hold.
        **({} if model.encoder else {"default_sampling": {**sampling.values, "source": sampling.source or None}}),
        **({"example_questions": EXAMPLE_QUESTIONS} if model.folder == pocket_folder() else {}),
        **({"alias_of": model.alias_of} if model.alias_of is not None else {}),
        **({"parent": model.parent} if model.parent is not None else {}),
    }


def model_info(model: ModelCard) -> dict[str, Any]:
    """Return the model's object. It is one pool of tokens for prompt and answer: either may fill it."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": timestamp(model.created),
        "lifecycle": "active",
        "max_input_tokens": model.max_context_len,
        "max_tokens": model.max_context_len,
    }


def model_list(models: list[ModelCard]) -> dict[str, Any]:
    shown = [model_info(model) for model in models]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "has_more": False, "first_id": first_id, "last_id": last_id}

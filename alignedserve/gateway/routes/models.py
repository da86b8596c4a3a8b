"""GET /v1/models and /v1/models/{id}, in the shapes of OpenAI, or of Anthropic for its clients."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.models.model_registry import check_usable, usable_cards
from alignedserve.gateway.json_response import JsonResponse, is_anthropic
from alignedserve.gateway.message_batches import timestamp
from alignedserve.gateway.routes.dependencies import key_of, services_of

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(http: Request) -> Response:
    """List the served models."""
    models = list(usable_cards(services_of(http).models, key_of(http)))
    if is_anthropic(http.scope):
        return JsonResponse(model_list(models))
    return JsonResponse({"object": "list", "data": [_model_view(model) for model in models]})


@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(http: Request, name: str) -> Response:
    """Return a model by its name, which may hold slashes."""
    models = services_of(http).models
    check_usable(models, name, key_of(http))
    model = models.card(name)
    if is_anthropic(http.scope):
        return JsonResponse(model_info(model))
    return JsonResponse(_model_view(model))


def _model_view(model: ModelCard) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_context_len,
        "supported_tasks": model.supported_tasks,
        **({"input_modalities": ("text", "image")} if model.picture_form is not None else {}),
        **({"default_sampling": _sampling_view(model)} if model.encoder is None else {}),
        **({"alias_of": model.alias_of} if model.alias_of is not None else {}),
        **({"parent": model.parent} if model.parent is not None else {}),
    }


def _sampling_view(model: ModelCard) -> dict[str, Any]:
    """Return what is taken where a request names nothing, and who says so; null: OpenAI's defaults hold."""
    return {**model.sampling.values, "source": model.sampling.source or None}


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
    """Return the page of all models."""
    shown = [model_info(model) for model in models]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "has_more": False, "first_id": first_id, "last_id": last_id}

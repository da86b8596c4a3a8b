"""GET /v1/models and /v1/models/{id}, in the shapes of OpenAI, or of Anthropic for its clients."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.anthropic.model_info import model_info, model_list
from alignedserve.api.models.model_card import ModelCard
from alignedserve.gateway.json_response import JsonResponse, is_anthropic
from alignedserve.gateway.routes.dependencies import services_of

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(http: Request) -> Response:
    """List the served models."""
    models = list(services_of(http).models.cards)
    if is_anthropic(http.scope):
        return JsonResponse(model_list(models))
    return JsonResponse({"object": "list", "data": [_model_view(model) for model in models]})


@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(http: Request, name: str) -> Response:
    """Return a model by its name, which may hold slashes."""
    model = services_of(http).models.card(name)
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
        **({"parent": model.parent} if model.parent is not None else {}),
    }

"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.gateway.errors import JSON_TYPE
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.routes.dependencies import services_of

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(http: Request) -> Response:
    """List the one served model."""
    model = services_of(http).model
    return Response(orjson.dumps({"object": "list", "data": [_model_view(model)]}), media_type=JSON_TYPE)


@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(http: Request, name: str) -> Response:
    """Return the model by its name, which may hold slashes."""
    services = services_of(http)
    services.check_model(name)
    return Response(orjson.dumps(_model_view(services.model)), media_type=JSON_TYPE)


def _model_view(model: ModelCard) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_context_len,
    }

"""Routes of /v1/conversations: create, get, change, delete; the same of their items."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.openai.parsing import parse
from alignedserve.api.responses.bodies import (
    CreateConversationRequest,
    CreateItemsRequest,
    UpdateConversationRequest,
)
from alignedserve.gateway.files.views import list_view
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.responses.conversations import conversation_items, conversation_view, find_item
from alignedserve.gateway.responses.responses_api import ResponsesApi
from alignedserve.gateway.routes.dependencies import ignored_fields_of, key_of, rate_limited_services
from alignedserve.gateway.routes.request_bodies import read_body
from alignedserve.gateway.routes.request_parameters import item_page, page_of
from alignedserve.gateway.services import Services

router = APIRouter()

_PATH = "/v1/conversations/{conversation_id}"


@router.post("/v1/conversations", response_model=None)
async def create_conversation(http: Request) -> Response:
    """Create a conversation."""
    services, api = await _begin(http)
    ignored = ignored_fields_of(http)
    body = await read_body(http, services, partial(parse, CreateConversationRequest, ignored=ignored))
    record = await api.stored_conversations().create(body.items, body.metadata, ignored)
    return JsonResponse(conversation_view(record))


@router.get(_PATH, response_model=None)
async def get_conversation(http: Request, conversation_id: str) -> Response:
    """Return a conversation."""
    _, api = await _begin(http)
    return JsonResponse(conversation_view(await api.conversation(conversation_id)))


@router.post(_PATH, response_model=None)
async def update_conversation(http: Request, conversation_id: str) -> Response:
    """Replace a conversation's metadata."""
    services, api = await _begin(http)
    body = await read_body(http, services, partial(parse, UpdateConversationRequest, ignored=ignored_fields_of(http)))
    record = await api.stored_conversations().set_metadata(conversation_id, body.metadata)
    return JsonResponse(conversation_view(record))


@router.delete(_PATH, response_model=None)
async def delete_conversation(http: Request, conversation_id: str) -> Response:
    """Delete a conversation."""
    _, api = await _begin(http)
    await api.stored_conversations().delete(conversation_id)
    return JsonResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get(_PATH + "/items", response_model=None)
async def list_items(http: Request, conversation_id: str) -> Response:
    """List the items of a conversation, a page at a time."""
    _, api = await _begin(http)
    record = await api.conversation(conversation_id)
    items, has_more = page_of(conversation_items(record), item_page(http), dict(record.deleted))
    return JsonResponse({"first_id": "", "last_id": ""} | list_view(items, has_more=has_more))


@router.post(_PATH + "/items", response_model=None)
async def create_items(http: Request, conversation_id: str) -> Response:
    """Add items at the end of a conversation."""
    services, api = await _begin(http)
    ignored = ignored_fields_of(http)
    body = await read_body(http, services, partial(parse, CreateItemsRequest, ignored=ignored))
    items = await api.stored_conversations().add_items(conversation_id, body.items, ignored)
    return JsonResponse({"first_id": "", "last_id": ""} | list_view(items, has_more=False))


@router.get(_PATH + "/items/{item_id}", response_model=None)
async def get_item(http: Request, conversation_id: str, item_id: str) -> Response:
    """Return an item of a conversation."""
    _, api = await _begin(http)
    return JsonResponse(find_item(await api.conversation(conversation_id), item_id))


@router.delete(_PATH + "/items/{item_id}", response_model=None)
async def delete_item(http: Request, conversation_id: str, item_id: str) -> Response:
    """Delete an item of a conversation; returns the conversation."""
    _, api = await _begin(http)
    return JsonResponse(conversation_view(await api.stored_conversations().remove_item(conversation_id, item_id)))


async def _begin(http: Request) -> tuple[Services, ResponsesApi]:
    services = await rate_limited_services(http)
    return services, ResponsesApi.of(services, key_of(http).owner)

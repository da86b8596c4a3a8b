"""Routes of /v1/responses and /v1/conversations, and of their items."""

from dataclasses import replace
from functools import partial

import orjson
from starlette.responses import Response

from alignedserve.api.endpoints import INPUT_TOKENS, RESPONSES
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.parsing import parse
from alignedserve.api.openai.request_builder import GenerationRequest
from alignedserve.api.responses.bodies import (
    CreateConversationRequest,
    CreateItemsRequest,
    CreateResponseRequest,
    InputTokensRequest,
    UpdateConversationRequest,
    parse_response,
)
from alignedserve.api.responses.formatter import ResponsesFormatter, new_response
from alignedserve.api.responses.request_builder import build_response_request, input_tokens_answer
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import RequestClass, Slo
from alignedserve.gateway.call import Call, RouteTable
from alignedserve.gateway.files.schemas import list_view
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.responses.conversations import conversation_items, conversation_view, find_item
from alignedserve.gateway.responses.responses_api import ResponsesApi, ResponseTurn
from alignedserve.gateway.responses.stored_events import (
    ResponseBody,
    ResponseEvents,
    StoredEvents,
    StoredEventsResponse,
)
from alignedserve.gateway.routes.request_bodies import parsed, read_and_answer, read_body, read_if_long, receive
from alignedserve.gateway.routes.request_parameters import item_page, number, one_of, page_of
from alignedserve.gateway.streaming import answered_awake, awake_model

ROUTES = RouteTable()

_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_NO_IDS = {"first_id": "", "last_id": ""}  # of an empty list


@ROUTES.add("POST", "/v1/responses")
async def create_response(call: Call) -> Response:
    if call.answer_elsewhere is not None:
        return await call.answer_elsewhere(RESPONSES.path)
    raw = await receive(call)
    await read_if_long(raw, RESPONSES.path, call.services, call.ignored, call.key)  # refused there, it is not read here
    body = await parsed(raw, call.services, partial(parse_response, ignored=call.ignored))
    return await answered_awake(call, body, partial(_answer, call, body), is_streamed=body.stream)


async def _answer(call: Call, body: CreateResponseRequest) -> Response:
    model, api = call.model(body.model), _api(call)
    turn = await api.begin(body, call.ignored)
    request = await build_response_request(body, turn.all_items, turn.response_id, call.arrival, model)
    if body.background:
        if body.stream:
            call.hold_connection(RequestClass.BEST_EFFORT)
        queued = await _submit(api, body, turn, request)
        if body.stream:
            return StoredEventsResponse(StoredEvents(api, api.event_log, turn.response_id, is_new=True))
        return JsonResponse(queued)
    call.hold_connection(request.requests[0].request_class)
    generation = Generation(request, model)
    await call.hold_limits(generation)
    make_formatter = partial(ResponsesFormatter, body=body, is_stored=turn.is_stored)
    kind = ResponseEvents if body.stream else ResponseBody
    return kind(generation, make_formatter, partial(api.keep, turn))


async def _submit(
    api: ResponsesApi, body: CreateResponseRequest, turn: ResponseTurn, request: GenerationRequest
) -> bytes:
    if request.slo != Slo():
        raise InvalidRequest("Objectives of latency are not supported with background.", param="background")
    request = replace(request, response_id=turn.response_id, service_tier="flex")
    return orjson.dumps(await api.submit(body, turn, new_response(body, request, is_stored=True)))


@ROUTES.add("POST", "/v1/responses/input_tokens")
async def count_tokens(call: Call) -> Response:
    if call.answer_elsewhere is not None:
        return await call.answer_elsewhere(INPUT_TOKENS.path)

    async def answer(body: InputTokensRequest) -> bytes:
        model = await awake_model(call, body)
        turn = await _api(call).begin(body, call.ignored)
        return await input_tokens_answer(body, turn.all_items, model)

    return JsonResponse(await read_and_answer(call, INPUT_TOKENS, answer))


@ROUTES.add("GET", _RESPONSE)
async def get_response(call: Call, response_id: str) -> Response:
    api = _api(call)
    record = await api.retrieve(response_id)
    if one_of(call, "stream", ("false", "true")) == "false":
        return JsonResponse(bytes(record.response))
    if not await api.event_log.read(record.response_id, 0):
        message = "Only responses in the background that were created with stream have events, for a time."
        raise InvalidRequest(message, param="stream", code="events_not_stored")
    starting_after = number(call, "starting_after", default=-1)
    call.hold_connection(RequestClass.BEST_EFFORT)
    return StoredEventsResponse(StoredEvents(api, api.event_log, record.response_id, starting_after))


@ROUTES.add("DELETE", _RESPONSE)
async def delete_response(call: Call, response_id: str) -> Response:
    record = await _api(call).delete(response_id)
    return JsonResponse({"id": record.response_id, "object": "response", "deleted": True})


@ROUTES.add("POST", _RESPONSE + "/cancel")
async def cancel_response(call: Call, response_id: str) -> Response:
    return JsonResponse(bytes((await _api(call).cancel(response_id)).response))


@ROUTES.add("GET", _RESPONSE + "/input_items")
async def list_input_items(call: Call, response_id: str) -> Response:
    items, has_more = page_of(await _api(call).input_items(response_id), item_page(call))
    return JsonResponse(_NO_IDS | list_view(items, has_more=has_more))


@ROUTES.add("POST", "/v1/conversations")
async def create_conversation(call: Call) -> Response:
    body = await read_body(call, partial(parse, CreateConversationRequest, ignored=call.ignored))
    record = await _api(call).stored_conversations().create(body.items, body.metadata, call.ignored)
    return JsonResponse(conversation_view(record))


@ROUTES.add("GET", _CONVERSATION)
async def get_conversation(call: Call, conversation_id: str) -> Response:
    return JsonResponse(conversation_view(await _api(call).conversation(conversation_id)))


@ROUTES.add("POST", _CONVERSATION)
async def update_conversation(call: Call, conversation_id: str) -> Response:
    body = await read_body(call, partial(parse, UpdateConversationRequest, ignored=call.ignored))
    record = await _api(call).stored_conversations().set_metadata(conversation_id, body.metadata)
    return JsonResponse(conversation_view(record))


@ROUTES.add("DELETE", _CONVERSATION)
async def delete_conversation(call: Call, conversation_id: str) -> Response:
    await _api(call).stored_conversations().delete(conversation_id)
    return JsonResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@ROUTES.add("GET", _CONVERSATION + "/items")
async def list_items(call: Call, conversation_id: str) -> Response:
    record = await _api(call).conversation(conversation_id)
    items, has_more = page_of(conversation_items(record), item_page(call), dict(record.deleted))
    return JsonResponse(_NO_IDS | list_view(items, has_more=has_more))


@ROUTES.add("POST", _CONVERSATION + "/items")
async def create_items(call: Call, conversation_id: str) -> Response:
    body = await read_body(call, partial(parse, CreateItemsRequest, ignored=call.ignored))
    items = await _api(call).stored_conversations().add_items(conversation_id, body.items, call.ignored)
    return JsonResponse(_NO_IDS | list_view(items, has_more=False))


@ROUTES.add("GET", _CONVERSATION + "/items/{item_id}")
async def get_item(call: Call, conversation_id: str, item_id: str) -> Response:
    return JsonResponse(find_item(await _api(call).conversation(conversation_id), item_id))


@ROUTES.add("DELETE", _CONVERSATION + "/items/{item_id}")
async def delete_item(call: Call, conversation_id: str, item_id: str) -> Response:
    return JsonResponse(
        conversation_view(await _api(call).stored_conversations().remove_item(conversation_id, item_id))
    )


def _api(call: Call) -> ResponsesApi:
    return ResponsesApi.of(call.services, call.key.owner)

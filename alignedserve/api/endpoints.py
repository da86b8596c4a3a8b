"""The table of endpoints: how each body is parsed, made into prompts and requests, and answered.

The gateway's routes, the lines of batches, the process that reads long bodies and `LLM` all walk it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import orjson

from alignedserve.api.anthropic import message_request
from alignedserve.api.anthropic.message_format import MessageFormatter
from alignedserve.api.anthropic.message_request import BodyParser, CountTokensRequest, MessagesRequest
from alignedserve.api.conversation import Conversation, check_conversation
from alignedserve.api.embeddings.request_builder import (
    EmbeddingRequest,
    PairSides,
    RerankRequest,
    ScoreRequest,
    build_embedding_request,
    build_score_request,
    embedding_prompts,
    pair_prompts,
)
from alignedserve.api.embeddings.response_format import (
    EmbeddingFormatter,
    RerankFormatter,
    ScoreFormatter,
    ScoreReader,
    computed_scores,
    cosines,
)
from alignedserve.api.errors import NeedsGateway
from alignedserve.api.models.model_services import ModelServices, PromptServices
from alignedserve.api.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    ConversationFields,
    DetokenizeRequest,
    TokenizeRequest,
)
from alignedserve.api.openai.parsing import parse, parse_chat, parse_completion, plain_messages, without_fields_of_chat
from alignedserve.api.openai.prompt_encoding import (
    Prompts,
    completion_prompts,
    decode_text,
    encode_chat,
    encode_text,
    note_variables,
)
from alignedserve.api.openai.request_builder import (
    Arrival,
    GenerationRequest,
    build_chat_request,
    build_completion_request,
)
from alignedserve.api.openai.response_format import ChatFormatter, CompletionFormatter, MakeBodyFormatter
from alignedserve.api.openai.translation import chat_spec, completion_spec, conversation_of_chat
from alignedserve.api.reasoning import open_marks
from alignedserve.api.responses.bodies import CreateResponseRequest, ResponseFields, parse_input_tokens, parse_response
from alignedserve.api.responses.formatter import ResponsesFormatter
from alignedserve.api.responses.items import Item, parse_items
from alignedserve.api.responses.request_builder import (
    build_response_request,
    input_tokens_answer,
    new_response_id,
    resolve_references,
    response_prompts,
)
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import InvalidRequest

Body = dict[str, Any]
AskedT = TypeVar("AskedT")

_SHORT = "-"  # for a prompt that is encoded


@dataclass(frozen=True, slots=True)
class GeneratingEndpoint(Generic[AskedT]):
    """An endpoint whose requests the cluster computes. All but `formatter` and `short` raise InvalidRequest.

    `ignored` collects the fields that are ignored; None: they are refused."""

    path: str
    parse: Callable[[Body, IgnoredFields | None], AskedT]
    prompts: Callable[[AskedT, PromptServices, IgnoredFields | None], Awaitable[Prompts]]  # or raises NeedsGateway
    build: Callable[[AskedT, Arrival, ModelServices, Prompts | None], Awaitable[GenerationRequest]]
    formatter: Callable[[AskedT, ModelServices], MakeBodyFormatter]
    short: Callable[[AskedT], Body] | None  # fields in place of prompts that are encoded; None: all of them are needed


@dataclass(frozen=True, slots=True)
class TokenEndpoint(Generic[AskedT]):
    """An endpoint that is answered from the tokens of a prompt alone."""

    path: str
    parse: Callable[[Body, IgnoredFields | None], AskedT]
    answer: Callable[[AskedT, PromptServices, IgnoredFields | None], Awaitable[bytes]]  # or raises NeedsGateway


# --- chat completions and completions


def _short_chat(chat: ChatCompletionRequest) -> Body:
    if not chat.continue_final_message:
        return {"messages": [{"role": "user", "content": _SHORT}]}
    # Whether it ends within a thought decides how the answer is read.
    return {"messages": [{"role": "assistant", "content": _SHORT + open_marks(chat.messages[-1].text)}]}


async def _build_chat(
    chat: ChatCompletionRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None
) -> GenerationRequest:
    conversation = await _conversation(chat, services)
    note_variables(conversation, services, arrival.ignored)
    return await build_chat_request(conversation, chat_spec(chat), arrival, services, prompts)


async def _chat_prompts(chat: ChatCompletionRequest, services: PromptServices, _: IgnoredFields | None) -> Prompts:
    is_bounded = chat.truncate_prompt_tokens is None
    return (await encode_chat(await _conversation(chat, services), services, is_bounded=is_bounded),)


async def _conversation(body: ConversationFields, services: PromptServices) -> Conversation:
    length = rough_length((body.messages, body.tools))
    return await services.lanes.run(length, partial(conversation_of_chat, body))


async def _build_completion(
    completion: CompletionRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None
) -> GenerationRequest:
    prompts = prompts or await completion_prompts(completion, services)
    return await build_completion_request(completion_spec(completion), prompts, arrival, services)


CHAT = GeneratingEndpoint(
    path="/v1/chat/completions",
    parse=parse_chat,
    prompts=_chat_prompts,
    build=_build_chat,
    formatter=lambda _, __: ChatFormatter,
    short=_short_chat,
)
COMPLETION = GeneratingEndpoint(
    path="/v1/completions",
    parse=parse_completion,
    prompts=lambda completion, services, _: completion_prompts(completion, services),
    build=_build_completion,
    formatter=lambda _, __: CompletionFormatter,
    short=lambda _: {"prompt": _SHORT},
)

# --- embeddings, scores and rankings


def _embedding_formatter(body: EmbeddingRequest, _: ModelServices) -> MakeBodyFormatter:
    return partial(EmbeddingFormatter, encoding_format=body.encoding_format, dimensions=body.dimensions)


def _parse_score(body: Body, ignored: IgnoredFields | None) -> ScoreRequest:
    parsed = parse(ScoreRequest, body, ignored)
    PairSides.of(parsed)
    return parsed


def _ranking_formatter(body: RerankRequest, model: ModelServices) -> MakeBodyFormatter:
    return partial(RerankFormatter, read_scores=_score_reader(model, len(body.documents)), body=body)


def _short_ranking(body: RerankRequest) -> Body:
    return {"query": _SHORT} | ({} if body.return_documents else {"documents": [_SHORT] * len(body.documents)})


def _score_reader(services: ModelServices, num_second: int) -> ScoreReader:
    encoder = services.model.encoder
    if encoder is not None and encoder.score is not None:
        return computed_scores
    return partial(cosines, num_second=num_second)


EMBEDDINGS = GeneratingEndpoint(
    path="/v1/embeddings",
    parse=partial(parse, EmbeddingRequest),
    prompts=lambda body, services, _: embedding_prompts(body, services),
    build=build_embedding_request,
    formatter=_embedding_formatter,
    short=lambda _: {"input": _SHORT},
)
SCORE = GeneratingEndpoint(
    path="/v1/score",
    parse=_parse_score,
    prompts=lambda body, services, _: pair_prompts(body, services),
    build=build_score_request,
    formatter=lambda body, model: partial(ScoreFormatter, read_scores=_score_reader(model, len(body.text_2))),
    short=lambda body: {"text_1": [_SHORT] * len(body.text_1), "text_2": [_SHORT] * len(body.text_2)},
)
RERANK = GeneratingEndpoint(
    path="/v1/rerank",
    parse=partial(parse, RerankRequest),
    prompts=lambda body, services, _: pair_prompts(body, services),
    build=build_score_request,
    formatter=_ranking_formatter,
    short=_short_ranking,
)

# --- Anthropic's messages


async def _message_prompts(body: MessagesRequest, services: PromptServices, ignored: IgnoredFields | None) -> Prompts:
    if any(tool.get("defer_loading") for tool in body.tools):
        raise NeedsGateway  # the messages tell which of the tools may be called
    return await message_request.message_prompts(body, services, ignored)


MESSAGES = GeneratingEndpoint(
    path="/v1/messages",
    parse=lambda body, ignored: BodyParser(ignored).fields(
        MessagesRequest, without_fields_of_chat(body, MessagesRequest)
    ),
    prompts=_message_prompts,
    build=message_request.build_message_request,
    formatter=lambda body, _: partial(MessageFormatter, body=body),
    short=lambda _: {"messages": [{"role": "user", "content": _SHORT}], "system": None},
)
COUNT_TOKENS = TokenEndpoint(
    path="/v1/messages/count_tokens",
    parse=lambda body, ignored: BodyParser(ignored).fields(CountTokensRequest, body),
    answer=message_request.count_answer,
)

# --- responses without stored state, which only the gateway adds


def _own_items(body: ResponseFields, ignored: IgnoredFields | None) -> list[Item]:
    items = parse_items(body.input, new_response_id(), ignored)
    is_whole = body.previous_response_id is None and body.conversation_id is None
    if not is_whole or any(item["type"] == "item_reference" for item in items):
        raise NeedsGateway  # others of its items are stored
    return items


async def _response_prompts(
    body: CreateResponseRequest, services: PromptServices, ignored: IgnoredFields | None
) -> Prompts:
    items = _own_items(body, ignored)
    if body.truncation == "auto":
        raise NeedsGateway
    return await response_prompts(body, items, services)


async def _build_response(
    body: CreateResponseRequest, arrival: Arrival, services: ModelServices, _: Prompts | None
) -> GenerationRequest:
    response_id = arrival.response_id or new_response_id()
    items = await resolve_references(None, parse_items(body.input, response_id, arrival.ignored), response_id)
    return await build_response_request(body, items, response_id, arrival, services)


RESPONSES = GeneratingEndpoint(
    path="/v1/responses",
    parse=parse_response,
    prompts=_response_prompts,
    build=_build_response,
    formatter=lambda body, _: partial(ResponsesFormatter, body=body),
    short=None,
)
INPUT_TOKENS = TokenEndpoint(
    path="/v1/responses/input_tokens",
    parse=parse_input_tokens,
    answer=lambda body, services, ignored: input_tokens_answer(body, _own_items(body, ignored), services),
)

# --- tokens


def _parse_tokenize(body: dict[str, Any], ignored: IgnoredFields | None = None) -> TokenizeRequest:
    parsed = parse(TokenizeRequest, plain_messages(body), ignored)
    if parsed.prompt is None:
        check_conversation(conversation_of_chat(parsed))
    return parsed


async def _tokens_answer(body: TokenizeRequest, services: PromptServices) -> bytes:
    if (body.prompt is None) == (not body.messages):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.prompt is None:
        token_ids = (await encode_chat(await _conversation(body, services), services)).token_ids
    else:
        token_ids = await encode_text(body.prompt, services, add_special_tokens=body.add_special_tokens)
    answer = {"count": len(token_ids), "max_model_len": services.model.max_context_len, "tokens": token_ids}
    return orjson.dumps(answer)


async def _text_answer(body: DetokenizeRequest, services: PromptServices) -> bytes:
    return orjson.dumps({"prompt": await decode_text(body.tokens, services)})


TOKENIZE = TokenEndpoint(
    path="/tokenize", parse=_parse_tokenize, answer=lambda body, services, _: _tokens_answer(body, services)
)
DETOKENIZE = TokenEndpoint(
    path="/detokenize",
    parse=partial(parse, DetokenizeRequest),
    answer=lambda body, services, _: _text_answer(body, services),
)

ENDPOINTS: dict[str, GeneratingEndpoint[Any]] = {
    endpoint.path: endpoint for endpoint in (CHAT, COMPLETION, EMBEDDINGS, SCORE, RERANK, MESSAGES, RESPONSES)
}
TOKEN_ENDPOINTS: dict[str, TokenEndpoint[Any]] = {
    endpoint.path: endpoint for endpoint in (COUNT_TOKENS, INPUT_TOKENS, TOKENIZE, DETOKENIZE)
}

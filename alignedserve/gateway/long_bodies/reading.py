"""Reads bodies of every kind that may be long."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from alignedserve.api.anthropic.message_request import count_answer, message_prompts
from alignedserve.api.anthropic.parsing import BodyParser
from alignedserve.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from alignedserve.api.embeddings.request_builder import PairSides, embedding_prompts, pair_prompts
from alignedserve.api.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.openai.parsing import parse, parse_chat, parse_completion, parse_json
from alignedserve.api.openai.prompt_encoding import Prompts, chat_prompts, completion_prompts
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.requests import DetokenizeRequest
from alignedserve.api.openai.token_answers import parse_tokenize, text_answer, tokens_answer
from alignedserve.api.responses.items import Item, parse_items
from alignedserve.api.responses.parsing import parse_input_tokens, parse_response
from alignedserve.api.responses.request_builder import check_prompt, new_response_id
from alignedserve.api.responses.request_builder import count_answer as response_count_answer
from alignedserve.api.responses.schemas import PromptFields as ResponseFields
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.long_bodies.messages import Answer, EncodedPrompt, Kind, NotRead, Outcome, ReadBody, Refusal
from alignedserve.text.tokenizer import Tokenizer

_SHORT = "-"  # for a prompt that is encoded

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, as far as prompts need it."""

    model: ModelCard
    tokenizer: Tokenizer
    config: GatewayConfig
    lanes: WorkLanes


FindModel = Callable[[str | None], LoadedModel | None]


class _Unreadable(Exception):
    """Only the gateway can read this body."""


class BodyReading:
    """Reads one body."""

    def __init__(self, kind: Kind, config: GatewayConfig, find: FindModel) -> None:
        """`find`: returns the model of a name; None: this process does not know it, though the gateway may."""
        self._kind = kind
        self._config = config
        self._find_model = find
        self._ignored = None if config.strict else IgnoredFields()

    async def read(self, raw: bytes) -> Outcome:
        """Return what becomes of the body."""
        try:
            return await self._read(parse_json(raw, self._config))
        except InvalidRequest as error:
            return Refusal.of(error, self._ignored_names)
        except _Unreadable:
            return NotRead()

    async def _read(self, body: Body) -> Outcome:
        match self._kind:
            case Kind.MESSAGE_COUNT:
                return self._answer(await self._count(body))
            case Kind.RESPONSE:
                return await self._response(body)
            case Kind.RESPONSE_COUNT:
                return self._answer(await self._response_count(body))
            case Kind.TOKENIZE:
                asked = parse_tokenize(body, self._ignored)
                return self._answer(await tokens_answer(asked, self._find(asked.model)))
            case Kind.DETOKENIZE:
                return self._answer(await self._detokenize(body))
            case Kind.CHAT:
                prompts, short = await self._chat(body)
            case Kind.COMPLETION:
                prompts, short = await self._completion(body)
            case Kind.EMBEDDING:
                prompts, short = await self._embedding(body)
            case Kind.SCORE:
                prompts, short = await self._score(body)
            case Kind.RANKING:
                prompts, short = await self._ranking(body)
            case Kind.MESSAGE:
                prompts, short = await self._message(body)
        packed = tuple(EncodedPrompt.of(prompt, keeps_text=bool(body.get("echo"))) for prompt in prompts)
        return ReadBody(orjson.dumps(body | short), packed, self._ignored_names)

    async def _chat(self, body: Body) -> tuple[Prompts, Body]:
        chat = parse_chat(body, self._ignored)
        role = "assistant" if chat.continue_final_message else "user"
        return await chat_prompts(chat, self._find(chat.model)), {"messages": [{"role": role, "content": _SHORT}]}

    async def _completion(self, body: Body) -> tuple[Prompts, Body]:
        completion = parse_completion(body, self._ignored)
        return await completion_prompts(completion, self._find(completion.model)), {"prompt": _SHORT}

    async def _embedding(self, body: Body) -> tuple[Prompts, Body]:
        asked = parse(EmbeddingRequest, body, self._ignored)
        return await embedding_prompts(asked, self._find(asked.model)), {"input": _SHORT}

    async def _score(self, body: Body) -> tuple[Prompts, Body]:
        asked = parse(ScoreRequest, body, self._ignored)
        sides = PairSides.of_scores(asked)
        prompts = await pair_prompts(asked, sides, self._find(asked.model))
        return prompts, {"text_1": [_SHORT] * len(sides.first), "text_2": [_SHORT] * len(sides.second)}

    async def _ranking(self, body: Body) -> tuple[Prompts, Body]:
        asked = parse(RerankRequest, body, self._ignored)
        prompts = await pair_prompts(asked, PairSides.of_ranking(asked), self._find(asked.model))
        if asked.return_documents:
            return prompts, {"query": _SHORT}  # the answer repeats the documents
        return prompts, {"query": _SHORT, "documents": [_SHORT] * len(asked.documents)}

    async def _message(self, body: Body) -> tuple[Prompts, Body]:
        parser = BodyParser(self._ignored)
        asked = parser.fields(MessagesRequest, body)
        if any(tool.get("defer_loading") for tool in asked.tools):
            raise _Unreadable  # its messages tell which of its tools may be called
        prompts = await message_prompts(asked, parser, self._find(asked.model))
        return prompts, {"messages": [{"role": "user", "content": _SHORT}], "system": None}

    async def _response(self, body: Body) -> NotRead:
        """Refuse a response whose prompt alone is wrong; the gateway itself needs, and may store, all others."""
        asked = parse_response(body, self._ignored)
        if asked.truncation != "auto":
            await check_prompt(asked, self._items(asked), self._find(asked.model))
        return NotRead()

    async def _response_count(self, body: Body) -> bytes:
        asked = parse_input_tokens(body, self._ignored)
        return await response_count_answer(asked, self._items(asked), self._find(asked.model))

    def _items(self, asked: ResponseFields) -> list[Item]:
        items = parse_items(asked.input, new_response_id(), self._ignored)
        is_whole = asked.previous_response_id is None and asked.conversation_id is None
        if not is_whole or any(item["type"] == "item_reference" for item in items):
            raise _Unreadable  # others of its items are stored
        return items

    async def _count(self, body: Body) -> bytes:
        parser = BodyParser(self._ignored)
        asked = parser.fields(CountTokensRequest, body)
        return await count_answer(asked, parser, self._find(asked.model))

    async def _detokenize(self, body: Body) -> bytes:
        asked = parse(DetokenizeRequest, body, self._ignored)
        return await text_answer(asked, self._find(asked.model))

    def _answer(self, answer: bytes) -> Answer:
        return Answer(answer, self._ignored_names)

    def _find(self, name: str | None) -> LoadedModel:
        model = self._find_model(name)
        if model is None:
            raise _Unreadable
        return model

    @property
    def _ignored_names(self) -> tuple[str, ...]:
        return self._ignored.names if self._ignored is not None else ()

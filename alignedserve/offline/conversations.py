"""Conversations without a server: the gateway's own reading of messages, tools, thoughts and constraints."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, TypedDict

from alignedserve.api.endpoints import CHAT
from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.openai.choice_decoder import ChoiceDecoder
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.openai.parsing import check_shape
from alignedserve.api.openai.prompt_encoding import chat_prompt, note_effort
from alignedserve.api.openai.request_builder import PreparedChat, prepare_chat
from alignedserve.api.openai.translation import chat_spec, conversation_of_chat
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import Request
from alignedserve.offline.text_reader import PromptErrors
from alignedserve.runtime.grammar.constraints import StructuredOutputs
from alignedserve.runtime.grammar.trials import ALONE, TrialTurn
from alignedserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_MAX_DEPTH = 64  # of messages, tools and schemas

Message = Mapping[str, Any]  # in OpenAI's shape
Conversation = str | Sequence[Message]  # a text is what the user says first


class ConversationOptions(TypedDict, total=False):
    """Options of a chat, by OpenAI's names and vLLM's; docs/tools.md says what each does."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]
    reasoning_effort: str
    thinking_token_budget: int
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class ConversationReader:
    """Turns conversations into prompts, and makes what turns tokens into answers."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, check_grammar: Callable[[str], None]) -> None:
        self._model = _Model(card, tokenizer, _GrammarCheck(check_grammar))

    def prepare(
        self,
        conversations: Sequence[Conversation],
        structured_outputs: StructuredOutputs | None,
        options: ConversationOptions,
        errors: PromptErrors,
    ) -> dict[int, PreparedChat]:
        """Return what to generate. Raises InvalidRequest naming the field, as the HTTP API does."""
        for name in options:
            if name not in ConversationOptions.__annotations__:
                raise InvalidRequest(f"chat has no option {name[:64]}; SamplingParams says how to sample.", param=name)
        fields: dict[str, Any] = {"model": self._model.model.name, **options}
        if structured_outputs is not None:
            constraint = asdict(structured_outputs)
            fields["structured_outputs"] = {name: value for name, value in constraint.items() if value is not None}
        bodies = [fields | {"messages": _messages(conversation)} for conversation in conversations]
        # In a thread of its own: the caller may stand in an event loop, as notebooks do.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._prepare_all(bodies, errors)).result()

    def decoder(self, request: Request, output_format: OutputFormat, stops: Sequence[str]) -> ChoiceDecoder:
        model = self._model
        eos_token_ids = model.model.eos_token_ids
        return ChoiceDecoder(
            model.tokenizer, request, stops=stops, eos_token_ids=eos_token_ids, output_format=output_format
        )

    async def _prepare_all(self, bodies: Sequence[dict[str, Any]], errors: PromptErrors) -> dict[int, PreparedChat]:
        now = datetime.now().astimezone()
        prepared: dict[int, PreparedChat] = {}
        for index, body in enumerate(bodies):
            with errors.of(index):
                prepared[index] = await self._prepare(body, now)
        return prepared

    async def _prepare(self, body: dict[str, Any], now: datetime) -> PreparedChat:
        check_shape(body, _MAX_DEPTH)
        chat = CHAT.parse(body, None)
        conversation = conversation_of_chat(chat)
        note_effort(conversation, self._model, None)
        prompt = self._model.tokenizer.encode_chat(chat_prompt(conversation, self._model), now=now)
        left_out = IgnoredFields()
        constraint = chat_spec(chat).constraint
        prepared = await prepare_chat(conversation, constraint, tuple(prompt), self._model, ignored=left_out)
        if left_out.names:
            logger.warning("calls are not held to %s", ", ".join(left_out.names))
        return prepared


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if isinstance(messages, str):
        return [messages]
    if not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a text, a list of messages, or a list of these.", param="messages")
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Model:
    model: ModelCard
    tokenizer: Tokenizer
    grammars: "_GrammarCheck"
    lanes: WorkLanes = field(default_factory=WorkLanes)


@dataclass(frozen=True, slots=True)
class _GrammarCheck:
    check_grammar: Callable[[str], None]

    async def check(self, grammar: str, turn: TrialTurn = ALONE) -> None:
        self.check_grammar(grammar)


def _messages(conversation: Conversation) -> Any:
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    if not isinstance(conversation, Sequence):
        return conversation
    return [dict(message) if isinstance(message, Mapping) else message for message in conversation]

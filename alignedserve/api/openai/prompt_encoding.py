"""Tokenizes prompts and conversations; long ones beside the loop, so that streams continue meanwhile.

Makes what a model's chat template is given out of a checked conversation."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from alignedserve.api.conversation import Conversation, template_messages
from alignedserve.api.errors import refuse_unknown
from alignedserve.api.harmony import harmony_effort, harmony_messages, harmony_tools
from alignedserve.api.models.model_services import PromptModel, PromptServices
from alignedserve.api.openai.bodies import CompletionRequest, PromptForms
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.reasoning import FORMATS as REASONING_FORMATS
from alignedserve.api.reasoning import ReasoningFormat, effort_variables, find_reasoning_format, thought_start
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.tools.formats import FORMATS as TOOL_FORMATS
from alignedserve.api.tools.formats import (
    GENERIC,
    HeaderCall,
    ToolFormat,
    find_tool_format,
    prompted_messages,
    text_parameters,
)
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import Picture
from alignedserve.text.chat_template import ChatPrompt, ChatTemplate
from alignedserve.text.tokenizer import check_length

_NUM_END_TOKENS = 16  # of a prompt; a mark at its end is a few at most
_SHORT_ID_LEN = 9  # letters and digits, as Mistral's templates want


def chat_prompt(conversation: Conversation, model: PromptModel, picture_texts: Sequence[str] = ()) -> ChatPrompt:
    """Return the conversation for the model's template. Raises InvalidRequest for what the template cannot show.

    `picture_texts`: what stands for each picture in the prompt; none: pictures are refused."""
    param = conversation.names.messages
    if not picture_texts and any(message.pictures for message in conversation.messages):
        raise InvalidRequest("Pictures are not supported here.", param=param, code="unsupported_parameter")
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest("This model has no chat template; use completions.", param=param)
    # A model that may not call is not told of tools either: nothing then keeps it from calling but its prompt.
    is_told = conversation.tool_choice.mode != "none"
    tools = [tool.as_template_tool() for tool in conversation.tools] if is_told else []
    form, _ = answer_forms(model)
    if tools and form is None:
        raise _no_tools("How this model writes tool calls is not known; model.tool_format can say it.")
    messages = template_messages(conversation.messages)
    if form is not None and form.has_short_ids:
        messages = [_with_ids(message, _short_id) for message in messages]
    if form is not None and isinstance(form.call, HeaderCall) and form.call.is_numbered:
        ids = _numbered_ids(messages)
        messages = [_with_ids(message, lambda call_id: ids.get(call_id, call_id)) for message in messages]
    is_harmony = form is not None and form.is_harmony
    if is_harmony:
        messages, tools = harmony_messages(messages), harmony_tools(tools)
    if not template.knows_tools and (tools or any(message.calls for message in conversation.messages)):
        if form is None or form.prompt is None:
            raise _no_tools("tools are not supported by this model's chat template.")
        messages, tools = prompted_messages(messages, tools, form), []
    pictures = model.model.picture_form
    return ChatPrompt(
        messages,
        tools,
        _variables(conversation, template, is_harmony=is_harmony),
        conversation.begins_answer,
        conversation.continues_last,
        picture_mark=pictures.mark if pictures is not None else "",
        picture_texts=tuple(picture_texts),
        param=param,
    )


def answer_forms(model: PromptModel) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """Return how the served model writes calls, and how it marks a thought; None: it is not known, or does not."""
    source, template = _source(model), model.tokenizer.chat_template
    tools = find_tool_format(model.model.tool_format, source)
    if tools is None and template is not None and not template.knows_tools:
        tools = GENERIC
    reasoning = find_reasoning_format(model.model.reasoning_format, source)
    if any(form is not None and form.is_harmony for form in (tools, reasoning)):
        return TOOL_FORMATS["gpt_oss"], REASONING_FORMATS["gpt_oss"]  # one form for both
    return tools, reasoning


def chat_output_format(conversation: Conversation, prompt: Sequence[int], model: PromptModel) -> OutputFormat:
    tools, reasoning = answer_forms(model)
    if not conversation.tools or conversation.tool_choice.mode == "none":
        tools = None
    form = OutputFormat(
        reasoning,
        tools=tools,
        texts_of_tools={tool.name: text_parameters(tool.parameters or {}) for tool in conversation.tools},
        is_continued=conversation.continues_last,
        must_call=conversation.tool_choice.mode == "required",
        must_think=conversation.thinking_budget is not None,
    )
    if reasoning is None:
        return form
    prompt_end = model.tokenizer.decode(prompt[-_NUM_END_TOKENS:], skip_special_tokens=False)
    continued = conversation.messages[-1].text if conversation.continues_last else ""
    return replace(form, thought_start=thought_start(prompt_end, reasoning, continued))


def _source(model: PromptModel) -> str:
    template = model.tokenizer.chat_template
    return template.source if template is not None else ""


def _variables(conversation: Conversation, template: ChatTemplate, *, is_harmony: bool) -> dict[str, Any]:
    if any(name in template.reserved for name in conversation.variables):
        raise InvalidRequest(
            "chat_template_kwargs may not replace the messages, the tools or what belongs to the model.",
            param="chat_template_kwargs",
        )
    variables: dict[str, Any] = {}
    if conversation.effort is not None:
        effort = harmony_effort(conversation.effort) if is_harmony else conversation.effort
        if effort is None:
            raise _no_effort(conversation)  # a model that always thinks
        variables = effort_variables(effort, template.variables) or {}
    return variables | dict(conversation.variables)


def note_effort(conversation: Conversation, model: PromptModel, ignored: IgnoredFields | None) -> None:
    """Name an effort that the model has no switch for among the ignored fields.

    `ignored`: None: such fields are refused, with InvalidRequest."""
    template = model.tokenizer.chat_template
    if conversation.effort is None or template is None:
        return
    tools, reasoning = answer_forms(model)
    if tools is not None and tools.is_harmony:
        return
    variables = effort_variables(conversation.effort, template.variables)
    always_thinks = not variables and reasoning is not None
    if variables is None or always_thinks:
        if ignored is None:
            raise _no_effort(conversation)
        ignored.add(conversation.names.effort)


def note_variables(conversation: Conversation, model: PromptModel, ignored: IgnoredFields | None) -> None:
    """Name the client's template variables that the template does not read among the ignored fields.

    `ignored`: as `note_effort` takes it."""
    template = model.tokenizer.chat_template
    known = template.variables if template is not None else ()
    for path in [f"chat_template_kwargs.{name}" for name in conversation.variables if name not in known]:
        if ignored is None:
            refuse_unknown(path)
        ignored.add(path)


def _with_ids(message: dict[str, Any], shown_id: Callable[[str], str]) -> dict[str, Any]:
    shown = dict(message)
    if "tool_calls" in shown:
        shown["tool_calls"] = [{**call, "id": shown_id(call["id"])} for call in shown["tool_calls"]]
    if "tool_call_id" in shown:
        shown["tool_call_id"] = shown_id(shown["tool_call_id"])
    return shown


def _numbered_ids(messages: Sequence[dict[str, Any]]) -> dict[str, str]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return {call["id"]: f"functions.{call['function']['name']}:{index}" for index, call in enumerate(calls)}


def _short_id(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_LEN and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID_LEN]


def _no_effort(conversation: Conversation) -> InvalidRequest:
    param = conversation.names.effort
    message = f"{param} is not supported by this model's chat template."
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def _no_tools(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools", code="unsupported_parameter")


_TOKEN_LEN = 4  # what a token costs that is decoded, in characters of text


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids and as text."""

    token_ids: tuple[int, ...]
    text: str = ""  # repeated by `echo`
    second_text_at: int = 0  # as in Request
    pictures: tuple[Picture, ...] = ()  # likewise


Prompts = tuple[Prompt, ...]


async def encode_chat(conversation: Conversation, services: PromptServices, *, is_bounded: bool = False) -> Prompt:
    """Return the prompt of a conversation that was checked. Raises InvalidRequest.

    `is_bounded`: a conversation that cannot fit the context is refused before it is tokenized, with ContextTooLong."""
    services.model.require_generation(conversation.names.messages)
    pictures = await services.pictures.read(conversation, services.model.picture_form, services.config, services.lanes)
    texts = () if pictures is None else pictures.texts
    limit = services.model.max_context_len if is_bounded else None

    def encode() -> Prompt:
        prompt = chat_prompt(conversation, services, texts)
        # Templates show the date.
        token_ids = tuple(services.tokenizer.encode_chat(prompt, now=datetime.now(), max_tokens=limit))
        return Prompt(token_ids, pictures=() if pictures is None else pictures.placed(token_ids, prompt.param))

    return await services.lanes.run(rough_length((conversation.messages, conversation.tools)), encode)


async def completion_prompts(completion: CompletionRequest, services: PromptServices) -> Prompts:
    services.model.require_generation("prompt")
    prompts = await encode_prompts(
        completion.prompt,
        services,
        add_special_tokens=completion.add_special_tokens,
        is_bounded=completion.truncate_prompt_tokens is None,
    )
    return tuple(prompts)


async def encode_text(
    text: str, services: PromptServices, *, add_special_tokens: bool = True, param: str | None = None
) -> tuple[int, ...]:
    """Return the token ids of a text.

    `param`: the field of a text that is refused, before it is tokenized, if it cannot fit the context; None: none is.
    """
    limit = services.model.max_context_len if param is not None else None
    if param is not None:
        check_length(services.tokenizer.least_tokens(text), limit, param=param)

    def encode() -> tuple[int, ...]:
        return tuple(services.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit))

    return await services.lanes.run(len(text), encode)


async def decode_text(token_ids: list[int], services: PromptServices) -> str:
    """Return the text of token ids, special tokens included. Raises InvalidRequest."""

    def decode() -> str:
        known = check_token_ids(token_ids, services, param="tokens")
        return services.tokenizer.decode(known, skip_special_tokens=False)

    return await services.lanes.run(len(token_ids) * _TOKEN_LEN, decode)


def param_at(param: str, index: int, *, of: int) -> str:
    """Return how errors name one of several prompts of a field: `prompt[3]`; a single one is the field itself."""
    return f"{param}[{index}]" if of > 1 else param


async def encode_prompts(
    prompt: PromptForms,
    services: PromptServices,
    *,
    param: str = "prompt",
    add_special_tokens: bool = True,
    is_bounded: bool = True,
) -> list[Prompt]:
    """Return the prompts of a completion or of embeddings, whatever form they were sent in.

    `is_bounded`: False: only a part of each will be read, so that it may be longer than the context. Raises
    InvalidRequest naming `param`."""
    if isinstance(prompt, str):
        return [await _text_prompt(prompt, services, param, add_special_tokens, is_bounded=is_bounded)]
    if isinstance(prompt[0], int):
        token_ids = [item for item in prompt if isinstance(item, int)]
        return [await _token_prompt(token_ids, services, param, is_bounded=is_bounded)]
    if len(prompt) > services.config.max_concurrent_requests:
        raise InvalidRequest(f"{param} holds more than {services.config.max_concurrent_requests} texts.", param=param)
    prompts = []
    for index, item in enumerate(prompt):
        item_param = param_at(param, index, of=len(prompt))
        if isinstance(item, str):
            prompts.append(await _text_prompt(item, services, item_param, add_special_tokens, is_bounded=is_bounded))
        elif isinstance(item, list):
            prompts.append(await _token_prompt(item, services, item_param, is_bounded=is_bounded))
        await asyncio.sleep(0)  # streams continue between prompts that are not long
    return prompts


def check_token_ids(token_ids: Sequence[int], services: PromptServices, *, param: str = "prompt") -> tuple[int, ...]:
    """Return these ids if the vocabulary has all of them. Raises InvalidRequest."""
    known_ids = range(services.tokenizer.vocab_size)
    if any(token_id not in known_ids for token_id in token_ids):
        raise InvalidRequest(f"{param} holds an id outside the vocabulary (0 to {len(known_ids) - 1}).", param=param)
    return tuple(token_ids)


async def _text_prompt(
    text: str, services: PromptServices, param: str, add_special_tokens: bool, *, is_bounded: bool
) -> Prompt:
    bounded_param = param if is_bounded else None
    token_ids = await encode_text(text, services, add_special_tokens=add_special_tokens, param=bounded_param)
    if not token_ids and services.tokenizer.bos_token_id is not None:
        token_ids = (services.tokenizer.bos_token_id,)  # an empty prompt begins a new document
    if not token_ids:
        raise InvalidRequest(f"{param} must hold at least one token: this model has no begin token.", param=param)
    return Prompt(token_ids, text)


async def _token_prompt(token_ids: list[int], services: PromptServices, param: str, *, is_bounded: bool) -> Prompt:
    if is_bounded:
        check_length(len(token_ids), services.model.max_context_len, param=param)

    def decode() -> Prompt:
        known = check_token_ids(token_ids, services, param=param)
        return Prompt(known, services.tokenizer.decode(known))

    return await services.lanes.run(len(token_ids) * _TOKEN_LEN, decode)

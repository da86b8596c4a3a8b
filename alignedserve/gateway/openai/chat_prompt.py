"""Makes what a model's chat template is given out of a checked conversation."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.openai.conversation import template_messages
from alignedserve.gateway.openai.output_parser import OutputFormat
from alignedserve.gateway.openai.schemas.messages import ChatMessage
from alignedserve.gateway.openai.schemas.requests import ChatCompletionRequest, ConversationFields
from alignedserve.gateway.reasoning.effort import effort_variables
from alignedserve.gateway.reasoning.formats import ReasoningFormat, find_reasoning_format, thought_start
from alignedserve.gateway.services import Services
from alignedserve.gateway.tools.formats import ToolFormat, find_tool_format
from alignedserve.gateway.tools.prompted_messages import prompted_messages
from alignedserve.runtime.model.chat_template import ChatTemplate

_NUM_END_TOKENS = 16  # of a prompt; a mark at its end is a few at most
_SHORT_ID_LEN = 9  # letters and digits, as Mistral's templates want


class ChatPrompt(NamedTuple):
    """The arguments of a chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def chat_prompt(fields: ConversationFields, services: Services) -> ChatPrompt:
    """Return the conversation for the model's template. Raises InvalidRequest for what the template cannot show."""
    template = services.tokenizer.chat_template
    if template is None:
        raise InvalidRequest("This model has no chat template; use completions.", param="messages")
    # A model that may not call is not told of tools either: nothing then keeps it from calling but its prompt.
    tools = [] if fields.tool_choice.mode == "none" else [tool.as_template_tool() for tool in fields.tools]
    form = tool_format(services)
    if tools and form is None:
        raise _no_tools("How this model writes tool calls is not known; model.tool_format can say it.")
    shown = template_messages(fields.messages)
    if form is not None and form.has_short_ids:
        shown = [_with_short_ids(message) for message in shown]
    if not template.knows_tools and (tools or _has_calls(fields.messages)):
        if form is None or form.prompt is None:
            raise _no_tools("tools are not supported by this model's chat template.")
        shown, tools = prompted_messages(shown, tools, form), []
    ends = (fields.add_generation_prompt, fields.continue_final_message)
    if all(ends) and "add_generation_prompt" in fields.model_fields_set:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message cannot both be true.", param="add_generation_prompt"
        )
    return ChatPrompt(shown, tools, _variables(fields, template), *ends)


def tool_format(services: Services) -> ToolFormat | None:
    """Return how the served model writes tool calls; None: it is not known."""
    return find_tool_format(services.model.tool_format, _source(services))


def reasoning_format(services: Services) -> ReasoningFormat | None:
    """Return how the served model marks a thought; None: it is no reasoning model."""
    return find_reasoning_format(services.model.reasoning_format, _source(services))


def chat_output_format(chat: ChatCompletionRequest, prompt: Sequence[int], services: Services) -> OutputFormat:
    """Return what the answer to this prompt may hold beside content."""
    tools = tool_format(services) if chat.tools and chat.tool_choice.mode != "none" else None
    reasoning = reasoning_format(services)
    if reasoning is None:
        return OutputFormat(tools=tools)
    prompt_end = services.tokenizer.decode(prompt[-_NUM_END_TOKENS:], skip_special_tokens=False)
    return OutputFormat(reasoning, thought_start(prompt_end, reasoning), tools)


def _source(services: Services) -> str:
    template = services.tokenizer.chat_template
    return template.source if template is not None else ""


def _variables(fields: ConversationFields, template: ChatTemplate) -> dict[str, Any]:
    """Return the template's further variables: those of `reasoning_effort`, and over them the client's own."""
    if any(name in template.reserved for name in fields.chat_template_kwargs):
        raise InvalidRequest(
            "chat_template_kwargs may not replace the messages, the tools or what belongs to the model.",
            param="chat_template_kwargs",
        )
    variables: dict[str, Any] | None = {}
    if fields.reasoning_effort is not None:
        variables = effort_variables(fields.reasoning_effort, template.variables)
    if variables is None:
        raise InvalidRequest(
            "reasoning_effort is not supported by this model's chat template.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return variables | fields.chat_template_kwargs


def _has_calls(messages: Sequence[ChatMessage]) -> bool:
    return any(message.tool_calls for message in messages)


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    shown = dict(message)
    if "tool_calls" in shown:
        shown["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in shown["tool_calls"]]
    if "tool_call_id" in shown:
        shown["tool_call_id"] = _short_id(shown["tool_call_id"])
    return shown


def _short_id(call_id: str) -> str:
    """Return the id, or a digest of one that the template would refuse: clients may have it from another model."""
    if len(call_id) == _SHORT_ID_LEN and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID_LEN]


def _no_tools(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools", code="unsupported_parameter")

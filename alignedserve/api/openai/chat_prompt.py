"""Makes what a model's chat template is given out of a checked conversation."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from alignedserve.api.conversation import Conversation, template_messages
from alignedserve.api.errors import refuse_unknown
from alignedserve.api.harmony import harmony_effort, harmony_messages, harmony_tools
from alignedserve.api.models.model_card import PromptModel
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
from alignedserve.core.errors import InvalidRequest
from alignedserve.text.chat_template import ChatPrompt, ChatTemplate

_NUM_END_TOKENS = 16  # of a prompt; a mark at its end is a few at most
_SHORT_ID_LEN = 9  # letters and digits, as Mistral's templates want


def chat_prompt(conversation: Conversation, model: PromptModel, picture_texts: Sequence[str] = ()) -> ChatPrompt:
    """Return the conversation for the model's template. Raises InvalidRequest for what the template cannot show.

    `picture_texts`: what stands for each picture in the prompt; none: pictures are refused.
    """
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

    `ignored`: None: such fields are refused, with InvalidRequest.
    """
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

    `ignored`: as `note_effort` takes it.
    """
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

"""Makes what a model's chat template is given out of a checked conversation."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from alignedserve.api.harmony import harmony_effort, harmony_messages, harmony_tools
from alignedserve.api.models.model_card import PromptModel
from alignedserve.api.openai.conversation import template_messages
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.messages import ChatMessage
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest, ConversationFields
from alignedserve.api.reasoning import FORMATS as REASONING_FORMATS
from alignedserve.api.reasoning import ReasoningFormat, effort_variables, find_reasoning_format, thought_start
from alignedserve.api.tools.formats import FORMATS as TOOL_FORMATS
from alignedserve.api.tools.formats import GENERIC, HeaderCall, ToolFormat, find_tool_format, prompted_messages
from alignedserve.api.tools.parameters import text_parameters
from alignedserve.core.errors import InvalidRequest
from alignedserve.text.chat_prompt import ChatPrompt
from alignedserve.text.chat_template import ChatTemplate

_NUM_END_TOKENS = 16  # of a prompt; a mark at its end is a few at most
_SHORT_ID_LEN = 9  # letters and digits, as Mistral's templates want


def chat_prompt(fields: ConversationFields, model: PromptModel, picture_texts: Sequence[str] = ()) -> ChatPrompt:
    """Return the conversation for the model's template. Raises InvalidRequest for what the template cannot show.

    `picture_texts`: what stands for each picture in the prompt; none: pictures are refused.
    """
    form_of_pictures = model.model.picture_form
    if not picture_texts and any(message.has_pictures for message in fields.messages):
        raise InvalidRequest("Pictures are not supported here.", param="messages", code="unsupported_parameter")
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest("This model has no chat template; use completions.", param="messages")
    # A model that may not call is not told of tools either: nothing then keeps it from calling but its prompt.
    tools = [] if fields.tool_choice.mode == "none" else [tool.as_template_tool() for tool in fields.tools]
    form, _ = answer_forms(model)
    if tools and form is None:
        raise _no_tools("How this model writes tool calls is not known; model.tool_format can say it.")
    shown = template_messages(fields.messages)
    if form is not None and form.has_short_ids:
        shown = [_with_ids(message, _short_id) for message in shown]
    if form is not None and isinstance(form.call, HeaderCall) and form.call.is_numbered:
        ids = _numbered_ids(shown)
        shown = [_with_ids(message, lambda call_id: ids.get(call_id, call_id)) for message in shown]
    is_harmony = form is not None and form.is_harmony
    if is_harmony:
        shown, tools = harmony_messages(shown), harmony_tools(tools)
    if not template.knows_tools and (tools or _has_calls(fields.messages)):
        if form is None or form.prompt is None:
            raise _no_tools("tools are not supported by this model's chat template.")
        shown, tools = prompted_messages(shown, tools, form), []
    ends = (fields.add_generation_prompt, fields.continue_final_message)
    if all(ends) and "add_generation_prompt" in fields.model_fields_set:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message cannot both be true.", param="add_generation_prompt"
        )
    mark = form_of_pictures.mark if form_of_pictures is not None else ""
    variables = _variables(fields, template, is_harmony=is_harmony)
    return ChatPrompt(shown, tools, variables, *ends, mark, tuple(picture_texts))


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


def chat_output_format(chat: ChatCompletionRequest, prompt: Sequence[int], model: PromptModel) -> OutputFormat:
    tools, reasoning = answer_forms(model)
    if not chat.tools or chat.tool_choice.mode == "none":
        tools = None
    texts = {tool.function.name: text_parameters(tool.function.parameters or {}) for tool in chat.tools}
    form = OutputFormat(
        reasoning,
        tools=tools,
        texts_of_tools=texts,
        is_continued=chat.continue_final_message,
        must_call=chat.tool_choice.mode == "required",
        must_think=chat.thinking_token_budget is not None,
    )
    if reasoning is None:
        return form
    prompt_end = model.tokenizer.decode(prompt[-_NUM_END_TOKENS:], skip_special_tokens=False)
    continued = chat.messages[-1].text if chat.continue_final_message else ""
    return replace(form, thought_start=thought_start(prompt_end, reasoning, continued))


def _source(model: PromptModel) -> str:
    template = model.tokenizer.chat_template
    return template.source if template is not None else ""


def _variables(fields: ConversationFields, template: ChatTemplate, *, is_harmony: bool) -> dict[str, Any]:
    if any(name in template.reserved for name in fields.chat_template_kwargs):
        raise InvalidRequest(
            "chat_template_kwargs may not replace the messages, the tools or what belongs to the model.",
            param="chat_template_kwargs",
        )
    variables: dict[str, Any] = {}
    if fields.reasoning_effort is not None:
        effort = harmony_effort(fields.reasoning_effort) if is_harmony else fields.reasoning_effort
        if effort is None:
            raise _no_effort()  # a model that always thinks
        variables = effort_variables(effort, template.variables) or {}
    return variables | fields.chat_template_kwargs


def note_effort(
    fields: ConversationFields, model: PromptModel, ignored: IgnoredFields | None, name: str = "reasoning_effort"
) -> None:
    """Name a `reasoning_effort` that the model has no switch for among the ignored fields.

    `ignored`: None: such fields are refused, with InvalidRequest. `name`: of the field, as the client knows it.
    """
    template = model.tokenizer.chat_template
    if fields.reasoning_effort is None or template is None:
        return
    tools, reasoning = answer_forms(model)
    if tools is not None and tools.is_harmony:
        return
    variables = effort_variables(fields.reasoning_effort, template.variables)
    always_thinks = not variables and reasoning is not None
    if variables is None or always_thinks:
        if ignored is None:
            raise _no_effort()
        ignored.add(name)


def note_variables(fields: ConversationFields, model: PromptModel, ignored: IgnoredFields | None) -> None:
    """Name the client's template variables that the template does not read among the ignored fields.

    `ignored`: as `note_effort` takes it.
    """
    template = model.tokenizer.chat_template
    known = template.variables if template is not None else ()
    for path in [f"chat_template_kwargs.{name}" for name in fields.chat_template_kwargs if name not in known]:
        if ignored is None:
            raise InvalidRequest(f"Unrecognized request argument: {path}.", param=path, code="unknown_parameter")
        ignored.add(path)


def _has_calls(messages: Sequence[ChatMessage]) -> bool:
    return any(message.tool_calls for message in messages)


def _with_ids(message: dict[str, Any], shown_id: Callable[[str], str]) -> dict[str, Any]:
    shown = dict(message)
    if "tool_calls" in shown:
        shown["tool_calls"] = [{**call, "id": shown_id(call["id"])} for call in shown["tool_calls"]]
    if "tool_call_id" in shown:
        shown["tool_call_id"] = shown_id(shown["tool_call_id"])
    return shown


def _numbered_ids(messages: Sequence[dict[str, Any]]) -> dict[str, str]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return {call["id"]: f"functions.{call['function']['name']}:{place}" for place, call in enumerate(calls)}


def _short_id(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_LEN and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID_LEN]


def _no_effort() -> InvalidRequest:
    return InvalidRequest(
        "reasoning_effort is not supported by this model's chat template.",
        param="reasoning_effort",
        code="unsupported_parameter",
    )


def _no_tools(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tools", code="unsupported_parameter")

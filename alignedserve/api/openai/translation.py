"""Translates bodies of chat completions and completions, whose functions are older words for tools."""

from collections.abc import Iterator, Sequence

from alignedserve.api.conversation import (
    AnswerSpec,
    Conversation,
    FieldNames,
    NamedPicture,
    OfferedTool,
    PastCall,
    PastMessage,
    ToolChoice,
)
from alignedserve.api.errors import refuse, refuse_missing
from alignedserve.api.openai.bodies import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ConversationFields,
    GenerationFields,
    TextPart,
    ToolCall,
    constraint_of,
)
from alignedserve.core.errors import InvalidRequest

_DEFAULT_COMPLETION_TOKENS = 16


def conversation_of_chat(body: ConversationFields) -> Conversation:
    """Return the conversation, which `check_conversation` has still to check. Raises InvalidRequest."""
    ends = (body.add_generation_prompt, body.continue_final_message)
    if all(ends) and "add_generation_prompt" in body.model_fields_set:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message cannot both be true.", param="add_generation_prompt"
        )
    mode = "auto" if body.function_call is None else body.function_call.mode
    if body.functions and body.tools:
        refuse("functions", "it cannot be combined with tools")
    if not body.functions and (mode == "required" or (mode == "none" and body.tools)):
        refuse("function_call", "it needs functions")
    if body.functions and body.tool_choice != ToolChoice():
        refuse("tool_choice", "it cannot be combined with functions, whose choice is function_call")
    uses_functions = bool(body.functions)
    return Conversation(
        messages=tuple(_messages(body.messages)),
        tools=tuple(_tools(body)),
        tool_choice=body.function_call or ToolChoice() if uses_functions else body.tool_choice,
        has_parallel_calls=not uses_functions and getattr(body, "parallel_tool_calls", True),
        effort=body.reasoning_effort,
        thinking_budget=getattr(body, "thinking_token_budget", None),
        variables=body.chat_template_kwargs,
        begins_answer=body.add_generation_prompt,
        continues_last=body.continue_final_message,
        names=FieldNames(tool_choice="function_call") if uses_functions else FieldNames(),
    )


def chat_spec(body: ChatCompletionRequest) -> AnswerSpec:
    """Return what the answer of a chat is to be. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens is not None and max_tokens != body.max_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ.", param="max_tokens")
    _check_stream(body)
    return AnswerSpec.of(
        body,
        id_prefix="chatcmpl-",
        prompt_param="messages",
        max_tokens=max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constraint_of(body),
        calls_functions=bool(body.functions),
    )


def completion_spec(body: CompletionRequest) -> AnswerSpec:
    """Return what the answer of a completion is to be. Raises InvalidRequest."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens must be at least 1, or echo must be true.", param="max_tokens")
    _check_stream(body)
    return AnswerSpec.of(
        body,
        id_prefix="cmpl-",
        prompt_param="prompt",
        max_fitting_tokens=_DEFAULT_COMPLETION_TOKENS,
        num_logprobs=body.logprobs,
        constraint=constraint_of(body),
    )


def _check_stream(body: GenerationFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not supported with stream.", param="prompt_logprobs")


def _tools(body: ConversationFields) -> Iterator[OfferedTool]:
    functions = [(f"tools[{index}].function", tool.function) for index, tool in enumerate(body.tools)]
    functions += [(f"functions[{index}]", function) for index, function in enumerate(body.functions)]
    for path, function in functions:
        words = function.name, function.description, function.parameters
        yield OfferedTool(*words, path, f"{path}.parameters", function.strict is True)


def _messages(messages: Sequence[ChatMessage]) -> Iterator[PastMessage]:
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role == "function":
            message = _result(message, messages[index - 1] if index else None, path, _call_id(index - 1))
        elif message.function_call is not None:
            if message.role != "assistant" or message.tool_calls:
                refuse(f"{path}.function_call", "only messages of an assistant without tool_calls have it")
            call = ToolCall(id=_call_id(index), function=message.function_call)
            message = message.model_copy(update={"tool_calls": [call], "function_call": None})
        for name in message.fields_of_other_roles():
            refuse(f"{path}.{name}", f"messages of role '{message.role}' do not have it")
        if message.has_pictures and message.role != "user":
            refuse(f"{path}.content", f"messages of role '{message.role}' have no pictures")
        if message.role == "tool" and message.tool_call_id is None:
            refuse_missing(f"{path}.tool_call_id")
        if message.content is None and not (message.tool_calls or message.thought):
            refuse_missing(f"{path}.content")
        yield PastMessage(
            role="system" if message.role == "developer" else message.role,  # type: ignore[arg-type]
            path=path,
            parts=tuple(_parts(message, path)),
            calls=tuple(
                PastCall.of(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
            ),
            thought=message.thought,
            call_id=message.tool_call_id,
            name=message.name,
            has_chat_members=True,
        )


def _parts(message: ChatMessage, path: str) -> Iterator[str | NamedPicture]:
    if isinstance(message.content, str):
        yield message.content
        return
    for index, part in enumerate(message.content or ()):
        at = f"{path}.content[{index}]"
        if isinstance(part, TextPart):
            yield part.text
        else:
            yield NamedPicture(part.image_url.url, f"{at}.image_url.url", f"{at}.type")


def _result(message: ChatMessage, before: ChatMessage | None, path: str, call_id: str) -> ChatMessage:
    call = before.function_call if before is not None else None
    if call is None:
        refuse(f"{path}.role", "the message before it calls no function")
    if message.name != call.name:
        refuse(f"{path}.name", "it must be the name of the function that the message before it calls")
    return message.model_copy(update={"role": "tool", "tool_call_id": call_id})


def _call_id(index: int) -> str:
    return f"call_of_message_{index}"

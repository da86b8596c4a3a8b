"""The grammar of a chat's answer: a thought, and then content that matches a constraint, free text, or tool calls."""

from functools import partial
from typing import Any

from alignedserve.api.conversation import Constraint, Conversation, OfferedTool
from alignedserve.api.errors import named
from alignedserve.api.harmony import CALL, HarmonyGrammar
from alignedserve.api.models.model_card import ChatModel
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.reasoning import thought_rules, thought_symbols
from alignedserve.api.tools.formats import (
    CallableTool,
    Literal,
    ParameterCall,
    ToolFormat,
    call_rules,
    check_parameters,
    lead_rules,
    text_parameters,
)
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import MAX_GRAMMAR_LEN
from alignedserve.runtime.grammar.constraints import GrammarPart, literal, part_of, serialize, serialize_alone
from alignedserve.runtime.grammar.json_schema import normalize_schema
from alignedserve.runtime.grammar.trials import ALONE, TrialTurn

_GAP = "GAP: /\\n{1,2}/"  # what models write between a thought and the rest
_TEXT = "TEXT: /(?s:.*)/"

# A schema with one of these keywords decides by itself on further properties.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")


async def chat_grammar(
    conversation: Conversation,
    constraint: Constraint | None,
    form: OutputFormat,
    model: ChatModel,
    turn: TrialTurn = ALONE,
) -> str:
    """Return the grammar that the answer is decoded under; empty: anything goes. Raises InvalidRequest."""
    part, budget_param = await _answer_part(constraint, model, turn), conversation.names.thinking_budget
    if conversation.thinking_budget is not None and form.reasoning is None:
        raise InvalidRequest("This is not a reasoning model.", param=budget_param)
    is_free = part is None and form.tools is None
    if is_free and conversation.thinking_budget is None:
        return ""
    if part is not None and form.tools is None and form.reasoning is None:
        return serialize_alone(part)
    grammar = await model.lanes.run(
        rough_length(conversation.tools), partial(_written, conversation, form, model, part)
    )
    if len(grammar) > MAX_GRAMMAR_LEN:
        raise InvalidRequest("The tools are too large.", param="tools")
    try:
        await model.grammars.check(grammar, turn)
    except InvalidRequest as error:
        param = "tools" if form.tools is not None else budget_param
        raise named(param, error) from error
    return grammar


def _written(conversation: Conversation, form: OutputFormat, model: ChatModel, part: GrammarPart | None) -> str:
    as_literal = partial(_literal, model)
    if form.is_harmony:
        skeleton = _harmony_rules(conversation, form, as_literal, model, has_part=part is not None)
    else:
        skeleton = _skeleton(conversation, form, part, as_literal)
    return serialize(skeleton, {"content": part} if part is not None else {})


def _skeleton(conversation: Conversation, form: OutputFormat, part: GrammarPart | None, as_literal: Literal) -> str:
    budget = conversation.thinking_budget
    answer, is_text = _answer(conversation, form.tools, part, as_literal)
    rules = [_TEXT, _GAP]
    thought = ""
    if form.reasoning is not None:
        gap = "" if is_text else "GAP?"
        thought = thought_symbols(form.thought_start, gap, is_bounded=budget is not None)
        rules.append(thought_rules(form.reasoning, as_literal, budget))
    if form.tools is not None:
        rules.append(_tool_rules(conversation, form.tools, as_literal))
    return "\n".join([f"start: {thought} answer", f"answer: {answer}", *rules])


def _harmony_rules(
    conversation: Conversation, form: OutputFormat, as_literal: Literal, model: ChatModel, *, has_part: bool
) -> str:
    if form.is_continued and conversation.tool_choice.mode == "required":
        raise InvalidRequest(
            "a call cannot go on with the last message: continue_final_message does not go with this tool_choice.",
            param="tool_choice",
        )
    ends_answer = model.tokenizer.control_token_ids(CALL) <= set(model.model.eos_token_ids)
    grammar = HarmonyGrammar(
        tools=_callable_tools(conversation, form.tools) if form.tools is not None else (),
        must_call=conversation.tool_choice.mode == "required",
        has_content_part=has_part,
        budget=conversation.thinking_budget,
        is_continued=form.is_continued,
    )
    return grammar.rules(as_literal, call_end="" if ends_answer else CALL)


def _answer(
    conversation: Conversation, tools: ToolFormat | None, part: GrammarPart | None, as_literal: Literal
) -> tuple[str, bool]:
    if tools is None:
        return ("TEXT", True) if part is None else ("@content", False)
    calls = f"{as_literal(tools.begin)} calls"
    if conversation.tool_choice.mode == "required":
        return calls, False
    if part is None:
        return "free | lead calls", bool(tools.begin)
    if not tools.begin:
        param = conversation.names.answer_format
        raise InvalidRequest(
            f"{param} beside tools is not supported for this model: its calls are not marked.",
            param=param,
            code="unsupported_parameter",
        )
    return f"@content | {calls}", False


def _callable_tools(conversation: Conversation, form: ToolFormat) -> list[CallableTool]:
    names = conversation.tool_choice.names
    return [
        CallableTool(tool.name, _arguments_schema(tool, form), text_parameters(tool.parameters or {}))
        for tool in conversation.tools
        if names is None or tool.name in names
    ]


def _tool_rules(conversation: Conversation, form: ToolFormat, as_literal: Literal) -> str:
    rules = [
        call_rules(form, _callable_tools(conversation, form), as_literal, is_parallel=conversation.has_parallel_calls)
    ]
    return "\n".join([*rules, lead_rules(form, as_literal)] if conversation.tool_choice.mode == "auto" else rules)


def _arguments_schema(tool: OfferedTool, form: ToolFormat) -> dict[str, Any]:
    try:
        schema = normalize_schema(_object_schema(tool.parameters or {}))
        if isinstance(form.call, ParameterCall):
            check_parameters(schema)
    except InvalidRequest as error:
        raise named(tool.schema_path, error) from error
    return schema


def _object_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("type", "object") != "object":
        raise InvalidRequest("the type must be 'object'", code="invalid_json_schema")
    has_others = any(name in parameters for name in _OPEN)
    return {"type": "object", "properties": {}, **({} if has_others else {"additionalProperties": False}), **parameters}


def _literal(model: ChatModel, text: str) -> str:
    return literal(model.tokenizer.split_control(text))


async def _answer_part(constraint: Constraint | None, model: ChatModel, turn: TrialTurn) -> GrammarPart | None:
    """Return what the answer must match as a part of a grammar, checked; None: anything. Raises InvalidRequest."""
    if constraint is None:
        return None
    try:
        outputs = constraint.outputs
        texts = [outputs.json, outputs.regex, outputs.grammar, outputs.choice, outputs.structural_tag]
        part = await model.lanes.run(rough_length(texts), partial(part_of, outputs))
        grammar = serialize_alone(part)
        if len(grammar) > MAX_GRAMMAR_LEN:
            raise InvalidRequest("it is too long")
        await model.grammars.check(grammar, turn)
    except InvalidRequest as error:
        raise named(constraint.param, error) from error
    return part


async def answer_grammar(constraint: Constraint | None, model: ChatModel, turn: TrialTurn = ALONE) -> str:
    """Return the grammar of an answer that is the constraint alone; empty: anything. Raises InvalidRequest."""
    part = await _answer_part(constraint, model, turn)
    return "" if part is None else serialize_alone(part)

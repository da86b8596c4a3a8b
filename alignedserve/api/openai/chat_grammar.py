"""The grammar of a chat's answer: a thought, and then content that matches a constraint, free text, or tool calls."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from alignedserve.api.conversation import Constraint, Conversation, OfferedTool
from alignedserve.api.errors import named
from alignedserve.api.harmony import CALL, HarmonyGrammar
from alignedserve.api.models.model_services import ChatModel
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.reasoning import thought_rules, thought_symbols
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.tools.formats import (
    OF_FUNCTIONS,
    CallableTool,
    Literal,
    ParameterCall,
    ToolFormat,
    call_rules,
    check_parameters,
    is_parameter,
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

# Keywords of hints that are left out together where all of a schema cannot be followed; and then all of it is.
_HARD = frozenset(
    {"allOf", "format", "maxProperties", "minProperties", "multipleOf", "oneOf", "pattern", "patternProperties"}
)
_LEAST_HELD = 2
_MAX_NAMES = 300  # of parameters
_KEYWORD = re.compile(r"[$\w]{1,64}", re.ASCII)
# A schema with one of these keywords decides by itself on further properties.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")


async def chat_grammar(
    conversation: Conversation,
    constraint: Constraint | None,
    form: OutputFormat,
    model: ChatModel,
    turn: TrialTurn = ALONE,
    ignored: IgnoredFields | None = None,
) -> str:
    """Return the grammar that the answer is decoded under; empty: anything goes. Raises InvalidRequest.

    `ignored`: gets what tools' schemas say that calls are not held to; None: it is refused."""
    part, budget_param = await _answer_part(constraint, model, turn), conversation.names.thinking_budget
    if conversation.thinking_budget is not None and form.reasoning is None:
        raise InvalidRequest("This is not a reasoning model.", param=budget_param)
    is_free = part is None and form.tools is None
    if is_free and conversation.thinking_budget is None:
        return ""
    if part is not None and form.tools is None and form.reasoning is None:
        return serialize_alone(part)
    names = conversation.tool_choice.names
    offered = [tool for tool in conversation.tools if names is None or tool.name in names]
    held = dict.fromkeys((tool.name for tool in offered), 0)

    async def written() -> str:
        writing = partial(_written, conversation, form, model, part, _ToolSchemas(offered, held, ignored))
        grammar = await model.lanes.run(rough_length(conversation.tools), writing)
        if len(grammar) > MAX_GRAMMAR_LEN:
            raise InvalidRequest("The tools are too large.", param="tools")
        await model.grammars.check(grammar, turn)
        return grammar

    try:
        return await written()
    except InvalidRequest as error:
        if form.tools is None:
            raise named(budget_param, error) from error
        if error.param is not None:
            raise
        await _hold_less(form.tools, _ToolSchemas(offered, held, ignored), model, turn)
    try:
        return await written()
    except InvalidRequest as error:
        raise named("tools", error) from error


class _ToolSchemas(NamedTuple):
    """The tools that the answer may call, and how far it is held to the schema of each."""

    offered: Sequence[OfferedTool]
    held: dict[str, int]  # by name: 0: to all that can be followed, 1: but for _HARD, 2: to names of parameters
    ignored: IgnoredFields | None

    def is_hint(self, tool: OfferedTool) -> bool:
        return self.ignored is not None and not tool.is_strict

    def arguments(self, tool: OfferedTool, form: ToolFormat) -> dict[str, Any]:
        """Return the schema for llguidance, and name what it leaves out. Raises InvalidRequest."""
        left_out: set[str] = set()
        try:
            schema = _arguments_schema(tool, form, self.held[tool.name], left_out if self.is_hint(tool) else None)
        except InvalidRequest as error:
            if not self.is_hint(tool) or self.held[tool.name] == _LEAST_HELD:
                raise named(tool.schema_path, error) from error
            self.held[tool.name] += 1
            return self.arguments(tool, form)
        for keyword in sorted(left_out):
            assert self.ignored is not None, "a hint where everything is followed"
            self.ignored.add(f"{tool.schema_path}.{keyword}" if _KEYWORD.fullmatch(keyword) else tool.schema_path)
        return schema


async def _hold_less(form: ToolFormat, schemas: _ToolSchemas, model: ChatModel, turn: TrialTurn) -> None:
    """Find the tools whose schemas cannot be followed, and hold the answer to less of them. Raises InvalidRequest."""
    for tool in schemas.offered:
        while schemas.held[tool.name] < _LEAST_HELD:
            try:
                arguments = schemas.arguments(tool, form)
                await model.grammars.check(serialize_alone({"json_schema": arguments}), turn)
                break
            except InvalidRequest as error:
                if not schemas.is_hint(tool):
                    raise named(tool.schema_path, error) from error
                schemas.held[tool.name] += 1


def _written(
    conversation: Conversation, form: OutputFormat, model: ChatModel, part: GrammarPart | None, schemas: _ToolSchemas
) -> str:
    as_literal = partial(_literal, model)
    tools: list[CallableTool] = []
    if form.tools is not None:
        arguments = ((tool.name, schemas.arguments(tool, form.tools)) for tool in schemas.offered)
        tools = [CallableTool(name, schema, text_parameters(schema)) for name, schema in arguments]
    if form.is_harmony:
        skeleton = _harmony_rules(conversation, form, as_literal, model, tools, has_part=part is not None)
    else:
        budget = conversation.thinking_budget
        answer, is_text = _answer(conversation, form.tools, part, as_literal)
        rules = [_TEXT, _GAP]
        thought = ""
        if form.reasoning is not None:
            gap = "" if is_text else "GAP?"
            thought = thought_symbols(form.thought_start, gap, is_bounded=budget is not None)
            rules.append(thought_rules(form.reasoning, as_literal, budget))
        if form.tools is not None:
            calls = call_rules(form.tools, tools, as_literal, is_parallel=conversation.has_parallel_calls)
            rules += [calls, lead_rules(form.tools, as_literal)] if conversation.tool_choice.mode == "auto" else [calls]
        skeleton = "\n".join([f"start: {thought} answer", f"answer: {answer}", *rules])
    return serialize(skeleton, {"content": part} if part is not None else {})


def _harmony_rules(
    conversation: Conversation,
    form: OutputFormat,
    as_literal: Literal,
    model: ChatModel,
    tools: Sequence[CallableTool],
    *,
    has_part: bool,
) -> str:
    if form.is_continued and conversation.tool_choice.mode == "required":
        raise InvalidRequest(
            "a call cannot go on with the last message: continue_final_message does not go with this tool_choice.",
            param="tool_choice",
        )
    ends_answer = model.tokenizer.control_token_ids(CALL) <= set(model.model.eos_token_ids)
    grammar = HarmonyGrammar(
        tools=tools,
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


def _arguments_schema(tool: OfferedTool, form: ToolFormat, held: int, left_out: set[str] | None) -> dict[str, Any]:
    """`left_out`: gets keywords that are not followed; None: the schema is no hint, and they are refused."""
    parameters, has_one_order = tool.parameters or {}, isinstance(form.call, ParameterCall)
    if left_out is None:
        schema = normalize_schema(_object_schema(parameters), has_one_order=has_one_order)
    elif held == _LEAST_HELD:
        properties = parameters.get("properties")
        names = [name for name in properties if is_parameter(name)] if isinstance(properties, dict) else []
        left_out.add("properties")
        named = {"type": "object", "properties": dict.fromkeys(names[:_MAX_NAMES], True)}
        schema = normalize_schema(named, has_one_order=has_one_order)
    else:
        without = _HARD if held else frozenset[str]()
        hint = _object_schema(_without_contradictions(parameters, left_out))
        schema = normalize_schema(hint, left_out=left_out, without=without, has_one_order=has_one_order)
    if isinstance(form.call, ParameterCall):
        if left_out is not None:
            left_out.update(name for name in schema if name not in OF_FUNCTIONS)
            schema = {name: value for name, value in schema.items() if name in OF_FUNCTIONS}
        check_parameters(schema)
    return schema


def _object_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("type", "object") != "object":
        raise InvalidRequest("the type must be 'object'", code="invalid_json_schema")
    has_others = any(name in parameters for name in _OPEN)
    return {"type": "object", "properties": {}, **({} if has_others else {"additionalProperties": False}), **parameters}


def _without_contradictions(parameters: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return a hint that is of an object, and requires listed properties alone."""
    hint = dict(parameters)
    if hint.get("type", "object") != "object":
        left_out.add("type")
        hint["type"] = "object"
    properties, required = hint.get("properties", {}), hint.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and not hint.keys() & set(_OPEN):
        hint["required"] = [name for name in required if name in properties]
    return hint


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

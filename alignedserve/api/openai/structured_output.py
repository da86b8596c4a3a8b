"""From the fields that constrain an answer to the grammar that workers decode it under."""

import asyncio

import orjson

from alignedserve.api.models.chat_model import ChatModel
from alignedserve.api.openai.schemas.constraints import Constraint, ConstraintFields, constraint_of
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import MAX_GRAMMAR_LEN
from alignedserve.runtime.grammar.constraints import part_of
from alignedserve.runtime.grammar.lark import GrammarPart, serialize_alone

_LONG_CONSTRAINT_BYTES = 4096


async def answer_part(fields: ConstraintFields, model: ChatModel, tenant: str = "") -> GrammarPart | None:
    """Return what the answer must match as a part of a grammar, checked; None: anything. Raises InvalidRequest."""
    constraint = constraint_of(fields)
    if constraint is None:
        return None
    try:
        part = await _read(constraint)
        grammar = serialize_alone(part)
        if len(grammar) > MAX_GRAMMAR_LEN:
            raise InvalidRequest("it is too long")
        await model.grammars.check(grammar, tenant)
    except InvalidRequest as error:
        raise constraint.refusal(error) from error
    return part


async def answer_grammar(fields: ConstraintFields, model: ChatModel, tenant: str = "") -> str:
    """Return the grammar of an answer that is the constraint alone; empty: anything. Raises InvalidRequest."""
    part = await answer_part(fields, model, tenant)
    return "" if part is None else serialize_alone(part)


async def _read(constraint: Constraint) -> GrammarPart:
    """Read the constraint; in a thread if it is long, so that streams continue meanwhile."""
    outputs = constraint.outputs
    texts = (outputs.json, outputs.regex, outputs.grammar, outputs.choice, outputs.structural_tag)
    if len(orjson.dumps(texts)) <= _LONG_CONSTRAINT_BYTES:
        return part_of(outputs)
    return await asyncio.to_thread(part_of, outputs)

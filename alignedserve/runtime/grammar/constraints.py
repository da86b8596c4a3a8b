"""What clients ask answers to match, by vLLM's names, and the part of a grammar that each becomes."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.compiler import CLIENT_RULES
from alignedserve.runtime.grammar.json_schema import FLEXIBLE_WHITESPACE, normalize_schema
from alignedserve.runtime.grammar.schema_keywords import MAX_EXPANDED_LEN, is_short_expanded

# One of `json_schema` (an object) and `lark_grammar` (a text).
GrammarPart = Mapping[str, Any]


def serialize(skeleton: str, parts: Mapping[str, GrammarPart]) -> str:
    """Return the grammar of a skeleton in llguidance's Lark, which refers to parts as `@name`.

    Example: serialize(f"start: THOUGHT {special_token([151668])} @answer\\nTHOUGHT: /(?s:.*)/", {"answer": part})
    """
    named = [{"name": name, **part} for name, part in parts.items()]
    return orjson.dumps({"grammars": [{"lark_grammar": skeleton}, *named]}).decode()


def serialize_alone(part: GrammarPart) -> str:
    return orjson.dumps({"grammars": [part]}).decode()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def literal(pieces: Sequence[tuple[str, int | None]]) -> str:
    return " ".join(quoted(text) if token_id is None else special_token([token_id]) for text, token_id in pieces)


def special_token(token_ids: Sequence[int]) -> str:
    return f"<[{','.join(map(str, token_ids))}]>"


def json_value(schema: Mapping[str, Any]) -> str:
    return f"%json {orjson.dumps(schema).decode()}"


def regular_expression(pattern: str) -> str:
    r"""Return the terminal for a regular expression; `\\d` and `\\w` are ASCII, as in ECMAScript."""
    return f"/{regex_to_lark(pattern, 'dw')}/"


MAX_TAGS = 128
_MAX_TEXT_LEN = 256
_TEXT = r"TEXT: /(.|\n)*/"
MAX_REGEX_LEN = 16 * 1024
MAX_GRAMMAR_TEXT_LEN = 64 * 1024
MAX_CHOICES = 1000
MAX_CHOICES_LEN = 64 * 1024
_MAX_WHITESPACE_LEN = 256
_NAMED = r"\[:\^?[a-z]+:\]"  # such as [:alpha:], within a class
_CLASS = re.compile(rf"\\.|\[\^?\]?((?:\\.|{_NAMED}|[^\]\\])*)\]", re.DOTALL)
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """One constraint on an answer: exactly one of the first six is set. Raises InvalidRequest naming the field."""

    json: Any = None  # a JSON schema, as an object or as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # all of the answer matches it
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # in llguidance's Lark, or in GBNF (recognised by `::=`)
    structural_tag: Any = None  # free text with tags that hold JSON, as an object or as JSON text
    disable_any_whitespace: bool = False  # of JSON: compact
    whitespace_pattern: str | None = None  # of JSON: a regular expression of what may stand between two tokens

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            raise InvalidRequest(f"exactly one of {', '.join(_KINDS)} must be given")
        is_json = self.kind in ("json", "json_object", "structural_tag")
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and not is_json:
            raise InvalidRequest("whitespace can be chosen for JSON only", param="whitespace_pattern")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequest("whitespace cannot be disabled and have a pattern", param="whitespace_pattern")
        whitespace = self.whitespace_pattern or ""
        if len(whitespace) > _MAX_WHITESPACE_LEN or not is_short_expanded(whitespace):
            raise InvalidRequest(f"is longer than {_MAX_WHITESPACE_LEN} characters", param="whitespace_pattern")

    @property
    def kind(self) -> str:
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) is not (False if name == "json_object" else None)]


def part_of(outputs: StructuredOutputs) -> GrammarPart:
    """Return the constraint as a part of a grammar. Raises InvalidRequest, whose `param` is a field of `outputs`."""
    kind = outputs.kind
    try:
        return _PARTS[kind](outputs)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=kind, code=error.code) from error


def _json_part(outputs: StructuredOutputs) -> GrammarPart:
    return {"json_schema": normalize_schema(_parsed(outputs.json), whitespace_pattern=_whitespace(outputs))}


def _json_object_part(outputs: StructuredOutputs) -> GrammarPart:
    return {"json_schema": normalize_schema({"type": "object"}, whitespace_pattern=_whitespace(outputs))}


def _regex_part(outputs: StructuredOutputs) -> GrammarPart:
    regex = outputs.regex or ""
    _require(0 < len(regex) <= MAX_REGEX_LEN, f"the regular expression must have 1 to {MAX_REGEX_LEN} characters")
    _require(is_short_expanded(regex), f"it has over {MAX_EXPANDED_LEN} characters with repetitions written out")
    _require(
        not _combines_classes(regex), "in a class of the regular expression '[', '&&', '--' and '~~' must be escaped"
    )
    return {"lark_grammar": f"start: ANSWER\nANSWER: {regular_expression(regex)}"}


def _combines_classes(regex: str) -> bool:
    bodies = (match[1] or "" for match in _CLASS.finditer(regex))
    return any(re.search(r"\[|&&|--|~~", re.sub(rf"\\.|{_NAMED}", "_", body, flags=re.DOTALL)) for body in bodies)


def _choice_part(outputs: StructuredOutputs) -> GrammarPart:
    _require(not isinstance(outputs.choice, str), "choices must be a list of texts")
    choices = list(outputs.choice or ())
    _require(0 < len(choices) <= MAX_CHOICES, f"there must be 1 to {MAX_CHOICES} choices")
    _require(all(isinstance(choice, str) and choice for choice in choices), "choices must be texts, none empty")
    _require(sum(map(len, choices)) <= MAX_CHOICES_LEN, f"the choices have more than {MAX_CHOICES_LEN} characters")
    return {"lark_grammar": f"start: ANSWER\nANSWER: {' | '.join(map(quoted, choices))}"}


def _grammar_part(outputs: StructuredOutputs) -> GrammarPart:
    text = outputs.grammar or ""
    _require(0 < len(text) <= MAX_GRAMMAR_TEXT_LEN, f"the grammar must have 1 to {MAX_GRAMMAR_TEXT_LEN} characters")
    try:
        return {"lark_grammar": f"{CLIENT_RULES}\n{any_to_lark(text)}"}
    except Exception as error:  # the library raises nothing more precise
        raise InvalidRequest("the grammar is not GBNF that can be read", code="invalid_grammar") from error


def _structural_tag_part(outputs: StructuredOutputs) -> GrammarPart:
    return structural_tag_part(_parsed(outputs.structural_tag), _whitespace(outputs))


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("it is not valid JSON", code="invalid_json_schema") from error


def _whitespace(outputs: StructuredOutputs) -> str | None:
    if outputs.disable_any_whitespace:
        return None
    return outputs.whitespace_pattern if outputs.whitespace_pattern is not None else FLEXIBLE_WHITESPACE


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidRequest(problem)


_PARTS: dict[str, Callable[[StructuredOutputs], GrammarPart]] = {
    "choice": _choice_part,
    "grammar": _grammar_part,
    "json": _json_part,
    "json_object": _json_object_part,
    "regex": _regex_part,
    "structural_tag": _structural_tag_part,
}


def structural_tag_part(wanted: Any, whitespace_pattern: str | None) -> GrammarPart:
    """Return the grammar of text with these tags. Raises InvalidRequest.

    A structural tag is free text in which a tag, once it is begun, holds JSON under its schema (vLLM's
    `structural_tag`):

        {"structures": [{"begin": "<city>", "schema": {...}, "end": "</city>"}], "triggers": ["<city"]}

    A trigger is a text that only begins of tags have in the answer: after it, the answer goes on as one of them."""
    _check(wanted)
    tags = [
        _tag(f"tag_{number}", tag, wanted["triggers"], whitespace_pattern)
        for number, tag in enumerate(wanted["structures"])
    ]
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    return {"lark_grammar": "\n".join([f"start: ({names})* rest", "rest: TEXT", _TEXT, *tags])}


def _tag(name: str, tag: dict[str, Any], triggers: list[str], whitespace_pattern: str | None) -> str:
    begin = tag["begin"]
    trigger = next((candidate for candidate in triggers if begin.startswith(candidate)), None)
    if trigger is None:
        raise InvalidRequest("every 'begin' must start with one of the triggers")
    rest = begin.removeprefix(trigger)
    value = json_value(normalize_schema(tag["schema"], whitespace_pattern=whitespace_pattern))
    body = " ".join([quoted(rest) if rest else "", value, quoted(tag["end"]) if tag["end"] else ""])
    return f"{name}_trigger[lazy]: TEXT {quoted(trigger)}\n{name}: {name}_trigger {body}"


def _check(wanted: Any) -> None:
    is_object = isinstance(wanted, dict) and wanted.keys() - {"type"} == {"structures", "triggers"}
    if not is_object or wanted.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequest("a structural tag has 'structures' and 'triggers', and nothing else")
    structures, triggers = wanted["structures"], wanted["triggers"]
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_TAGS:
        raise InvalidRequest(f"'structures' must be a list of 1 to {MAX_TAGS} tags")
    if not isinstance(triggers, list) or not triggers or not all(_is_text(trigger) and trigger for trigger in triggers):
        raise InvalidRequest(f"'triggers' must be a list of texts of 1 to {_MAX_TEXT_LEN} characters")
    for tag in structures:
        if not isinstance(tag, dict) or tag.keys() != {"begin", "schema", "end"}:
            raise InvalidRequest("each of 'structures' has 'begin', 'schema' and 'end', and nothing else")
        if not _is_text(tag["begin"]) or not _is_text(tag["end"]):
            raise InvalidRequest(f"'begin' and 'end' must be texts of at most {_MAX_TEXT_LEN} characters")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT_LEN

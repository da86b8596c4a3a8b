"""Structural tags: free text in which a tag, once it is begun, holds JSON under its schema. vLLM's `structural_tag`.

    {"structures": [{"begin": "<city>", "schema": {...}, "end": "</city>"}], "triggers": ["<city"]}

A trigger is a text that only begins of tags have in the answer: after it, the answer goes on as one of them.
"""

from typing import Any

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.json_schema import normalize_schema
from alignedserve.runtime.grammar.lark import GrammarPart, json_value, quoted

MAX_TAGS = 128
_MAX_TEXT_LEN = 256
_TEXT = r"TEXT: /(.|\n)*/"


def structural_tag_part(wanted: Any, whitespace_pattern: str | None) -> GrammarPart:
    """Return the grammar of text with these tags. Raises InvalidRequest."""
    _check(wanted)
    tags = [
        _tag(f"tag_{number}", tag, wanted["triggers"], whitespace_pattern)
        for number, tag in enumerate(wanted["structures"])
    ]
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    return {"lark_grammar": "\n".join([f"start: ({names})* rest", "rest: TEXT", _TEXT, *tags])}


def _tag(name: str, tag: dict[str, Any], triggers: list[str], whitespace_pattern: str | None) -> str:
    begin = tag["begin"]
    trigger = next((one for one in triggers if begin.startswith(one)), None)
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
    if not isinstance(triggers, list) or not triggers or not all(_is_text(one) and one for one in triggers):
        raise InvalidRequest(f"'triggers' must be a list of texts of 1 to {_MAX_TEXT_LEN} characters")
    for tag in structures:
        if not isinstance(tag, dict) or tag.keys() != {"begin", "schema", "end"}:
            raise InvalidRequest("each of 'structures' has 'begin', 'schema' and 'end', and nothing else")
        if not _is_text(tag["begin"]) or not _is_text(tag["end"]):
            raise InvalidRequest(f"'begin' and 'end' must be texts of at most {_MAX_TEXT_LEN} characters")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT_LEN

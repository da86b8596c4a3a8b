"""Arguments as parameters between tags, each a text or JSON by its schema: the forms of Qwen3-Coder and GLM-4.5."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """What a family writes around names and values; `<F>f<FE><P>p<PE>value<VE></F>` of the fields in their order."""

    function: str
    function_name_end: str
    parameter: str
    parameter_name_end: str
    value_end: str
    function_end: str

    def marked(self, marked: Callable[[str], str]) -> "ParameterTags":
        """Return the tags as an answer's text has them; `marked` writes control tokens so."""
        return ParameterTags(
            marked(self.function),
            marked(self.function_name_end),
            marked(self.parameter),
            marked(self.parameter_name_end),
            marked(self.value_end),
            marked(self.function_end),
        )


QWEN3_CODER = ParameterTags("<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>")
GLM45 = ParameterTags("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
_VALUE_ENDS = (QWEN3_CODER.value_end.strip(), GLM45.value_end.strip())

_OF_TEXT = frozenset({"type", "enum", "const", "description", "title", "default", "examples", "deprecated"})
_OF_FUNCTIONS = _OF_TEXT | {"properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}
_NAME = re.compile(r"[^<>\n]+")

TextParameters = Mapping[str, tuple[str, ...] | None]  # by name: the texts that there are; None: any text


def text_parameters(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...] | None]:
    """Return the parameters of a function that are written as plain text; all others are written as JSON."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    found: dict[str, tuple[str, ...] | None] = {}
    for name, of_one in properties.items():
        if isinstance(of_one, Mapping) and _OF_TEXT.issuperset(of_one):
            texts = of_one.get("enum", [of_one["const"]] if "const" in of_one else None)
            if texts is None and of_one.get("type") == "string":
                found[name] = None
            elif isinstance(texts, list) and texts and all(_is_plain(text) for text in texts):
                found[name] = tuple(texts)
    return found


def check_parameters(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties", {})
    unknown = [name for name in schema if name not in _OF_FUNCTIONS]
    unknown += [name for name in schema.get("required", ()) if name not in properties]
    if unknown or not all(_NAME.fullmatch(name) for name in properties):
        raise InvalidRequest(
            "in the way this model writes calls, parameters must be an object of named properties",
            code="invalid_json_schema",
        )


def parameters_text(arguments: Mapping[str, Any], tags: ParameterTags) -> str:
    written = [json.dumps(value, ensure_ascii=False) for value in arguments.values()]
    pairs = zip(arguments, written, strict=True)
    return "".join(f"{tags.parameter}{name}{tags.parameter_name_end}{value}{tags.value_end}" for name, value in pairs)


def _is_plain(text: Any) -> bool:
    return isinstance(text, str) and not any(end in text for end in _VALUE_ENDS)

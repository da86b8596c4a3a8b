"""Puts grammars together: the text of a skeleton in llguidance's Lark, and named parts that it refers to as `@name`.

    serialize(f"start: THOUGHT {special_token([151668])} @answer\\nTHOUGHT: /(?s:.*)/", {"answer": part})

What is free text, what a special token and what a constrained part is the skeleton's to say; a part is one constraint,
whatever a client wrote it as.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from llguidance import regex_to_lark

# One of `json_schema` (an object) and `lark_grammar` (a text).
GrammarPart = Mapping[str, Any]


def serialize(skeleton: str, parts: Mapping[str, GrammarPart]) -> str:
    """Return the grammar whose start rule is the skeleton's."""
    named = [{"name": name, **part} for name, part in parts.items()]
    return orjson.dumps({"grammars": [{"lark_grammar": skeleton}, *named]}).decode()


def serialize_alone(part: GrammarPart) -> str:
    """Return the grammar of an answer that is this part, from its first token to its last."""
    return orjson.dumps({"grammars": [part]}).decode()


def quoted(text: str) -> str:
    """Return a text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def literal(pieces: Sequence[tuple[str, int | None]]) -> str:
    """Return a text as literals and special tokens, each piece with the id of the token that it is, if any."""
    return " ".join(quoted(text) if token_id is None else special_token([token_id]) for text, token_id in pieces)


def special_token(token_ids: Sequence[int]) -> str:
    return f"<[{','.join(map(str, token_ids))}]>"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the symbol for a JSON value of a normalized schema."""
    return f"%json {orjson.dumps(schema).decode()}"


def regular_expression(pattern: str) -> str:
    r"""Return the terminal for a regular expression; `\\d` and `\\w` are ASCII, as in ECMAScript."""
    return f"/{regex_to_lark(pattern, 'dw')}/"

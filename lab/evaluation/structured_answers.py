"""Answers of the demo that are held to a JSON schema, and their check. Pure.

The check is written out, and knows nothing of grammars: what they allow is what it judges.
"""

import json
from typing import Any

from alignedserve.client.openai_client import CompletionApi, CompletionCall
from lab.evaluation.pocket_calls import CONTEXT_LEN, TEMPLATE_LEN

STRUCTURED_EVERY = 4  # requests of the trace
MAX_ANSWER_LEN = 256  # tokens: more than the longest answer under the schema has
MAX_STRUCTURED_PROMPT_LEN = CONTEXT_LEN - TEMPLATE_LEN - MAX_ANSWER_LEN

_MAX_NUMBER = 999
_MIN_NUMBERS, _MAX_NUMBERS = 24, 40  # long enough to be interrupted
_KINDS = ("table", "document", "count")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": list(_KINDS)},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": _MAX_NUMBER},
            "minItems": _MIN_NUMBERS,
            "maxItems": _MAX_NUMBERS,
        },
        "is_complete": {"type": "boolean"},
    },
    "required": ["kind", "numbers", "is_complete"],
    "additionalProperties": False,
}


def structured_call(prompt: str, model: str, seed: int) -> CompletionCall:
    """Return the prompt as a chat completion whose answer is held to the schema, sampled with this seed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "seed": seed,
        "max_tokens": MAX_ANSWER_LEN,
        "logprobs": True,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    }
    return CompletionCall(CompletionApi.CHAT, body)


def is_valid_answer(text: str) -> bool:
    """Return whether the text is JSON as SCHEMA describes it."""
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    if not isinstance(answer, dict) or answer.keys() != SCHEMA["properties"].keys():
        return False
    numbers = answer["numbers"]
    is_list = isinstance(numbers, list) and _MIN_NUMBERS <= len(numbers) <= _MAX_NUMBERS
    in_range = is_list and all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers)
    return in_range and answer["kind"] in _KINDS and isinstance(answer["is_complete"], bool)

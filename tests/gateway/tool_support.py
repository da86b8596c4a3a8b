"""Models whose templates have the shape of those of families with tools and thoughts, as small as can be."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from alignedserve.gateway.model_card import ModelCard
from tests.gateway.support import EOS, write_tokenizer

_HEAD = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
)
_TURN = "<|{{ message.role }}|>{{ message.content }}"
HERMES = (
    _HEAD + "{% for message in messages %}" + _TURN + "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MISTRAL = (
    _HEAD + "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
    "{{ call.function | tojson }}{{ call.id }}{% endfor %}]{% else %}" + _TURN + "{{ message.tool_call_id }}{% endif %}"
    "<|end|>{% endfor %}<|assistant|>"
)
# As DeepSeek's: arguments as text, and calls only where the content is null.
TEXT_ARGUMENTS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.content is none %}{% for call in message.tool_calls %}<tool_call>{{ call.function.name + ' ' + "
    "call.function.arguments }}{% endfor %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
THINKING = HERMES + ("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}")
OPENED = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "<|assistant|><think>\n"
)
LEVELS = HERMES + "{{ reasoning_effort }}"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|system|>\n"
    "named SmolLM, of a test<|end|>{% endif %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>"
)


@cache
def model_with(template: str, *control_tokens: str, **fields: Any) -> ModelCard:
    """Return a model with this template and these control tokens beside the usual ones."""
    folder = Path(mkdtemp(prefix="alignedserve-test-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tokenizer(folder, template, control_tokens)
    return ModelCard("tiny", folder, 2048, (EOS,), created=1_700_000_000, **fields)


def function(name: str = "get_weather", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"city": {"type": "string"}}, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


def called(call_id: str = "call_1", name: str = "get_weather", arguments: str = '{"city": "Oslo"}') -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(call_id: str = "call_1", content: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}

"""Models whose templates have the shape of those of families with tools and thoughts, as small as can be."""

import atexit
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from llguidance import LLMatcher

from alignedserve.api.models.model_services import ModelCard
from alignedserve.core.request import Request
from alignedserve.runtime.grammar.compiler import PARSER_LIMITS
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from tests.gateway.support import EOS, gateway, write_tokenizer
from tests.harnesses.scripted_backend import Script

_HEAD = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
)
_TURN = "<|{{ message.role }}|>{{ message.content }}"
HERMES = (
    _HEAD + "{% for message in messages %}" + _TURN + "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = "{% for message in messages %}" + _TURN + "<|end|>{% endfor %}<|assistant|>"  # knows no tools
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
# As gpt-oss's: one call in a message, thoughts by another name, a description taken for granted.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if messages[0].role == 'system' %}<|start|>developer<|message|>{{ messages[0].content }}<|end|>{% endif %}"
    "{% for tool in tools or [] %}// {{ tool.function.description + tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}"
    "<|call|>{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|system|>\n"
    "named SmolLM, of a test<|end|>{% endif %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
USER = {"role": "user", "content": "hello"}


@cache
def model_with(template: str, *control_tokens: str, **fields: Any) -> ModelCard:
    """Return a model with this template and these control tokens beside the usual ones."""
    folder = Path(mkdtemp(prefix="alignedserve-test-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tokenizer(folder, template, control_tokens)
    return ModelCard("tiny", folder, 2048, (EOS,), created=1_700_000_000, **fields)


@cache
def harmony_model() -> ModelCard:
    """Return a model that answers in channels, and ends by `<|return|>` or `<|call|>`."""
    model = model_with(HARMONY, *_HARMONY_TOKENS)
    tokenizer = model.load_tokenizer()
    ends = [*tokenizer.control_token_ids("<|return|>"), *tokenizer.control_token_ids("<|call|>")]
    return replace(model, eos_token_ids=tuple(ends))


def function(name: str = "get_weather", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"city": {"type": "string"}}, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


def called(call_id: str = "call_1", name: str = "get_weather", arguments: str = '{"city": "Oslo"}') -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(call_id: str = "call_1", content: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def saying(model: ModelCard, text: str, **fields: Any) -> Callable[[Request], Script]:
    """Return a script that says this in the model's tokens, control tokens included, and ends."""
    script = Script((*model.load_tokenizer().encode(text, add_special_tokens=False), model.eos_token_ids[0]), **fields)
    return lambda _: script


def prompt_of(model: ModelCard, request: Request) -> str:
    """Return the text of a request's prompt, control tokens included."""
    return model.load_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)


def accepts(model: ModelCard, grammar: str, text: str) -> bool:
    """Return whether the grammar allows this answer from its first token to its last."""
    tokenizer = model.load_tokenizer()
    vocabulary = grammar_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=model.eos_token_ids)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=PARSER_LIMITS)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


async def choice_of(model: ModelCard, text: str, **fields: Any) -> Any:
    """Return the choice of a whole chat whose model says this."""
    async with gateway(saying(model, text), model=model) as served:
        response = await served.chat(**fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def grammar_of(model: ModelCard, **fields: Any) -> str:
    """Return the grammar that a chat with these fields is decoded under."""
    async with gateway(saying(model, "hi"), model=model) as served:
        response = await served.chat(**fields)
        assert response.status_code == 200, response.text
        return served.backend.submitted[0].sampling.grammar

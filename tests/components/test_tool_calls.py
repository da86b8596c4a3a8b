"""The pocket model, which was never taught tools, calls them: its answer is decoded under their grammar."""

import json
from typing import Any

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.tools.formats import FORMATS
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from tests.gateway.support import gateway
from tests.gateway.tool_support import function

pytestmark = pytest.mark.slow

TOOL = function("get_weather", city={"type": "string", "maxLength": 12}, days={"type": "integer", "maximum": 9})

TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[-1].content }}"  # knows tools


@pytest.mark.parametrize("name", ["hermes", "smollm2", "kimi_k2", "glm45"])
async def test_calls_match_their_schema(name: str) -> None:
    end_tokens = tuple(Tokenizer.load(pocket_folder()).control_token_ids("<|end|>"))
    template = None if FORMATS[name].prompt is not None else TEMPLATE
    card = ModelCard("pocket", pocket_folder(), 2048, end_tokens, tool_format=name, chat_template=template)
    async with gateway(model=card) as served:
        chosen = {"type": "function", "function": {"name": "get_weather"}}
        fields: dict[str, Any] = {
            "model": "pocket",
            "tools": [TOOL],
            "tool_choice": chosen,
            "parallel_tool_calls": False,
        }
        assert (await served.chat(**fields)).status_code == 200
        grammar = served.backend.submitted[0].sampling.grammar
    llm = LLM("pocket", max_running=4)
    try:
        sampling = SamplingParams(max_tokens=300, temperature=1.0, seed=5, grammar=grammar)
        outputs = llm.chat(["weather in Oslo", "spell otter"], sampling)
    finally:
        llm.close()
    for output in outputs:
        parser = OutputFormat(tools=FORMATS[name]).parser(card.load_tokenizer())
        assert parser is not None
        calls = [call for run in parser.push(output.text) for call in run.tool_calls]
        arguments = json.loads("".join(call.arguments for call in calls))
        assert [call.name for call in calls if call.name is not None] == ["get_weather"]
        assert set(arguments) == {"city", "days"}
        assert len(arguments["city"]) <= 12
        assert arguments["days"] <= 9

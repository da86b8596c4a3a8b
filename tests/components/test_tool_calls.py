"""The pocket model, which was never taught tools, calls them: its answer is decoded under their grammar."""

import json

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.openai.output_parser import OutputFormat
from alignedserve.gateway.tools.formats import FORMATS
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.runtime.model.tokenizer import Tokenizer
from tests.gateway.support import gateway
from tests.gateway.tool_support import function

TOOL = function("get_weather", city={"type": "string", "maxLength": 12}, days={"type": "integer", "maximum": 9})


@pytest.mark.parametrize("name", ["hermes", "smollm2"])
async def test_calls_match_their_schema(name: str) -> None:
    end_tokens = tuple(Tokenizer.load(pocket_folder()).control_token_ids("<|end|>"))
    card = ModelCard("pocket", pocket_folder(), 2048, end_tokens, tool_format=name)
    async with gateway(model=card) as served:
        chosen = {"type": "function", "function": {"name": "get_weather"}}
        fields = {"model": "pocket", "tools": [TOOL], "tool_choice": chosen, "parallel_tool_calls": False}
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
        (calls,) = [run.tool_calls for run in parser.push(output.text) if run.tool_calls]
        arguments = json.loads(calls[0].arguments)
        assert calls[0].name == "get_weather"
        assert set(arguments) == {"city", "days"}
        assert len(arguments["city"]) <= 12
        assert arguments["days"] <= 9

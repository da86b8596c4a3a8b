"""OpenAI's Agents SDK: an agent's run, whole and streamed, over the API that the argument names. Prints JSON."""

import asyncio
import json
import os
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def main(api: str) -> None:
    """Run one agent twice."""
    set_tracing_disabled(True)
    model = MODELS[api](model=os.environ["MODEL"], openai_client=AsyncOpenAI())
    agent = Agent(name="Speller", model=model, model_settings=ModelSettings(temperature=0, max_tokens=24))
    whole = await Runner.run(agent, "Spell cat.")
    streamed = Runner.run_streamed(agent, "Spell cat.")
    kinds = [event.type async for event in streamed.stream_events()]
    told = {
        "whole": whole.final_output,
        "streamed": streamed.final_output,
        "num_events": len(kinds),
        "tokens": whole.context_wrapper.usage.total_tokens,
    }
    print(json.dumps(told))


asyncio.run(main(sys.argv[1]))

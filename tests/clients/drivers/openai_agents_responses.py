"""OpenAI's Agents SDK over the Responses API: an agent's run, whole and streamed. Prints one JSON object."""

import asyncio
import json
import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI


async def main() -> None:
    """Run one agent twice."""
    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model=os.environ["MODEL"], openai_client=AsyncOpenAI())
    agent = Agent(name="Speller", model=model, model_settings=ModelSettings(temperature=0, max_tokens=24))
    whole = await Runner.run(agent, "Spell cat.")
    streamed = Runner.run_streamed(agent, "Spell cat.")
    kinds = [event.type async for event in streamed.stream_events()]
    told = {"whole": whole.final_output, "streamed": streamed.final_output, "num_events": len(kinds)}
    print(json.dumps(told))


asyncio.run(main())

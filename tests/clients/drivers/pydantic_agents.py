"""pydantic-ai: text, a stream, and objects, by chat completions and by Messages. Prints one JSON object."""

import asyncio
import json
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(temperature=0.0, max_tokens=200)
MODELS = {"chat": OpenAIChatModel, "messages": AnthropicModel}


class Animal(BaseModel):
    """An animal."""

    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


async def drive(kind: str) -> dict[str, object]:
    """Run three agents over one API."""
    model = MODELS[kind](os.environ["MODEL"])
    plain = Agent(model, model_settings=SETTINGS)
    whole = await plain.run("Spell cat.")
    async with plain.run_stream("Spell cat.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    told: dict[str, object] = {"whole": whole.output, "streamed": "".join(pieces)}
    by_tool = await Agent(model, output_type=Animal, model_settings=SETTINGS).run("A cat.")
    told["by_tool"] = sorted(by_tool.output.model_dump())
    if kind != "messages":  # its profile knows no schemas for names that are not Anthropic's
        by_schema = await Agent(model, output_type=NativeOutput(Animal), model_settings=SETTINGS).run("A cat.")
        told["by_schema"] = sorted(by_schema.output.model_dump())
    return told


async def main() -> None:
    """Drive every API."""
    print(json.dumps({kind: await drive(kind) for kind in MODELS}))


asyncio.run(main())

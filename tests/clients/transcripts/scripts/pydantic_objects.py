"""Text by chat, an object by a schema, and one by a tool over Messages."""

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


# --- shown
settings = {"temperature": 0.0, "max_tokens": 200}
chat, messages = OpenAIChatModel("pocket"), AnthropicModel("pocket")
print("text:", Agent(chat, model_settings=settings).run_sync("Spell cat.").output)
for model, form in ((chat, NativeOutput(Animal)), (messages, Animal)):
    agent = Agent(model, output_type=form, model_settings=settings)
    print("object:", repr(agent.run_sync("A cat.").output))

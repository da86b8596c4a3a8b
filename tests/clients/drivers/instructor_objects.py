"""instructor: an object by a tool call, strict and not. Prints one JSON object."""

import json
import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


def ask(mode: instructor.Mode) -> dict[str, object]:
    """Return one object that is asked for in this way."""
    client = instructor.from_openai(OpenAI(), mode=mode)
    asked = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Spell cat."}], "temperature": 0}
    return client.create(response_model=Animal, max_retries=0, max_tokens=200, **asked).model_dump()


modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT)
print(json.dumps({mode.value: ask(mode) for mode in modes}))

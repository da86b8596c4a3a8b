"""LangChain with tools, with structured output, with embeddings, and over Anthropic's API. Prints one JSON object."""

import json
import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

MODEL = os.environ["MODEL"]


class Animal(BaseModel):
    """An animal."""

    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


@tool
def spell(word: Literal["cat", "dog"]) -> str:
    """Spell a word."""
    return " ".join(word)


chat = ChatOpenAI(model=MODEL, temperature=0, max_tokens=200)
asked = [HumanMessage("Spell cat.")]
calling = chat.bind_tools([spell], tool_choice="spell").invoke(asked)
call = calling.tool_calls[0]
result = ToolMessage(spell.invoke({"word": "cat"}), tool_call_id=call["id"])
answered = chat.bind_tools([spell], tool_choice="none").invoke([*asked, calling, result])
forms = {
    method: chat.with_structured_output(Animal, method=method).invoke("A cat.").model_dump()
    for method in ("json_schema", "function_calling")
}
streamed = list(chat.with_structured_output(Animal, method="json_schema").stream("A dog."))
vectors = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_documents(["cat", "dog", "cat"])
messages = ChatAnthropic(model=MODEL, temperature=0, max_tokens=24)
told = {
    "call": [call["name"], sorted(call["args"]), type(call["args"]["word"]).__name__],
    "answered": isinstance(answered.content, str),
    "forms": forms,
    "streamed": streamed[-1].model_dump(),
    "vectors": [len(vectors), len(vectors[0]), vectors[0] == vectors[2], vectors[0] == vectors[1]],
    "anthropic": messages.invoke("Spell cat.").content,
    "anthropic_streamed": "".join(
        part.content for part in messages.stream("Spell cat.") if isinstance(part.content, str)
    ),
}
print(json.dumps(told))

"""A tool, an object, and a stream."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: Literal[2, 4]


# --- shown
@tool
def spell(word: Literal["cat", "dog"]) -> str:
    """Spell a word."""
    return " ".join(word)


chat = ChatOpenAI(model="pocket", temperature=0, max_tokens=200)
call = chat.bind_tools([spell], tool_choice="spell").invoke("Spell cat.").tool_calls[0]
print("call:", call["name"], call["args"], "->", spell.invoke(call["args"]))
print("object:", repr(chat.with_structured_output(Animal, method="json_schema").invoke("A cat.")))
print("stream:", [piece.content for piece in chat.stream("Spell cat.") if piece.content])

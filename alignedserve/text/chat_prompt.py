"""What a chat template is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for a model's chat template, and what the template shall make of it."""

    messages: Sequence[Message]  # in OpenAI's shape; arguments of calls are objects, not text
    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template
    add_generation_prompt: bool = True  # the prompt ends where an answer begins
    continue_final_message: bool = False  # the last message is left open, and no answer begins
    picture_mark: str = ""  # what the template writes for each picture
    picture_texts: tuple[str, ...] = ()  # what is put there for each of them
    param: str = "messages"  # the client's field that errors name

    @property
    def begins_answer(self) -> bool:
        """Return whether the template writes the beginning of the assistant's answer."""
        return self.add_generation_prompt and not self.continue_final_message

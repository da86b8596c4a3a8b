"""Messages of a conversation as clients may send them; `conversation` checks what one message cannot know alone."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag

from alignedserve.api.schema import Schema

MAX_PARTS = 1024
MAX_CALLS = 128
MAX_CALL_ID_LEN = 256
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,128}$"

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_LEN)]


class TextPart(Schema):
    """One text part of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # without effect: see Hints


class ImageUrl(Schema):
    """A picture as a data URL, or where it is. `detail` is a hint without effect: each model has one way of seeing."""

    url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


class ImagePart(Schema):
    """One picture of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: dict[str, Any] | None = None  # without effect: see Hints


def _kind_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "image-part" if kind == "image_url" else "text-part"  # no identifiers: errors leave them out


Part = Annotated[
    Annotated[TextPart, Tag("text-part")] | Annotated[ImagePart, Tag("image-part")], Discriminator(_kind_of)
]


class FunctionCall(Schema):
    """The function that an assistant called, and its arguments as JSON."""

    name: FunctionName
    arguments: str


class ToolCall(Schema):
    """One call in an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Schema):
    """One message of a conversation. Null fields are unset."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS), FailFast()] = Field(default_factory=list)
    reasoning_content: str | None = None  # of an assistant
    reasoning: str | None = None  # another name of reasoning_content
    tool_call_id: CallId | None = None  # of a tool's result
    name: str | None = Field(None, max_length=64)  # of the participant; templates may show it
    function_call: FunctionCall | None = None  # of an assistant: what tool_calls replaced

    @property
    def text(self) -> str:
        """Return the content as one text: parts become lines, and pictures are left out."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def has_pictures(self) -> bool:
        return isinstance(self.content, list) and any(isinstance(part, ImagePart) for part in self.content)

    @property
    def thought(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def fields_of_other_roles(self) -> list[str]:
        """Return the set fields that a message of this role does not have."""
        own: dict[str, tuple[str, ...]] = {
            "assistant": ("tool_calls", "function_call", "reasoning_content", "reasoning"),
            "tool": ("tool_call_id",),
        }
        every: dict[str, Any] = {name: getattr(self, name) for names in own.values() for name in names}
        return [name for name, value in every.items() if value and name not in own.get(self.role, ())]

"""What clients may send. Types are checked here; ranges of sampling fields by SamplingParams, which names the field."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

MAX_STOP_STRING_LEN = 1024
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LEN)]
TokenIdList = Annotated[list[StrictInt], Field(min_length=1)]
Tier = Literal["auto", "default", "priority", "fast", "flex"]


class Schema(BaseModel):
    """Strict: no coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Schema):
    """How a stream ends."""

    include_usage: bool | None = None


class GenerationFields(Schema):
    """Fields of chat completions and completions alike. Unset means OpenAI's default."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    stop: StopString | list[StopString] = Field(default_factory=list)
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    max_tokens: int | None = Field(None, ge=0)
    service_tier: Tier = "auto"
    # Extensions, by the names that other open servers use.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    priority: int | None = Field(None, ge=-1000, le=1000)  # smaller goes first; by service_tier when unset
    # Hints about the end user; they never change an answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings, in whichever form they were sent."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class TextPart(Schema):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Schema):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    def as_template_message(self) -> dict[str, str]:
        """What chat templates know: `developer` is the newer name of `system`, parts are lines of one text."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": role, "content": content}


class ChatCompletionRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: (
        StrictStr
        | Annotated[list[StrictStr], Field(min_length=1)]
        | TokenIdList
        | Annotated[list[TokenIdList], Field(min_length=1)]
    )
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)


class TokenizeRequest(Schema):
    """POST /tokenize: a text, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]

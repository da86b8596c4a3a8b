"""Bodies that clients may send. SamplingParams checks the ranges of sampling fields, naming the field."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, PlainValidator

from alignedserve.api.openai.schemas.constraints import ConstraintFields
from alignedserve.api.openai.schemas.messages import ChatMessage
from alignedserve.api.openai.schemas.tools import (
    FunctionList,
    ToolChoice,
    ToolList,
    parse_function_call,
    parse_tool_choice,
)
from alignedserve.api.schema import Metadata, Priority, Schema
from alignedserve.core.request import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS

MAX_STOP_STRING_LEN = 1024
MAX_TEMPLATE_VARIABLES = 32
MAX_CACHE_SALT_LEN = 256
MAX_BAD_WORDS = 256
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LEN)]
TokenIdList = Annotated[list[int], FailFast()]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()]
AllowedTokenIds = Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS), FailFast()]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS_ENTRIES)]
PromptForms = str | list[str] | list[int] | list[list[int]]
PROMPT_FORMS = "must be a string, a list of strings, a list of token ids or a list of such lists, none empty"
# Scalars: a template could not be kept from taking time over more.
TemplateVariable = str | int | float | bool | None
TemplateVariables = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], TemplateVariable],
    Field(max_length=MAX_TEMPLATE_VARIABLES),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTierName = Literal["auto", "default", "priority", "fast", "flex"]


class Prediction(Schema):
    """The answer that the client expects; other servers generate faster where it is right."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class PromptCacheOptions(Schema):
    """How a prompt is cached. Here every prompt is, for as long as there is space."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class Hints(Schema):
    """Fields about the end user, about what to keep, and about how to be fast or brief."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata = Field(default_factory=dict)
    store: bool = False  # chat completions are never stored
    prompt_cache_key: str | None = None  # the prefix cache finds equal beginnings by itself
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a wish that only models trained for it know


class StreamOptions(Schema):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: the usage so far in every chunk, as vLLM has it
    include_obfuscation: bool | None = None  # without effect: chunks are not padded


class GenerationFields(ConstraintFields, Hints):
    """Fields of chat completions and completions alike. Unset means OpenAI's default; of sampling, the model's."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    stop: Annotated[list[StopString], FailFast()] = Field(default_factory=list)  # one string is sent as itself as well
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    temperature: float | None = None  # None: as the model's makers say, as of the next and of three below
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    max_tokens: int | None = Field(None, ge=0)
    service_tier: ServiceTierName = "auto"
    # Extensions, by the names that other open servers use.
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)  # 0 and -1: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    allowed_token_ids: AllowedTokenIds = Field(default_factory=list)  # no other is chosen; empty: every token may be
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] = Field(default_factory=list)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_tokens_as_token_ids: bool = False  # tokens of log-probabilities read `token_id:N`
    include_stop_str_in_output: bool = False  # and the end token, where it has text
    skip_special_tokens: bool = True  # in the text of the answer
    spaces_between_special_tokens: bool = True  # without effect: tokens are decoded as they are
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # only the last ones are read; -1: as many as fit
    priority: Priority | None = None  # by service_tier when unset
    keep_alive: str | int | float | None = None  # how long the model stays in memory afterwards, as Ollama has it
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LEN)  # shares prefixes with equal ones

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def has_continuous_usage(self) -> bool:
        options = self.stream_options
        return self.includes_usage and options is not None and options.continuous_usage_stats is True


class ConversationFields(Schema):
    """Fields that become the prompt of a chat."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(default_factory=list)
    tools: ToolList = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, PlainValidator(parse_tool_choice)] = ToolChoice()
    functions: FunctionList = Field(default_factory=list)  # what tools replaced; `functions` translates them
    function_call: Annotated[ToolChoice | None, PlainValidator(parse_function_call)] = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool = True  # an extension, as the next: the prompt ends where an answer begins
    continue_final_message: bool = False  # the answer goes on with the last message, whose turn is not ended
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)  # an extension: variables of the template


class ChatCompletionRequest(GenerationFields, ConversationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool = True
    thinking_token_budget: int | None = Field(None, ge=0)  # an extension: tokens of the thought


def checked_prompt(prompt: Any) -> PromptForms:
    """Return the prompt if its form is one of PROMPT_FORMS.

    Checked by hand: a union would try every form on every item, and report every item of every form. Raises
    ValueError.
    """
    items = prompt if isinstance(prompt, list) else [prompt]
    kind = type(items[0]) if items else None
    is_uniform = all(type(item) is kind for item in items)
    if kind is list and is_uniform and all(item and all(type(inner) is int for inner in item) for item in items):
        return prompt  # type: ignore[no-any-return]
    if is_uniform and (kind is str or (kind is int and isinstance(prompt, list))):
        return prompt  # type: ignore[no-any-return]
    raise ValueError(PROMPT_FORMS)


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[PromptForms, PlainValidator(checked_prompt)]
    echo: bool = False
    add_special_tokens: bool = True  # an extension: the begin token before texts
    logprobs: int | None = Field(None, ge=0, le=20)


class TokenizeRequest(ConversationFields):
    """POST /tokenize: a text, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIdList

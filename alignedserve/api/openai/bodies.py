"""Bodies that clients may send. SamplingParams checks the ranges of sampling fields, naming the field."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, FailFast, Field, PlainValidator, Tag

from alignedserve.api.conversation import (
    FUNCTION_NAME,
    MAX_CALL_ID_LEN,
    MAX_CALLS,
    MAX_PARTS,
    MAX_TOOLS,
    Constraint,
    ToolChoice,
)
from alignedserve.api.errors import named
from alignedserve.api.schema import Metadata, Priority, Schema
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS
from alignedserve.runtime.grammar.constraints import StructuredOutputs

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
    """A called function with its arguments as JSON."""

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
        names_by_role: dict[str, tuple[str, ...]] = {
            "assistant": ("tool_calls", "function_call", "reasoning_content", "reasoning"),
            "tool": ("tool_call_id",),
        }
        every: dict[str, Any] = {name: getattr(self, name) for names in names_by_role.values() for name in names}
        return [name for name, value in every.items() if value and name not in names_by_role.get(self.role, ())]


_MODES = ("none", "auto", "required")
TOOL_CHOICE_FORMS = (
    "must be 'none', 'auto', 'required', {type: 'function', function: {name}} or "
    "{type: 'allowed_tools', allowed_tools: {mode, tools}}"
)


class FunctionDefinition(Schema):
    """A function of the client. Calls are held to `parameters`: as far as they can be, or `strict` to all of them."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; unset: no parameters
    strict: bool | None = None


class ChatTool(Schema):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition


FunctionList = Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS), FailFast()]
ToolList = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS), FailFast()]


def parse_tool_choice(choice: Any) -> ToolChoice:
    """Return the choice in any of its forms. Raises ValueError saying which there are."""
    match choice:
        case str() if choice in _MODES:
            return ToolChoice(choice)  # type: ignore[arg-type]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            if len(tools) <= MAX_TOOLS:
                unknown = _unknown_members(choice, allowed_tools=("mode", "tools"))
                return ToolChoice(mode, tuple(_name(tool) for tool in tools), unknown)
            raise ValueError(TOOL_CHOICE_FORMS)
        case _:
            return ToolChoice("required", (_name(choice),), _unknown_members(choice, function=("name",)))


def parse_function_call(choice: Any) -> ToolChoice:
    """Return the choice among functions, which tools replaced. Raises ValueError saying which there are."""
    match choice:
        case "none" | "auto":
            return ToolChoice(choice)
        case {"name": str(name)}:
            unknown = tuple((member,) for member, value in choice.items() if member != "name" and value is not None)
            return ToolChoice("required", (name,), unknown)
    raise ValueError("must be 'none', 'auto' or {name}")


def _name(choice: Any) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ValueError(TOOL_CHOICE_FORMS)


def _unknown_members(choice: dict[str, Any], **known: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    ((inner, names),) = known.items()
    outside = [(name,) for name, value in choice.items() if name not in ("type", inner) and value is not None]
    inside = [(inner, name) for name, value in choice[inner].items() if name not in names and value is not None]
    return (*outside, *inside)


ChoiceList = list[Any]  # of texts, which StructuredOutputs checks
SchemaForms = dict[str, Any] | str | bool


class _ConstraintSchema(Schema):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class JsonSchemaFormat(_ConstraintSchema):
    """`json_schema` of a response format. Strict or not, every answer is held to the schema."""

    name: str = Field("", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_ConstraintSchema):
    """OpenAI's `response_format`, and vLLM's type of it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None  # of a structural tag, which is vLLM's
    triggers: list[Any] | None = None


class StructuredOutputsField(_ConstraintSchema):
    """vLLM's `structured_outputs`."""

    json_: SchemaForms | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: ChoiceList | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class ConstraintFields(Schema):
    """Fields that constrain an answer; at most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: SchemaForms | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    allow_blank_runs: bool = False  # an extension: any number of blanks in a row, where the constraint has them

    @property
    def has_free_blanks(self) -> bool:
        """Return whether the client allows runs of blanks, or has said what may stand between tokens of JSON."""
        outputs = self.structured_outputs
        pattern = outputs.whitespace_pattern if outputs is not None else None
        return self.allow_blank_runs or pattern is not None or self.guided_whitespace_pattern is not None


def constraint_of(fields: ConstraintFields) -> Constraint | None:
    """Return the constraint that the fields ask for, if any. Raises InvalidRequest."""
    constraints = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    if len(constraints) > 1:
        names = " and ".join(constraint.param for constraint in constraints[:2])
        raise InvalidRequest(f"{names} cannot be combined: give one constraint.", param=constraints[1].param)
    if not constraints and fields.guided_whitespace_pattern is not None:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern")
    return constraints[0] if constraints else None


def _response_format(fields: ConstraintFields) -> list[Constraint]:
    wanted = fields.response_format
    if wanted is None:
        return []
    has_tags = wanted.structures is not None or wanted.triggers is not None
    _check_member(wanted, "json_schema", "json_schema", is_there=wanted.json_schema is not None)
    _check_member(wanted, "structural_tag", "structures", is_there=has_tags)
    if wanted.json_schema is not None:
        return [Constraint(StructuredOutputs(json=wanted.json_schema.schema_), "response_format.json_schema.schema")]
    if has_tags:
        tags = {"structures": wanted.structures, "triggers": wanted.triggers}
        return [Constraint(StructuredOutputs(structural_tag=tags), "response_format")]
    return [Constraint(StructuredOutputs(json_object=True), "response_format")] if wanted.type == "json_object" else []


def _check_member(wanted: ResponseFormat, of_type: str, member: str, *, is_there: bool) -> None:
    if is_there != (wanted.type == of_type):
        param = f"response_format.{member}"
        raise InvalidRequest(f"{param} must come with the type {of_type!r}, and only with it.", param=param)


def _structured_outputs(fields: ConstraintFields) -> list[Constraint]:
    wanted = fields.structured_outputs
    if wanted is None:
        return []
    try:
        outputs = StructuredOutputs(
            json=wanted.json_,
            json_object=wanted.json_object is True,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            structural_tag=wanted.structural_tag,
            disable_any_whitespace=wanted.disable_any_whitespace,
            whitespace_pattern=wanted.whitespace_pattern,
        )
    except InvalidRequest as error:
        raise named("structured_outputs", error) from error
    return [Constraint(outputs, f"structured_outputs.{outputs.kind}")]


def _guided(fields: ConstraintFields) -> list[Constraint]:
    by_kind: dict[str, Any] = {
        "json": fields.guided_json,
        "regex": fields.guided_regex,
        "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }
    try:
        return [
            Constraint(
                StructuredOutputs(**{kind: value}, whitespace_pattern=fields.guided_whitespace_pattern),
                f"guided_{kind}",
            )
            for kind, value in by_kind.items()
            if value is not None
        ]
    except InvalidRequest as error:
        raise named("guided_whitespace_pattern", error) from error


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
Verbosity = Literal["low", "medium", "high"]
ServiceTierName = Literal["auto", "default", "priority", "fast", "flex"]


class PredictedAnswer(Schema):
    """The answer that the client expects; other servers generate faster where it is right."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class PromptCacheOptions(Schema):
    """How a prompt is cached. Here every prompt is cached while space lasts."""

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
    prediction: PredictedAnswer | None = None
    verbosity: Verbosity | None = None  # a wish that only models trained for it know


class StreamOptions(Schema):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: the usage so far in every chunk, as vLLM has it
    include_obfuscation: bool | None = None  # without effect: chunks are not padded


class SamplingFields(Schema):
    """Fields of sampling and of terms that Responses have too. Unset: as the model's makers say."""

    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    service_tier: ServiceTierName = "auto"
    # Extensions, by the names that other open servers use.
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)  # 0 and -1: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: Priority | None = None  # by service_tier when unset
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LEN)  # shares prefixes with equal ones


class GenerationFields(ConstraintFields, Hints, SamplingFields):
    """Fields of chat completions and completions alike. Unset means OpenAI's default; of sampling, the model's."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    stop: Annotated[list[StopString], FailFast()] = Field(default_factory=list)  # one string is sent as itself as well
    logit_bias: LogitBias = Field(default_factory=dict)
    max_tokens: int | None = Field(None, ge=0)
    # Extensions, by the names that other open servers use.
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
    keep_alive: str | int | float | None = None  # how long the model stays in memory afterwards, as Ollama has it

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
    """Return the prompt if its form is one of PROMPT_FORMS. Checked by hand: a union would try every form on every
    item, and report every item of every form. Raises ValueError."""
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

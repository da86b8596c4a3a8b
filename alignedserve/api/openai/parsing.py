"""Parses bodies into checked schemas: sizes, JSON, unsupported fields, types, unknown fields, in this order."""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import orjson
from pydantic import ValidationError

from alignedserve.api.conversation import check_conversation
from alignedserve.api.errors import refuse, refuse_missing, refuse_unknown, refuse_unsupported
from alignedserve.api.openai.bodies import TOOL_CHOICE_FORMS, ChatCompletionRequest, CompletionRequest, Hints
from alignedserve.api.openai.translation import conversation_of_chat
from alignedserve.api.schema import IgnoredFields, Schema, unknown_fields
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest

_MAX_ECHOED_NAME_LEN = 64
_MAX_MEMBERS = 1000  # of one object; logit_bias has the most

SchemaT = TypeVar("SchemaT", bound=Schema)

_UNION_FIELDS = {
    "stop": "Input should be a string or a list of strings, none empty",
    "content": "Input should be a string or a list of text and image parts, not empty",
    "tool_choice": f"Input {TOOL_CHOICE_FORMS}",
}
_NO_OBJECT = frozenset({"model_type", "model_attributes_type", "dict_type", "dataclass_type"})  # pydantic's names
_UNION_MEMBERS = frozenset({"str", "int", "float", "list", "bool"})
_CHEAP_BYTES = 32_768  # parsed in less than 2 ms, whatever they are

# Fields that are not supported, each with its neutral values: these ask for nothing and are accepted, as JSON null is.
NeutralValues = Mapping[str, tuple[Any, ...]]

# Fields of other open servers that change an answer: refused on both endpoints, where unknown fields are ignored.
_OTHER_SERVERS: NeutralValues = {
    # Adapters.
    "adapter": (),
    "adapter_id": (),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    # Other inputs than text.
    "images": ([],),
    "image_data": (),
    "input_embeds": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    # Constraints.
    "ebnf": (),
    "format": (),
    "grammar": ("",),
    "json_schema": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "regex": (),
    "stop_regex": ([],),
    "structural_tag": (),
    # Other ways to choose tokens.
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "xtc_probability": (0,),
    # Other prompts, and answers that end or show otherwise.
    "chat_template": (),
    "custom_params": ({},),
    "documents": ([],),
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "max_new_tokens": (),
    "media_io_kwargs": ({},),
    "n_predict": (-1,),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
}
# Of OpenAI's API: refused on both endpoints, even if only one has the field there.
_OPENAI: NeutralValues = {
    "audio": (),
    "best_of": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "web_search_options": (),
}
_CHAT: NeutralValues = {**_OTHER_SERVERS, **_OPENAI, "add_special_tokens": (False,), "echo": (False,)}
_COMPLETION: NeutralValues = {**_OTHER_SERVERS, **_OPENAI}
_MESSAGE: NeutralValues = {"audio": (), "refusal": ()}
_SERVICE_TIERS = ("scale",)
_TOOL_TYPES = ("custom",)
_PART_TYPES = ("input_audio", "file", "refusal")

# Fields of a chat completion, and of other servers', that other APIs do not have. Defaults ask for nothing, and these.
_ASK_FOR_NOTHING: NeutralValues = {
    "response_format": ({"type": "text"},),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),  # streams of other APIs have it anyway
    "top_logprobs": (0,),
}
_FIELDS_OF_CHAT: NeutralValues = {
    name: (field.get_default(call_default_factory=True), *_ASK_FOR_NOTHING.get(name, ()))
    for name, field in ChatCompletionRequest.model_fields.items()
    if name not in Hints.model_fields
} | dict(_OTHER_SERVERS)


def parse_json(raw: bytes, config: GatewayConfig) -> dict[str, Any]:
    """Return the body as an object. Raises InvalidRequest, whose message never shows the body."""
    check_cost(raw, config)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error.msg}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    check_shape(body, config.max_json_depth)
    return body


def parse_chat(body: dict[str, Any], ignored: IgnoredFields | None = None) -> ChatCompletionRequest:
    """Check the body of a chat completion; `ignored` as `parse` takes it. Raises InvalidRequest naming the field."""
    fields = without_neutral(body, _CHAT)
    chat = parse(ChatCompletionRequest, _with_common(plain_messages(fields)), ignored)
    check_conversation(conversation_of_chat(chat))
    return chat


def parse_completion(body: dict[str, Any], ignored: IgnoredFields | None = None) -> CompletionRequest:
    """Check the body of a completion; `ignored` as `parse` takes it. Raises InvalidRequest naming the field."""
    return parse(CompletionRequest, _with_common(without_neutral(body, _COMPLETION)), ignored)


def plain_messages(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with plain messages. Raises InvalidRequest naming the first unsupported field in one."""
    messages, tools = fields.get("messages"), fields.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") in _TOOL_TYPES:
            refuse_unsupported(f"tools[{index}].type", tool["type"])
    if not isinstance(messages, list):
        return fields
    plain = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return fields | {"messages": plain}


def parse(
    schema: type[SchemaT], fields: dict[str, Any], ignored: IgnoredFields | None = None, *, parent: str = ""
) -> SchemaT:
    """Return the fields as a checked schema. Raises InvalidRequest naming the field, which stands behind `parent`.
    `ignored` gets the fields that the schema does not know; None: the first one is refused."""
    try:
        parsed = schema.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        _refuse(error, parent)
    for path in (parent + _path_of(location) for location in unknown_fields(parsed)):
        if ignored is None:
            refuse_unknown(path)
        ignored.add(path)
    return parsed


def check_shape(body: Any, max_depth: int) -> None:
    """Bound the depth and the members of a body before validation. Raises InvalidRequest."""
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > max_depth:
            raise InvalidRequest(f"The body is nested more than {max_depth} deep.", code="invalid_json")
        if any(len(container) > _MAX_MEMBERS for container in level if isinstance(container, dict)):
            raise InvalidRequest(f"An object has more than {_MAX_MEMBERS} members.", code="invalid_json")
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]


def _with_common(fields: dict[str, Any]) -> dict[str, Any]:
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if fields.get("service_tier") in _SERVICE_TIERS:
        refuse_unsupported("service_tier", fields["service_tier"])
    return fields


def _plain_message(message: Any, path: str) -> Any:
    if not isinstance(message, dict):
        return message
    set_fields = {name: value for name, value in message.items() if value is not None}
    fields = without_neutral(set_fields, _MESSAGE, f"{path}.")
    parts = fields.get("content")
    if isinstance(parts, list):
        fields["content"] = [_plain_part(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]
    return fields


def _plain_part(part: Any, path: str) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") in _PART_TYPES:
        refuse_unsupported(f"{path}.type", part["type"])
    return part


def without_neutral(fields: dict[str, Any], table: NeutralValues, path: str = "") -> dict[str, Any]:
    """Return the fields without neutral ones. Raises InvalidRequest for a field that wants an unsupported feature."""
    others = {}
    for name, value in fields.items():
        if name not in table:
            others[name] = value
        elif value is not None and not _is_neutral(value, table[name]):
            refuse_unsupported(f"{path}{name}")
    return others


def _is_neutral(value: Any, neutral_values: tuple[Any, ...]) -> bool:
    # 1 == True in Python, but not in JSON, where 1 is 1.0.
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values)


def without_fields_of_chat(body: dict[str, Any], schema: type[Schema]) -> dict[str, Any]:
    """Return a body of another API, whose schema this is. Raises InvalidRequest for a field of chat completions in it.
    Its client would not get what the field asks for, such as a limit of tokens or a constraint."""
    others = {name: neutral for name, neutral in _FIELDS_OF_CHAT.items() if name not in schema.model_fields}
    return without_neutral(body, others)


def _refuse(error: ValidationError, parent: str) -> NoReturn:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = parent + _path_of(problem["loc"])
    if problem["type"] == "extra_forbidden":  # in a constraint, which must not be misread
        refuse_unknown(path)
    if problem["type"] == "missing":
        refuse_missing(path)
    words = "Input should be an object" if problem["type"] in _NO_OBJECT else problem["msg"]
    expected = _UNION_FIELDS.get(path.rpartition(".")[2], words.replace("Value error, ", "Input "))
    refuse(path, expected)


def _path_of(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.replace("_", "").isidentifier() and step not in _UNION_MEMBERS:
            path += f".{step[:_MAX_ECHOED_NAME_LEN]}" if path else step[:_MAX_ECHOED_NAME_LEN]
        elif not path:
            path = "(a name that is not an identifier)"
    return path


def check_cost(raw: bytes, config: GatewayConfig) -> None:
    """Raise InvalidRequest for JSON of too many values, or too many objects and lists. It need not be valid."""
    if len(raw) <= _CHEAP_BYTES:
        return
    num_containers = num_values = position = 0
    while position < len(raw):
        quote = raw.find(b'"', position)
        end = quote if quote >= 0 else len(raw)
        num_containers += raw.count(b"{", position, end) + raw.count(b"[", position, end)
        num_values += raw.count(b",", position, end)
        if num_containers > config.max_json_containers:
            message = f"The body has more than {config.max_json_containers} objects and lists."
            raise InvalidRequest(message, code="invalid_json")
        if num_values > config.max_json_values:
            raise InvalidRequest(f"The body has more than {config.max_json_values} values.", code="invalid_json")
        position = _end_of_string(raw, end + 1)


def _end_of_string(raw: bytes, start: int) -> int:
    while (close := raw.find(b'"', start)) >= 0:
        before = raw[start:close]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return close + 1
        start = close + 1
    return len(raw)

"""Reads the files of a model folder that describe its tokenizer and its chat template."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelNotFound, UnsupportedModel

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
MAX_TEXT_FILE_BYTES = 8 * 1024 * 1024
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.jinja2")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # of models that see or hear
MORE_TEMPLATES = "additional_chat_templates"
_DEFAULT, _TOOL_USE = "default", "tool_use"
_PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json`, with `special_tokens_map.json` where transformers reads that too. Raises
    UnsupportedModel."""
    config = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_object(folder / "special_tokens_map.json")}


def read_definition(folder: Path, config: Mapping[str, Any]) -> str:
    """Return `tokenizer.json` with the tokens that the files beside it add. `config`: of `read_tokenizer_config`.
    Raises ModelError.

    As in transformers, tokens with a name (`eos_token`) are special, and new ones follow the end of the vocabulary.
    """
    definition = _read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if definition is None:
        raise ModelNotFound(f"{folder}: tokenizer.json is missing")
    try:
        before = {str(token["content"]): token for token in _added_tokens(definition)}
        tokens = before | _added_beside(folder, config, before)
        ruled_by = _ruling_class(folder, config)
        if tokens == before and ruled_by is None:
            return definition
        parsed = _with_rules(json.loads(definition), ruled_by, config)
        vocabulary = parsed["model"]["vocab"]
        if isinstance(vocabulary, list):  # of pieces and their scores
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        end = max([*vocabulary.values(), *(token["id"] for token in before.values())], default=-1) + 1
        for content, token in tokens.items():
            if content not in before:
                token["id"] = vocabulary.get(content, end)
                end += token["id"] == end
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return definition  # which is refused, if that is its fault
    return json.dumps({**parsed, "added_tokens": list(tokens.values())})


# Families of which transformers takes tokenizer.json as it is, whatever class tokenizer_config.json names.
_RULED_BY_FILE = re.compile(
    "ernie4_5|flex_olmo|glm4?|glm4_moe(_lite)?|granite(moe(hybrid|shared)?)?|llava|minimax_m2|ministral|mistral3?|"
    "mixtral|nemotron|olmo[23]|phi3|smolvlm|stablelm"
)
_LLAMA = "LlamaTokenizer"
_OF_BYTES = ("CohereTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer")


def _ruling_class(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the class by which transformers replaces some rules of tokenizer.json; None: it replaces none."""
    model = _read_object(folder / "config.json")
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class")).removesuffix("Fast")
    if _RULED_BY_FILE.fullmatch(str(model.get("model_type"))):
        return None
    return name if name == _LLAMA or (name in _OF_BYTES and config.get("add_prefix_space") is True) else None


def _with_rules(parsed: dict[str, Any], ruled_by: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    rules, model = [parsed.get("pre_tokenizer") or {}, parsed.get("decoder") or {}], parsed["model"]
    if ruled_by in _OF_BYTES:
        for rule in (rules[0], *rules[0].get("pretokenizers", ())):
            if rule.get("type") == "ByteLevel":
                rule["add_prefix_space"] = True
    if ruled_by != _LLAMA or model.get("type") != "BPE" or '"ByteLevel"' in json.dumps(rules):
        return parsed
    has_space = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") is True else "first") if has_space else "never"
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_space else []
    return {
        **parsed,
        "model": {**model, "fuse_unk": True, "byte_fallback": True},
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _added_tokens(definition: str) -> list[dict[str, Any]]:
    """Raises ValueError."""
    import msgspec  # here, as a machine where kernels are measured may have PyTorch and little else

    fields = msgspec.json.decode(definition, type=dict[str, msgspec.Raw])
    return msgspec.json.decode(fields.get("added_tokens", b"[]"), type=list[dict[str, Any]])


def _added_beside(folder: Path, config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by content the tokens that are not in tokenizer.json, or otherwise."""
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    named = [*special_tokens_of(config).values(), *(map(_content, more) if isinstance(more, list) else ())]
    special = dict.fromkeys(filter(None, named))
    listed = config.get("added_tokens_decoder")
    if listed is None:
        taken = {token.get("id") for token in before.values()}
        file = _read_object(folder / "added_tokens.json")
        contents = sorted(file.keys() - before.keys(), key=lambda content: int(file[content]))
        flags = {content: {**_PLAIN_TOKEN, "normalized": content not in special} for content in contents}
        beside = {content: flags[content] for content in contents if file[content] not in taken}
    else:
        tokens = [token for _, token in sorted(listed.items(), key=lambda entry: int(entry[0]))]
        beside = {token["content"]: {**before.get(token["content"], _PLAIN_TOKEN), **token} for token in tokens}
    for content in special:
        known = beside.get(content) or before.get(content) or _PLAIN_TOKEN
        beside[content] = {**known, "special": True}
    return {content: {"special": False, **token, "content": content} for content, token in beside.items()}


def templates_of(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the template of all conversations, and the one of those with tools where that is another."""
    stated = config.get("chat_template")
    named = stated if isinstance(stated, list) else []
    templates = {str(entry.get("name")): entry.get("template") for entry in named if isinstance(entry, dict)}
    templates |= stated if isinstance(stated, dict) else {} if named else {_DEFAULT: stated}
    if any((folder / name).exists() for name in _PROCESSORS) or not isinstance(templates.get(_DEFAULT), str):
        of_processor = _read_object(folder / "chat_template.json").get("chat_template")
        templates |= {} if of_processor is None else {_DEFAULT: of_processor}
    for name in _TEMPLATE_FILES:
        in_file = _read_text(folder / name, MAX_TEXT_FILE_BYTES)
        templates = {_DEFAULT: in_file} if in_file is not None else templates
    for_tools = _read_text(folder / MORE_TEMPLATES / f"{_TOOL_USE}.jinja", MAX_TEXT_FILE_BYTES)
    default, tool_use = templates.get(_DEFAULT), for_tools or templates.get(_TOOL_USE)
    return (default if isinstance(default, str) else None, tool_use if isinstance(tool_use, str) else None)


def unused_texts(folder: Path) -> list[str]:
    """Return the parts of a folder's tokenizer and templates that another part replaces, or nobody reads."""
    config = read_tokenizer_config(folder)
    used = templates_of(folder, config)
    more = sorted(file.name for file in (folder / MORE_TEMPLATES).glob("*.jinja"))
    unused = [f"{MORE_TEMPLATES}/{name}" for name in more if name != f"{_TOOL_USE}.jinja"]
    if isinstance(config.get("chat_template"), str) and config["chat_template"] not in used:
        unused.append("chat_template of tokenizer_config.json")
    if _read_object(folder / "chat_template.json").get("chat_template") not in (None, *used):
        unused.append("chat_template.json")
    mapped = special_tokens_of(_read_object(folder / "special_tokens_map.json")).items()
    replaced = sorted(mapped - special_tokens_of(config).items())
    unused += [f"{name} of special_tokens_map.json" for name, _ in replaced]
    return unused + ([f"{_SPLIT} of tokenizer_config.json"] if config.get(_SPLIT) is True else [])


_SPLIT = "split_special_tokens"  # with it, a template could end no turn


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens by the names under which chat templates know them."""
    more = config.get("extra_special_tokens")
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    contents = {name: _content(token) for name, token in (tokens | (more if isinstance(more, dict) else {})).items()}
    return {name: content for name, content in contents.items() if content is not None}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_template(path: Path) -> str:
    """Return the chat template in this file. Raises ModelError."""
    template = _read_text(path, MAX_TEXT_FILE_BYTES)
    if template is None:
        raise ModelNotFound(f"{path}: there is no such chat template")
    return template


def end_token_id(folder: Path) -> int | None:
    """Return the id of the token that the folder's tokenizer names as the end of a text; None: it names none.

    Fine-tuned models are published whose config.json still has the end of what they were made from.
    """
    config = read_tokenizer_config(folder)
    content = special_tokens_of(config).get("eos_token")
    if content is None or not (folder / "tokenizer.json").exists():
        return None
    try:
        added = _added_tokens(read_definition(folder, config))
    except (ValueError, RecursionError):
        return None  # which the tokenizer is refused for
    token_id = next((token.get("id") for token in added if token.get("content") == content), None)
    return token_id if isinstance(token_id, int) else None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty: there is no such file."""
    text = _read_text(path, MAX_TEXT_FILE_BYTES)
    try:
        content = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return content


def _read_text(path: Path, limit: int) -> str | None:
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            raise UnsupportedModel(f"{path}: larger than {limit} bytes")
        return raw.decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path}: cannot be read: {error}") from error

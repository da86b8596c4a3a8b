"""Reads the files of a model folder that describe its tokenizer and its chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelNotFound, UnsupportedModel

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
MAX_TEXT_FILE_BYTES = 8 * 1024 * 1024
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.jinja2")


def read_definition(folder: Path) -> str:
    definition = _read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if definition is None:
        raise ModelNotFound(f"{folder}: tokenizer.json is missing")
    return definition


def read_config(path: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json`; empty: there is no such file. Raises UnsupportedModel."""
    text = _read_text(path, MAX_TEXT_FILE_BYTES)
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return config


def templates_of(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the template of all conversations, and the one of those with tools where that is another."""
    found = config.get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
    for name in _TEMPLATE_FILES:
        in_file = _read_text(folder / name, MAX_TEXT_FILE_BYTES)
        templates = {"default": in_file} if in_file is not None else templates
    default, tool_use = templates.get("default"), templates.get("tool_use")
    return (default if isinstance(default, str) else None, tool_use if isinstance(tool_use, str) else None)


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


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
    content = special_tokens_of(read_config(folder / "tokenizer_config.json")).get("eos_token")
    if content is None or not (folder / "tokenizer.json").exists():
        return None
    import msgspec  # here, as a machine where kernels are measured may have PyTorch and little else

    try:
        fields = msgspec.json.decode(read_definition(folder), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(fields.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    except msgspec.DecodeError:
        return None  # which the tokenizer is refused for
    token_id = next((token.get("id") for token in added if token.get("content") == content), None)
    return token_id if isinstance(token_id, int) else None


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

"""Text to token ids and back, from the files of a Hugging Face model folder; no code of the folder runs.

Incremental decoding does not use tokenizers' `DecodeStream`: it raises on output that is not valid UTF-8 (a model may
produce any bytes) and cannot flush its buffer. Byte-level vocabularies go through an incremental UTF-8
decoder, all others through a window of recent tokens; neither ever emits half of a character.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from alignedserve.core.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from alignedserve.runtime.model.chat_template import ChatTemplate, Message, Tools
from alignedserve.runtime.model.gguf.file import GgufFile, is_gguf
from alignedserve.runtime.model.gguf.tokenizer import gguf_tokenizer

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
MAX_TEXT_FILE_BYTES = 8 * 1024 * 1024
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.jinja2")
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A character has at most four bytes; more tokens than this without a whole one are not UTF-8 at all.
_MAX_HELD_TOKENS = 16
# Private-use characters put around control tokens that a message spells out, so that they are encoded as plain text.
_MARK_START, _MARK_END = "\U000f0000", "\U000f0001"


def control_mark(content: str) -> str:
    """Return a control token's name as no text can spell it."""
    return f"{_MARK_START}{content}{_MARK_END}"


class TextStream(Protocol):
    """Turns the tokens of one answer into text incrementally. Special tokens have no text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete: whole characters only."""

    def end(self) -> str:
        """Return the buffered text, with U+FFFD for incomplete characters."""


class Tokenizer:
    """The tokenizer and chat template of one model. Safe to share between threads."""

    def __init__(
        self,
        definition: str,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,  # the template of conversations with tools, where there are two
    ) -> None:
        self._tokenizer = _parse(definition)
        self._literal = _parse(definition)
        self._literal.encode_special_tokens = True
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pieces = _pieces_for(json.loads(definition).get("decoder"))
        self._bytes_of: dict[int, bytes] = {}  # grows to the vocabulary at most
        self._special_tokens = dict(special_tokens)
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.chat_template = ChatTemplate(chat_template, special_tokens, tool_template)
        contents = [self._tokenizer.id_to_token(token_id) or "" for token_id in self._special_ids]
        pattern = "|".join(re.escape(content) for content in sorted(filter(None, contents), key=len, reverse=True))
        self._control = re.compile(pattern or "(?!)")

    @classmethod
    def load(cls, folder: Path, num_rows: int | None = None, chat_template: str | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template, or those of a GGUF file.

        `num_rows` of the embedding: added tokens beyond it are plain text. `chat_template` is used instead of the
        model's own. Raises ModelError.
        """
        if is_gguf(folder):
            found = gguf_tokenizer(GgufFile(folder))
            return cls(found.definition, found.special_tokens, chat_template or found.chat_template)
        definition = _read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if definition is None:
            raise ModelNotFound(f"{folder}: tokenizer.json is missing")
        config = _read_config(folder / "tokenizer_config.json")
        templates = _templates_of(folder, config) if chat_template is None else (chat_template, None)
        tokenizer = cls(definition, _special_tokens_of(config), *templates)
        if num_rows is None or tokenizer.vocab_size <= num_rows:
            return tokenizer
        rest = _with_rows_alone(definition, num_rows, "".join(filter(None, templates)))
        return cls(rest, _special_tokens_of(config), *templates)

    @property
    def bos_token_id(self) -> int | None:
        """Return the token that begins a document, if the model has one."""
        token = self._special_tokens.get("bos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens written in it count as such."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of plain text inside an answer: without special tokens, nor a space put before it."""
        return self._encode_piece(text, is_literal=True, is_first=False)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        now: datetime,
        tools: Tools = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's answer.

        Special tokens spelled out inside a message, a tool or a variable are encoded as plain text: nothing that a
        client sends can end its own turn. With `continue_final_message` the last message is left open instead. Raises
        InvalidRequest when the model has no chat template or its template refuses the messages.
        """
        marked = self.marked({"messages": messages, "tools": tools, "variables": variables or {}})
        adds_prompt = add_generation_prompt and not continue_final_message
        rendered = self.render_chat(now=now, add_generation_prompt=adds_prompt, **marked)
        if continue_final_message:
            rendered = _open_at(rendered, marked["messages"][-1]["content"])
        return self._encode_marked(rendered)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        now: datetime,
        tools: Tools = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the conversation by the chat template. Raises InvalidRequest."""
        if self.chat_template is None:
            raise InvalidRequest("This model has no chat template; use completions.", param="messages")
        render = self.chat_template.render
        return render(messages, now=now, tools=tools, variables=variables, add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, shown: Iterable[int] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """Return a new incremental decoder. Special tokens among `shown` come as `control_mark` of their name."""
        name = self._tokenizer.id_to_token
        marks = {} if skip_special_tokens else {token_id: name(token_id) for token_id in self._special_ids}
        marks |= {token_id: control_mark(name(token_id)) for token_id in shown}
        if isinstance(self._pieces, _ByteLevelPieces):
            return _ByteStream(self, marks)
        return _WindowStream(self._tokenizer, self._special_ids, marks)

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        """Return the text in pieces, each plain text or the name of a special token and its id."""
        pieces: list[tuple[str, int | None]] = []
        start = 0
        for found in self._control.finditer(text):
            pieces += [(text[start : found.start()], None)] if found.start() > start else []
            pieces.append((found[0], self._tokenizer.token_to_id(found[0])))
            start = found.end()
        return [*pieces, (text[start:], None)] if start < len(text) else pieces

    def control_token_ids(self, text: str) -> frozenset[int]:
        """Return the ids of the special tokens that a text spells out."""
        return frozenset(token_id for _, token_id in self.split_control(text) if token_id is not None)

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a control token without text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of the token, which may be part of a character."""
        known = self._bytes_of.get(token_id)
        if known is not None:
            return known
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        raw = token.encode() if token_id in self._special_ids else self._pieces.to_bytes(token)
        self._bytes_of[token_id] = raw
        return raw

    def token_text(self, token_id: int) -> str:
        """Return the token as logprobs show it: its text, or `bytes:\\xe2\\x82` when it is not valid text by itself."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def marked(self, value: Any) -> Any:
        """Return the value with marks around the special tokens that its strings spell out; see `control_mark`."""
        if isinstance(value, str):
            plain = value.replace(_MARK_START, "").replace(_MARK_END, "")
            return self._control.sub(lambda found: control_mark(found[0]), plain)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_marked(self, rendered: str) -> list[int]:
        if _MARK_START not in rendered and _MARK_END not in rendered:
            return self.encode(rendered, add_special_tokens=False)
        pieces = re.split(f"{_MARK_START}({self._control.pattern}){_MARK_END}|[{_MARK_START}{_MARK_END}]", rendered)
        token_ids: list[int] = []
        for number, piece in enumerate(pieces):
            if piece:
                token_ids += self._encode_piece(piece, is_literal=number % 2 == 1, is_first=number == 0)
        return token_ids

    def _encode_piece(self, piece: str, *, is_literal: bool, is_first: bool) -> list[int]:
        tokenizer = self._literal if is_literal else self._tokenizer
        if is_first:
            return list(tokenizer.encode(piece, add_special_tokens=False).ids)
        # SentencePiece vocabularies put a space before a text; after a newline, which is cut off again, they do not.
        newline = tokenizer.encode("\n", add_special_tokens=False).ids
        token_ids: list[int] = tokenizer.encode("\n" + piece, add_special_tokens=False).ids
        if token_ids[: len(newline)] == newline:
            return token_ids[len(newline) :]
        return list(tokenizer.encode(piece, add_special_tokens=False).ids)


class _ByteLevelPieces:
    """Vocabularies whose every character stands for a byte (GPT-2 and its descendants)."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, written as plain text


class _TextPieces:
    """Vocabularies of text pieces, with `<0xNN>` for bytes and a mark for spaces where the decoder says so."""

    def __init__(self, decoder_kinds: frozenset[str]) -> None:
        self._has_bytes = "ByteFallback" in decoder_kinds
        self._has_space_mark = bool(decoder_kinds & {"Metaspace", "Replace"})

    def to_bytes(self, token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if self._has_bytes else None
        if match is not None:
            return bytes([int(match[1], 16)])
        return (token.replace("\u2581", " ") if self._has_space_mark else token).encode()


class _ByteStream:
    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._marks = {token_id: mark.encode() for token_id, mark in marks.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes_of(token_id) for token_id in token_ids]))

    def _bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer.is_special(token_id):
            return self._marks.get(token_id, b"")
        return self._tokenizer.token_bytes(token_id)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Decodes the tokens since the last but one emission: decoders look at neighbours, but not far."""

    def __init__(self, tokenizer: Any, special_ids: frozenset[int], marks: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._marks = marks
        self._window: list[int] = []  # tokens already shown, then tokens held
        self._num_shown = 0

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def end(self) -> str:
        return self._new_text()

    def _push_one(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return self._take(self._new_text()) + self._marks[token_id] if token_id in self._marks else ""
        self._window.append(token_id)
        text = self._new_text()
        num_held = len(self._window) - self._num_shown
        if num_held <= _MAX_HELD_TOKENS and (not text or text.endswith(_REPLACEMENT)):
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        """Return the text of the held tokens, which stay as the neighbours of the next; those shown before go."""
        if self._num_shown < len(self._window):
            del self._window[: self._num_shown]
            self._num_shown = len(self._window)
        return text

    def _new_text(self) -> str:
        shown: str = self._tokenizer.decode(self._window[: self._num_shown])
        return str(self._tokenizer.decode(self._window))[len(shown) :]


def _open_at(rendered: str, content: str) -> str:
    """Return the rendered conversation up to the end of its last message's content. Raises InvalidRequest."""
    for text in filter(None, (content, content.strip())):
        place = rendered.rfind(text)
        if place >= 0:
            return rendered[: place + len(text)]
    raise InvalidRequest(
        "continue_final_message needs a last message with content that the chat template shows as it is.",
        param="continue_final_message",
    )


def _with_rows_alone(definition: str, num_rows: int, template: str) -> str:
    """Leave out added tokens that the embedding has no row for, unless every prompt needs one.

    Gemma 3's models of text alone have the tokenizer of those with images, whose token of an image is one too many.
    """
    parsed = json.loads(definition)
    added = parsed.get("added_tokens") or []
    needed = template + json.dumps(parsed.get("post_processor"), ensure_ascii=False)
    if any(token["id"] >= num_rows and token["content"] in needed for token in added):
        return definition
    return json.dumps({**parsed, "added_tokens": [token for token in added if token["id"] < num_rows]})


def _pieces_for(decoder: Mapping[str, Any] | None) -> _ByteLevelPieces | _TextPieces:
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [str(part.get("type")) for part in parts]
    return _ByteLevelPieces() if kinds == ["ByteLevel"] else _TextPieces(frozenset(kinds))


def _parse(definition: str) -> Any:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more precise
        raise UnsupportedModel(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_text(path: Path, limit: int) -> str | None:
    """Return the file's text; None when there is no file."""
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


def _read_config(path: Path) -> dict[str, Any]:
    text = _read_text(path, MAX_TEXT_FILE_BYTES)
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return config


def _templates_of(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the template of all conversations, and the one of those with tools where that is another."""
    found = config.get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
    for name in _TEMPLATE_FILES:
        in_file = _read_text(folder / name, MAX_TEXT_FILE_BYTES)
        templates = {"default": in_file} if in_file is not None else templates
    default, tool_use = templates.get("default"), templates.get("tool_use")
    return (default if isinstance(default, str) else None, tool_use if isinstance(tool_use, str) else None)


def read_template(path: Path) -> str:
    """Return the chat template in this file. Raises ModelError."""
    template = _read_text(path, MAX_TEXT_FILE_BYTES)
    if template is None:
        raise ModelNotFound(f"{path}: there is no such chat template")
    return template


def _special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens

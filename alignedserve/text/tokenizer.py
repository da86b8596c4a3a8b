"""Text to token ids and back, from the files of a Hugging Face model folder; no code of the folder runs."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import orjson
import tokenizers

from alignedserve.core.errors import ContextTooLong, InvalidRequest, UnsupportedModel
from alignedserve.gguf.file import GgufFile, is_gguf
from alignedserve.text.chat_template import ChatPrompt, ChatTemplate, Message
from alignedserve.text.gguf_tokenizer import gguf_tokenizer
from alignedserve.text.text_stream import ByteStream, TextStream, WindowStream
from alignedserve.text.token_texts import (
    MARK_END,
    MARK_START,
    OPEN_BLANK,
    OPEN_MARK,
    ByteLevelPieces,
    SlicedPattern,
    control_mark,
    longest_token_len,
    pieces_for,
    without_marks,
)
from alignedserve.text.tokenizer_files import read_definition, read_tokenizer_config, special_tokens_of, templates_of

logger = logging.getLogger(__name__)

_SHORT_LEN = 512
_LONG_LEN = 65_536


class EncodedPair(NamedTuple):
    """Two texts as one prompt."""

    token_ids: list[int]
    second_at: int  # the first token of another type; 0: the model does not tell the texts apart


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
        self._literal = _sharing_vocabulary(self._tokenizer, definition)
        self._literal.encode_special_tokens = True
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        described = orjson.loads(definition)
        self._pieces = pieces_for(described.get("decoder"))
        self._bytes_of: dict[int, bytes] = {}  # grows to the vocabulary at most, like the next
        self._whole_texts: dict[int, str] = {}  # see ByteStream
        self._special_tokens = dict(special_tokens)
        self.chat_template: ChatTemplate | None = None
        try:
            if chat_template is not None:
                self.chat_template = ChatTemplate(chat_template, special_tokens, tool_template)
        except UnsupportedModel as error:  # completions need none
            logger.warning("Chats are refused: %s", error)
            self.chat_template = ChatTemplate(f"{{{{ raise_exception({json.dumps(str(error))}) }}}}", {})
        contents = [self._tokenizer.id_to_token(token_id) or "" for token_id in self._special_ids]
        pattern = "|".join(re.escape(content) for content in sorted(filter(None, contents), key=len, reverse=True))
        self._control = SlicedPattern(pattern or "(?!)", max(map(len, contents), default=0))
        marked = f"{MARK_START}({self._control.pattern}){MARK_END}|[{MARK_START}{MARK_END}]"
        self._marked_control = SlicedPattern(marked, self._control.max_len + 2)
        self._longest_token_len = longest_token_len(described)

    @classmethod
    def load(cls, folder: Path, num_rows: int | None = None, chat_template: str | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template, or those of a GGUF file.

        `num_rows` of the embedding: added tokens beyond it are plain text. `chat_template` is used instead of the
        model's own. Raises ModelError; a template of the model that cannot be read refuses chats alone.
        """
        if chat_template is not None:
            ChatTemplate(chat_template, {})  # raises
        if is_gguf(folder):
            parts = gguf_tokenizer(GgufFile(folder))
            return cls(parts.definition, parts.special_tokens, chat_template or parts.chat_template)
        config = read_tokenizer_config(folder)
        definition = read_definition(folder, config)
        templates = templates_of(folder, config) if chat_template is None else (chat_template, None)
        tokenizer = cls(definition, special_tokens_of(config), *templates)
        if num_rows is None or tokenizer.vocab_size <= num_rows:
            return tokenizer
        rest = _with_rows_alone(definition, num_rows, "".join(filter(None, templates)))
        return cls(rest, special_tokens_of(config), *templates)

    @property
    def bos_token_id(self) -> int | None:
        """Return the token that begins a document, if the model has one."""
        token = self._special_tokens.get("bos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text; special tokens written in it count as such.

        Raises ContextTooLong, naming `param`, for a long text of more than `max_tokens`: its ids would be of no use.
        """
        encoding = _encoded(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if len(text) > _LONG_LEN:
            check_length(len(encoding), max_tokens, param=param)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least, as its length tells."""
        return 0 if self._longest_token_len is None else -(-len(text) // self._longest_token_len)

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Return the first tokens of a text, within a limit that counts the special tokens, which stay at its ends.

        Raises InvalidRequest when not one more fits beside these.
        """
        encoding = _encoded(self._tokenizer, text)
        encoding.truncate(_room(self._tokenizer, max_tokens, is_pair=False))
        ids: list[int] = self._tokenizer.post_process(encoding, None, True).ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> EncodedPair:
        """Return the token ids of two texts as the model was trained to read them side by side.

        Of at most `max_tokens`, tokens are left out at the end of the longer text, as often as needed. Raises
        InvalidRequest when not one of each fits.
        """
        texts = [_encoded(self._tokenizer, text) for text in (first, second)]
        if max_tokens is not None:
            room = _room(self._tokenizer, max_tokens, is_pair=True)
            for text, num_tokens in zip(texts, _longest_first(len(texts[0]), len(texts[1]), room), strict=True):
                text.truncate(num_tokens)
        encoded = self._tokenizer.post_process(*texts, True)
        types = encoded.type_ids
        return EncodedPair(encoded.ids, types.index(1) if 1 in types else 0)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of plain text inside an answer: without special tokens, nor a space put before it."""
        return self._encode_piece(text, is_literal=True, is_first=False)

    def encode_chat(self, prompt: ChatPrompt, *, now: datetime, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's answer.

        Special tokens spelled out inside a message, a tool or a variable are encoded as plain text: nothing that a
        client sends can end its own turn. Raises InvalidRequest when the model has no chat template or its template
        refuses the messages, ContextTooLong for more than `max_tokens`, where the length alone shows it.
        """
        marked = replace(
            prompt,
            messages=self.marked(prompt.messages),
            tools=self.marked(prompt.tools),
            variables=self.marked(prompt.variables),
        )
        render = self._render_open if prompt.continue_final_message else self.render_chat
        rendered = _with_pictures(render(marked, now=now), prompt)
        check_length(self.least_tokens(without_marks(rendered)), max_tokens, param=prompt.param)
        return self._encode_marked(rendered, max_tokens, prompt.param)

    def render_chat(self, prompt: ChatPrompt, *, now: datetime) -> str:
        """Render the conversation by the chat template. Raises InvalidRequest."""
        if self.chat_template is None:
            raise InvalidRequest("This model has no chat template; use completions.", param=prompt.param)
        return self.chat_template.render(prompt, now=now)

    def _render_open(self, prompt: ChatPrompt, *, now: datetime) -> str:
        *before, last = prompt.messages
        rendered = self.render_chat(replace(prompt, messages=[*before, _left_open(last)]), now=now)
        shown, mark, after = rendered.rpartition(OPEN_MARK)
        text = _last_text(last["content"])
        if not after.startswith(OPEN_BLANK):
            shown, text = shown.rstrip(), text.rstrip()  # as the template did
        if mark and any(end and shown.endswith(end) for end in (text, text.lstrip())):
            return shown
        raise InvalidRequest(
            "continue_final_message needs a last message with content that the chat template shows as it is.",
            param="continue_final_message",
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        # By itself, `decode` would let no other thread run meanwhile.
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def stream(
        self, shown: Iterable[int] = (), *, before: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> TextStream:
        """Return a new incremental decoder. Special tokens among `shown` come as `control_mark` of their name.

        `before`: tokens whose text goes on; none: a text begins, of which some vocabularies leave out the first space.
        """
        name = self._tokenizer.id_to_token
        marks = {} if skip_special_tokens else {token_id: name(token_id) for token_id in self._special_ids}
        marks |= {token_id: control_mark(name(token_id)) for token_id in shown}
        if isinstance(self._pieces, ByteLevelPieces):
            return ByteStream(self.token_bytes, self._special_ids, marks, self._whole_texts)
        return WindowStream(self._tokenizer, self._special_ids, marks, before)

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        """Return the text in pieces, each plain text or the name of a special token and its id."""
        pieces: list[tuple[str, int | None]] = []
        start = 0
        for match in self._control.finditer(text):
            pieces += [(text[start : match.start()], None)] if match.start() > start else []
            pieces.append((match[0], self._tokenizer.token_to_id(match[0])))
            start = match.end()
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
            return self._control.sub(lambda match: control_mark(match[0]), without_marks(value))
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_marked(self, rendered: str, max_tokens: int | None, param: str) -> list[int]:
        if MARK_START not in rendered and MARK_END not in rendered:
            return self.encode(rendered, add_special_tokens=False, max_tokens=max_tokens, param=param)
        pieces = self._marked_control.split(rendered)
        token_ids: list[int] = []
        for number, piece in enumerate(pieces):
            if piece:
                token_ids += self._encode_piece(piece, is_literal=number % 2 == 1, is_first=number == 0)
        return token_ids

    def _encode_piece(self, piece: str, *, is_literal: bool, is_first: bool) -> list[int]:
        tokenizer = self._literal if is_literal else self._tokenizer
        if is_first:
            return list(_encoded(tokenizer, piece).ids)
        # SentencePiece vocabularies put a space before a text; after a newline, which is cut off again, they do not.
        newline = tokenizer.encode("\n", add_special_tokens=False).ids
        token_ids: list[int] = _encoded(tokenizer, "\n" + piece).ids
        if token_ids[: len(newline)] == newline:
            return token_ids[len(newline) :]
        return list(_encoded(tokenizer, piece).ids)


def check_length(least_tokens: int, max_tokens: int | None, *, param: str) -> None:
    """Raise ContextTooLong for a text that has more than `max_tokens` for sure; None: any number may be."""
    if max_tokens is not None and least_tokens > max_tokens:
        raise ContextTooLong(
            f"This model's maximum context length is {max_tokens} tokens. However, the prompt has more than "
            f"{least_tokens - 1}. Please shorten it.",
            param=param,
            num_tokens=least_tokens,
        )


def _encoded(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    """Return the encoding of a text. Of a long one the other threads go on meanwhile, but without places in the text.

    Of short ones they need not, and it takes less than a millisecond. Raises InvalidRequest.
    """
    try:
        if len(text) <= _SHORT_LEN:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:
        raise InvalidRequest("a text holds half of a surrogate pair, which is no character.", param="prompt") from None


def _last_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else str(content[-1].get("text", ""))


def _left_open(message: Message) -> Message:
    content, mark = message["content"], OPEN_MARK + OPEN_BLANK
    if isinstance(content, str):
        return {**message, "content": content + mark}
    return {**message, "content": [*content[:-1], {**content[-1], "text": _last_text(content) + mark}]}


def _with_pictures(rendered: str, prompt: ChatPrompt) -> str:
    """Put the texts of pictures in place of what the template wrote for them. Raises InvalidRequest.

    What a client spells out is marked, and not taken for a picture.
    """
    if not prompt.picture_texts:
        return rendered
    pieces = re.split(f"(?<!{MARK_START}){re.escape(prompt.picture_mark)}", rendered)
    if len(pieces) != len(prompt.picture_texts) + 1:
        raise InvalidRequest("The model's chat template does not show all pictures.", param=prompt.param)
    shown = [text for pair in zip(pieces, (*prompt.picture_texts, ""), strict=True) for text in pair]
    return "".join(shown)


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


def _parse(definition: str) -> Any:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more precise
        raise UnsupportedModel(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _sharing_vocabulary(tokenizer: Any, definition: str) -> Any:
    other = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(tokenizer, part) is not None:
            setattr(other, part, getattr(tokenizer, part))
    for _, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        (other.add_special_tokens if token.special else other.add_tokens)([token])
    # Numbers that do not follow from the order are given by the definition alone.
    return other if _added_tokens(other) == _added_tokens(tokenizer) else _parse(definition)


def _added_tokens(tokenizer: Any) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def _room(tokenizer: Any, max_tokens: int, *, is_pair: bool) -> int:
    room = max_tokens - int(tokenizer.num_special_tokens_to_add(is_pair))
    if room < 1 + is_pair:
        raise InvalidRequest("truncate_prompt_tokens leaves no room for a text.", param="truncate_prompt_tokens")
    return room


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


class TokenizerOnUse(Tokenizer):
    """A tokenizer that is read by `read`, or else by the first method that needs it."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._lock = Lock()
        self._is_read = False

    def read(self) -> None:
        """Read it, unless it has been. Raises ModelError."""
        with self._lock:
            if not self._is_read:
                vars(self).update(vars(self._load()))
                self._is_read = True

    def __getattr__(self, name: str) -> Any:
        """Return what only a tokenizer that has been read has. Raises ModelError."""
        if name.startswith("__") or self._is_read:
            raise AttributeError(name)
        self.read()
        return getattr(self, name)

"""The bytes that the pieces of a vocabulary stand for."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteLevelPieces:
    """Vocabularies whose every character stands for a byte (GPT-2 and its descendants)."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + index): byte for index, byte in enumerate(others)}

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, written as plain text


class TextPieces:
    """Vocabularies of text pieces, with `<0xNN>` for bytes and a mark for spaces where the decoder says so."""

    def __init__(self, decoder_kinds: frozenset[str]) -> None:
        self._has_bytes = "ByteFallback" in decoder_kinds
        self._has_space_mark = bool(decoder_kinds & {"Metaspace", "Replace"})

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        match = _BYTE_TOKEN.fullmatch(token) if self._has_bytes else None
        if match is not None:
            return bytes([int(match[1], 16)])
        return (token.replace("\u2581", " ") if self._has_space_mark else token).encode()


def pieces_for(decoder: Mapping[str, Any] | None) -> ByteLevelPieces | TextPieces:
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [str(part.get("type")) for part in parts]
    return ByteLevelPieces() if kinds == ["ByteLevel"] else TextPieces(frozenset(kinds))


# What changes no text's length, but for NFC, which makes one character of three at most.
_NORMALIZERS = frozenset({"NFC", "Prepend", "Replace", "Sequence"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"})
_NFC_FACTOR = 3
_NUM_BYTES = 256


def longest_token_len(definition: Mapping[str, Any]) -> int | None:
    """Return the characters that one token stands for at most, as `tokenizer.json` tells.

    None: there is no such bound, as where spaces are left out, or one token stands for any unknown word.
    """
    model, added = definition.get("model") or {}, definition.get("added_tokens") or []
    vocabulary = model.get("vocab")
    if (
        not isinstance(vocabulary, Mapping)
        or not vocabulary
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    kinds = [str(part.get("type")) for part in _parts(definition.get("pre_tokenizer"))]
    if not _knows_every_byte(model, vocabulary, kinds) or not _keeps_text(definition, kinds):
        return None
    longest = max(len(text) for text in (*vocabulary, *(token["content"] for token in added)))
    has_nfc = any(part.get("type") == "NFC" for part in _parts(definition.get("normalizer")))
    return longest * (_NFC_FACTOR if has_nfc else 1)


def _knows_every_byte(model: Mapping[str, Any], vocabulary: Mapping[str, Any], kinds: list[str]) -> bool:
    if model.get("type", "BPE") != "BPE":
        return False
    if "ByteLevel" in kinds:
        return sum(len(text) == 1 for text in vocabulary) >= _NUM_BYTES
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))


def _keeps_text(definition: Mapping[str, Any], kinds: list[str]) -> bool:
    splits = [part for part in _parts(definition.get("pre_tokenizer")) if part.get("type") == "Split"]
    normalizers = list(_parts(definition.get("normalizer")))
    return (
        _PRE_TOKENIZERS.issuperset(kinds)
        and all(part.get("behavior") != "Removed" for part in splits)
        and all(part.get("type") in _NORMALIZERS and _is_no_cut(part) for part in normalizers)
    )


def _is_no_cut(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") != "Replace":
        return True
    replaced = (normalizer.get("pattern") or {}).get("String")
    return replaced is not None and len(replaced) <= len(normalizer.get("content", ""))


def _parts(described: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if described is None:
        return
    yield described
    for part in (*described.get("normalizers", ()), *described.get("pretokenizers", ())):
        yield from _parts(part)


_SLICE_LEN = 65_536


class SlicedPattern:
    """A pattern whose matches have at most `max_len` characters."""

    def __init__(self, pattern: str, max_len: int) -> None:
        self.pattern = pattern
        self._regex = re.compile(pattern)
        self.max_len = max_len

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        position = 0
        while position < len(text):
            end = position + _SLICE_LEN
            match = self._regex.search(text, position, end + self.max_len)
            if match is None or match.start() >= end:
                position = end
            else:
                yield match
                position = max(match.end(), position + 1)

    def split(self, text: str) -> list[str | None]:
        """Return what stands between matches, and between each two pieces the group of the match, None where unset."""
        pieces: list[str | None] = []
        start = 0
        for match in self.finditer(text):
            pieces += (text[start : match.start()], match[1])
            start = match.end()
        return [*pieces, text[start:]]

    def sub(self, replace: Callable[[re.Match[str]], str], text: str) -> str:
        pieces: list[str] = []
        start = 0
        for match in self.finditer(text):
            pieces += (text[start : match.start()], replace(match))
            start = match.end()
        return "".join((*pieces, text[start:])) if pieces else text


# Put around control tokens spelled out in a message: they are encoded as plain text. Put around control tokens in an
# answer's text: its parser tells them from text.
MARK_START, MARK_END = "\U000f0000", "\U000f0001"
# Put behind the text of a message that is left open. The blank behind it, which no template writes, is gone where a
# template trims its messages.
OPEN_MARK, OPEN_BLANK = "\U000f0002", "\u2003"

_MARKED = re.compile(f"{MARK_START}([^{MARK_END}]*){MARK_END}")


def control_mark(content: str) -> str:
    """Return a control token's name as no text can spell it."""
    return f"{MARK_START}{content}{MARK_END}"


def without_marks(text: str) -> str:
    return text.replace(MARK_START, "").replace(MARK_END, "").replace(OPEN_MARK, "")


def split_marked(text: str) -> list[str]:
    """Return the text in pieces: text at even places, names of control tokens from their `control_mark` at odd ones."""
    return _MARKED.split(text)

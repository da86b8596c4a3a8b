"""The bytes that the pieces of a vocabulary stand for."""

import re
from collections.abc import Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteLevelPieces:
    """Vocabularies whose every character stands for a byte (GPT-2 and its descendants)."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}

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

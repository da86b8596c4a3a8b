"""The longest text that one token of a vocabulary can stand for: a text longer than the context times this is too
long, as is known before it is tokenized."""

from collections.abc import Iterator, Mapping
from typing import Any

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

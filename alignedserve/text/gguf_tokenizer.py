"""Makes the tokenizer that a GGUF file describes, as the text of a tokenizer.json.

Two kinds are read: byte-level vocabularies with their merges (tokenizer.ggml.model gpt2), and SentencePiece
vocabularies with scores (llama), whose merges follow from the scores.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.gguf.file import GgufFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDING}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDING}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ANY_CASE}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ANY_CASE}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SPACE = "\u2581"  # SentencePiece's mark
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # among tokenizer.ggml.token_type
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Phi-3's other special tokens take the white space after them; its files do not say so, and llama.cpp knows it too.
_WITHOUT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_TOKEN_CHARACTERS = 1 << 10


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text into words.

    A pre-tokenizer cuts text into words before pairs are merged. Those that differ from the original model's would give
    other tokens, so that an unknown name (tokenizer.ggml.pre) is an error and not a guess.
    """

    pattern: str
    has_single_digits: bool = False  # every digit is a word, before the pattern is applied
    ignores_merges: bool = False  # a word that is a token is that token
    adds_bos: bool = False  # where the file does not say
    normal_form: str | None = None

    def definition(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if self.has_single_digits else []
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*steps, split, byte_level]}


_GPT2_LIKE = PreTokenizer(_GPT2)
_SINGLE_DIGITS = PreTokenizer(_GPT2, has_single_digits=True)
_LLAMA3_LIKE = PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN2_LIKE = PreTokenizer(_QWEN2, normal_form="NFC")

PRE_TOKENIZERS = {
    "gpt-2": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "llama-bpe": _LLAMA3_LIKE,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": _QWEN2_LIKE,
    "deepseek-r1-qwen": _QWEN2_LIKE,
    "stablelm2": PreTokenizer(_QWEN2),
    "gpt-4o": PreTokenizer(_GPT4O),
    "tekken": PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parts of a tokenizer as a model folder's files have them."""

    definition: str  # of tokenizer.json
    special_tokens: dict[str, str]
    chat_template: str | None


def gguf_tokenizer(file: GgufFile) -> TokenizerFiles:
    """Return the tokenizer in the file.

    Raises UnsupportedModel naming the kind of tokenizer that is not read, ModelError naming the entry that is wrong.
    """
    entries = JsonFields(file.metadata, str(file.path))
    vocabulary = _Vocabulary(file, entries)
    kind = entries.text("tokenizer.ggml.model")
    if kind == "gpt2":
        definition = _byte_level(file, entries, vocabulary)
    elif kind == "llama":
        definition = _sentence_piece(entries, vocabulary)
    else:
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.model {kind!r} is not one of gpt2, llama.")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and (not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS):
        raise entries.error("tokenizer.chat_template", "must be a text of at most a million characters")
    return TokenizerFiles(orjson.dumps(definition).decode(), vocabulary.special_tokens(), template)


class _Vocabulary:
    def __init__(self, file: GgufFile, entries: JsonFields) -> None:
        self._entries = entries
        self._strips_right = (
            file.metadata.get("general.architecture") == "phi3" and file.metadata.get("tokenizer.ggml.model") == "llama"
        )
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError(f"{file.path} holds no tokenizer (tokenizer.ggml.tokens).")
        if max(map(len, tokens)) > MAX_TOKEN_CHARACTERS:
            raise entries.error("tokenizer.ggml.tokens", f"has tokens of over {MAX_TOKEN_CHARACTERS} characters")
        self.tokens: list[str] = tokens
        # Of two tokens of the same text, which some converters leave as fillers, the first is used.
        self.ids: dict[str, int] = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
        self.kinds = self._numbers(file, "token_type", np.int32)
        self.scores = self._numbers(file, "scores", np.float32)

    def added_tokens(self) -> list[dict[str, Any]]:
        return [
            {
                "id": token_id,
                "content": self.tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": self._strips_right and self.tokens[token_id] not in _WITHOUT_STRIPPING,
                "normalized": False,
                "special": bool(self.kinds[token_id] != _USER_DEFINED),
            }
            for token_id in np.flatnonzero(np.isin(self.kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
            if self.tokens[token_id] and self.ids[self.tokens[token_id]] == token_id
        ]

    def special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name, entry in _SPECIAL_TOKENS.items():
            token_ids = self._entries.token_ids(f"tokenizer.ggml.{entry}", len(self.tokens))
            if token_ids:
                tokens[name] = self.tokens[token_ids[0]]
        return tokens

    def beginning(self, adds_bos: bool) -> dict[str, Any] | None:
        token = self.special_tokens().get("bos_token")
        if token is None or not self._entries.flag("tokenizer.ggml.add_bos_token", adds_bos):
            return None
        bos, first = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, bos, second],
            "special_tokens": {token: {"id": token, "ids": [self.ids[token]], "tokens": [token]}},
        }

    def _numbers(self, file: GgufFile, name: str, dtype: type) -> Any:
        values = file.metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return np.zeros(len(self.tokens), dtype)
        if not isinstance(values, np.ndarray) or values.dtype != dtype or len(values) != len(self.tokens):
            raise self._entries.error(
                f"tokenizer.ggml.{name}", f"must be a list of {len(self.tokens)} {dtype.__name__}"
            )
        return values


def _definition(vocabulary: _Vocabulary, model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": None,
        "pre_tokenizer": None,
        "model": {"type": "BPE", "vocab": vocabulary.ids, **model},
        **parts,
    }


def _byte_level(file: GgufFile, entries: JsonFields, vocabulary: _Vocabulary) -> dict[str, Any]:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise entries.error("tokenizer.ggml.merges", "is missing")
    pairs = [merge.split(" ") for merge in merges]
    ids = vocabulary.ids
    if not all(len(pair) == 2 and pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids for pair in pairs):
        raise entries.error("tokenizer.ggml.merges", "must be pairs of tokens that make a token")
    words = _pre_tokenizer(entries)
    return _definition(
        vocabulary,
        {"merges": pairs, "ignore_merges": words.ignores_merges},
        normalizer=None if words.normal_form is None else {"type": words.normal_form},
        pre_tokenizer=words.definition(),
        post_processor=vocabulary.beginning(words.adds_bos),
        decoder=_BYTE_LEVEL,
    )


def _pre_tokenizer(entries: JsonFields) -> PreTokenizer:
    name = entries.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"tokenizer.ggml.pre {name!r} is not a known pre-tokenizer ({known}).")
    return PRE_TOKENIZERS[name]


def _sentence_piece(entries: JsonFields, vocabulary: _Vocabulary) -> dict[str, Any]:
    if not bool(np.isfinite(vocabulary.scores).all()):
        raise entries.error("tokenizer.ggml.scores", "must be finite")
    adds_space = entries.flag("tokenizer.ggml.add_space_prefix", True)
    mark: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix: dict[str, Any] = {"type": "Prepend", "prepend": _SPACE}
    unknown = vocabulary.special_tokens().get("unk_token")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _definition(
        vocabulary,
        {"merges": _merges(vocabulary), "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
        normalizer={"type": "Sequence", "normalizers": [prefix, mark]} if adds_space else mark,
        post_processor=vocabulary.beginning(adds_bos=True),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges(vocabulary: _Vocabulary) -> list[list[str]]:
    """Return the pairs of tokens that make a token, those of the highest score first.

    SentencePiece merges what gives the token of the highest score, whichever pair it comes from.
    """
    ids = vocabulary.ids
    added = frozenset(np.flatnonzero(np.isin(vocabulary.kinds, (_UNKNOWN, _CONTROL))).tolist())
    plain = [token_id for token, token_id in ids.items() if len(token) > 1 and token_id not in added]
    order = sorted(plain, key=lambda token_id: (-float(vocabulary.scores[token_id]), token_id))
    merges = []
    for token_id in order:
        token = vocabulary.tokens[token_id]
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(ids[left], ids[right]) for left, right in cuts if left in ids and right in ids]
        merges += [[vocabulary.tokens[left], vocabulary.tokens[right]] for left, right in sorted(pairs)]
    return merges

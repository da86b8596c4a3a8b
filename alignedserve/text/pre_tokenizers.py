"""The pre-tokenizers of byte-level vocabularies, by the names that GGUF files give them (tokenizer.ggml.pre).

A pre-tokenizer cuts text into words before pairs are merged. Those that differ from the original model's would give
other tokens, so that an unknown name is an error and not a guess.
"""

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text into words."""

    pattern: str
    has_single_digits: bool = False  # every digit is a word, before the pattern is applied
    ignores_merges: bool = False  # a word that is a token is that token
    adds_bos: bool = False  # where the file does not say
    normal_form: str | None = None

    def definition(self) -> dict[str, Any]:
        """Return it as tokenizer.json has it."""
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

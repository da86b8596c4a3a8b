"""Prompts of a wanted length for load tests: meaningless words, different in every request.

They differ from the first word on, so that a server's prefix cache gives no advantage that real traffic would not have.
"""

import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from alignedserve.client.openai_client import CompletionApi, CompletionCall
from alignedserve.core.errors import ConfigError, ModelError
from alignedserve.gguf.file import GgufFile, is_gguf
from alignedserve.text.gguf_tokenizer import gguf_tokenizer
from lab.loadgen.load_plan import LoadRequest, TrafficClass

# Short, common words: one token each, with the space before them, in nearly every tokenizer.
# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city", "name", "team", "minute", "idea", "kid", "body", "back",
    "parent", "face", "level", "office", "door", "health", "person", "art", "war", "history", "party", "result",
    "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force",
)
# fmt: on
_FILLERS = (" a", " I", " 1", " x", ".", "?")  # one token each, in most tokenizers
CountTokens = Callable[[str], int]


def load_tokenizer(folder: Path, *, with_special: bool = False) -> CountTokens:
    """Return a function that counts the tokens of a text, with those that the tokenizer puts around it or without.

    `folder` holds a tokenizer.json, or is a GGUF file. Raises ConfigError.
    """
    try:
        tokenizer: Any = _read_tokenizer(folder)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=with_special).ids)


def _read_tokenizer(folder: Path) -> Tokenizer:
    if is_gguf(folder):
        return Tokenizer.from_str(gguf_tokenizer(GgufFile(folder)).definition)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def words(num_words: int, rng: random.Random) -> str:
    """Return `num_words` random words: about as many tokens."""
    return " ".join(rng.choices(WORDS, k=max(1, num_words)))


def exact_prompt(num_tokens: int, rng: random.Random, count_tokens: CountTokens) -> str:
    """Return a text of `num_tokens` tokens by `count_tokens`, or a little less where no filler fits its tokenizer."""
    chosen = rng.choices(WORDS, k=num_tokens)
    tokens_per_word = max(1.0, count_tokens(" ".join(chosen)) / len(chosen))
    del chosen[int(num_tokens / tokens_per_word) :]
    while chosen and count_tokens(" ".join(chosen)) > num_tokens:
        chosen.pop()
    text = " ".join(chosen)
    num_missing = num_tokens - count_tokens(text)
    candidates = (text + filler * num_missing for filler in _FILLERS)
    return next((candidate for candidate in candidates if count_tokens(candidate) == num_tokens), text or WORDS[0])


class WordLengths:
    """Words with their numbers of tokens, so that prompts get their planned length without tokenising.

    A tokenizer that divides texts at spaces has the same tokens for a word in every text. With any other one a prompt
    may be some percent shorter or longer.
    """

    def __init__(self, count_tokens: CountTokens) -> None:
        self._first = {word: count_tokens(word) for word in WORDS}
        before = count_tokens(WORDS[0])
        self._later = {word: count_tokens(f"{WORDS[0]} {word}") - before for word in WORDS}
        self._filler = next((word for word in _FILLERS if count_tokens(WORDS[0] + word * 3) == before + 3), "")

    def prompt(self, num_tokens: int, rng: random.Random) -> str:
        chosen: list[str] = []
        num_left = num_tokens
        for word in rng.choices(WORDS, k=num_tokens):
            lengths = self._later if chosen else self._first
            if lengths[word] > num_left:
                if chosen:
                    break
                word = min(lengths, key=lengths.__getitem__)
            chosen.append(word)
            num_left -= lengths[word]
        return " ".join(chosen) + self._filler * max(num_left, 0)


class CallMaker:
    """Turns planned requests into calls.

    `output_len` exact sends max_tokens (and, with `ignore_eos`, gets just as many); without it the model decides. The
    same seed makes the same texts; without one they are new, so that no prefix cache remembers them from a run before.
    """

    def __init__(
        self,
        *,
        model: str,
        endpoint: CompletionApi,
        seed: int | None = None,
        limits_output: bool = True,
        ignore_eos: bool = False,
    ) -> None:
        self._fixed: dict[str, Any] = {"model": model, "temperature": 0}
        if ignore_eos:
            self._fixed["ignore_eos"] = True  # an extension that vLLM, SGLang and AlignedServe share
        self._endpoint = endpoint
        self._seed = secrets.randbits(32) if seed is None else seed
        self._limits_output = limits_output
        self._prepared: dict[int, str] = {}
        self._lengths: WordLengths | None = None

    def calibrate(self, count_tokens: CountTokens) -> None:
        """Learn how many tokens words have, for prompts that are not prepared: those of closed loops."""
        self._lengths = WordLengths(count_tokens)

    def prepare(self, request: LoadRequest, count_tokens: CountTokens) -> None:
        """Make the prompt ahead of time, exactly as long as planned: too slow to do between two arrivals."""
        self._prepared[request.index] = exact_prompt(request.prompt_len, self._rng(request), count_tokens)

    def call(self, request: LoadRequest, traffic: TrafficClass) -> CompletionCall:
        """Return the call of one planned request."""
        prompt = self._prepared.pop(request.index, None)
        if prompt is None:
            make = words if self._lengths is None else self._lengths.prompt
            prompt = make(request.prompt_len, self._rng(request))
        body = dict(self._fixed)
        if self._endpoint is CompletionApi.CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self._limits_output:
            body["max_tokens"] = request.output_len
        if traffic.tier is not None:
            body["service_tier"] = traffic.tier
        return CompletionCall(self._endpoint, body, slo_headers(traffic))

    def _rng(self, request: LoadRequest) -> random.Random:
        return random.Random(f"{self._seed}/prompt/{request.index}")  # noqa: S311 - a workload, not a secret


def slo_headers(traffic: TrafficClass) -> dict[str, str]:
    """Return objectives as headers of AlignedServe's gateway; a server of another kind ignores them."""
    named = (("x-slo-ttft-ms", traffic.slo.ttft_s), ("x-slo-tpot-ms", traffic.slo.tpot_s))
    return {name: f"{seconds * 1000:g}" for name, seconds in named if seconds is not None}

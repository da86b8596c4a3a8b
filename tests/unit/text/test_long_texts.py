"""Long texts: what is known of their tokens beforehand, and that other threads go on while they are tokenized."""

import random
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from alignedserve.core.errors import ContextTooLong
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.token_texts import SlicedPattern, longest_token_len
from alignedserve.text.tokenizer import Tokenizer, check_length
from tests.support.marks import each

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.fixture(scope="module")
def pocket() -> Tokenizer:
    return Tokenizer.load(pocket_folder())


@pytest.mark.parametrize("text", [" ", "ab ", "<|end|>", "é", "\n"])
def test_a_text_has_no_fewer_tokens_than_its_length_tells(pocket: Tokenizer, text: str) -> None:
    least = pocket.least_tokens(text * 5000)
    assert 0 < least <= len(pocket.encode(text * 5000))
    check_length(least, least, param="prompt")
    with pytest.raises(ContextTooLong) as refused:
        check_length(least, least - 1, param="prompt")
    assert refused.value.num_tokens == least


def described(**fields: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": BYTES | {"hello": 300}, "byte_fallback": True}
    return {"model": model, "normalizer": SPACES, "added_tokens": [], **fields}


def test_vocabularies_that_keep_every_text() -> None:
    assert longest_token_len(described()) == 6
    assert longest_token_len(described(normalizer={"type": "NFC"})) == 18


@each(
    "fields",
    [
        {"model": {"type": "WordPiece", "vocab": BYTES}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "unk_token": "a", "fuse_unk": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}},
        {"normalizer": {"type": "Strip"}},
        {"normalizer": SPACES | {"pattern": {"Regex": " +"}}},
        {"normalizer": {"type": "Sequence", "normalizers": [SPACES | {"content": ""}]}},
        {"added_tokens": [{"content": "<s>", "lstrip": False, "rstrip": True}]},
    ],
)
def test_vocabularies_of_which_nothing_is_known(fields: dict[str, Any]) -> None:
    assert longest_token_len(described(**fields)) is None


def test_long_texts_have_the_tokens_of_short_ones(pocket: Tokenizer) -> None:
    words = ["the ", "<|end|>", "quick", "  ", "é", "\n"]
    chosen = random.Random(7)
    text = "".join(chosen.choice(words) for _ in range(2000))
    plain = pocket._tokenizer.encode(text, add_special_tokens=False).ids
    assert pocket.encode(text, add_special_tokens=False) == plain
    assert pocket.decode(plain, skip_special_tokens=False) == text


def test_slices_find_what_one_search_finds() -> None:
    pattern, chosen = "<\\|end\\|>|<\\|e|d", random.Random(3)
    text = "".join(chosen.choice(["<|end|>", "<|en", "x" * 1000, "d"]) for _ in range(4000))
    sliced = SlicedPattern(pattern, 7)
    assert [found.span() for found in sliced.finditer(text)] == [found.span() for found in re.finditer(pattern, text)]
    assert sliced.sub(lambda found: found[0].upper(), text) == re.sub(pattern, lambda found: found[0].upper(), text)
    grouped = SlicedPattern(f"({pattern})", 7)
    assert grouped.split(text) == re.split(f"({pattern})", text)


@pytest.mark.parametrize(
    "work",
    [
        lambda pocket: pocket.encode(" " * 200_000),
        lambda pocket: pocket.encode_pair(" " * 100_000, "a"),
        lambda pocket: pocket.decode([7] * 200_000),
    ],
    ids=["encode", "pair", "decode"],
)
def test_other_threads_go_on_meanwhile(pocket: Tokenizer, work: Callable[[Tokenizer], object]) -> None:
    num_ticks, is_over = 0, False

    def tick() -> None:
        nonlocal num_ticks
        while not is_over:
            time.sleep(1e-4)
            num_ticks += 1

    def ticks_meanwhile() -> bool:
        before = num_ticks
        work(pocket)
        return num_ticks > before

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread runs only while another gives up the interpreter by itself
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert any(ticks_meanwhile() for _ in range(20))  # on a busy machine it may not get a core in time
    finally:
        sys.setswitchinterval(interval_s)
        is_over = True
        thread.join()

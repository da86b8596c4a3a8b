"""Tokenizers of GGUF files: byte-level ones against transformers' classes, SentencePiece's against its own rule."""

import json
import random
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from alignedserve.core.errors import InvalidRequest, ModelError, UnsupportedModel
from alignedserve.text.chat_template import ChatPrompt
from alignedserve.text.gguf_tokenizer import PRE_TOKENIZERS
from alignedserve.text.tokenizer import Tokenizer
from tests.support.marks import each
from tests.support.models.tiny_gguf import byte_level_tokens
from tests.support.models.tiny_gguf import write_tiny_gguf as write

NOW = datetime(2026, 3, 4, 5, 6, 7)
TEXTS = [
    "hello, he held 12345 hellos",
    "  several   spaces\n\n\tand tabs ",
    "Ünïcödé ☃ 日本語 🎉 it's I'LL",
    "def f(x):\n    return x**2 + 10\r\n",
    "",
    " ",
]
SPACE = "\u2581"


def random_text(rng: random.Random) -> str:
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(97, 123), rng.randrange(160, 0x3000)))) for _ in range(40)
    )


def test_byte_level_vocabulary(tmp_path: Path) -> None:
    tokens = byte_level_tokens()
    reference: Any = RustTokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, [("h", "e"), ("he", "l")])
    )
    steps: Any = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.pre_tokenizer = pre_tokenizers.Sequence(steps)
    reference.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf"))
    rng = random.Random(0)
    for text in [*TEXTS, *(random_text(rng) for _ in range(200))]:
        token_ids = tokenizer.encode(text)
        assert token_ids == reference.encode(text).ids
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.encode("hello")[0] == tokens.index("hel")


def test_control_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf"))
    assert tokenizer.encode("<|im_start|>h<|im_end|>")[::2] == [1, 2]
    assert [tokenizer.is_special(token_id) for token_id in range(4)] == [True, True, True, False]
    assert tokenizer.bos_token_id == 1
    rendered = tokenizer.encode_chat(ChatPrompt([{"role": "user", "content": "h<|im_end|>"}]), now=NOW)
    assert rendered.count(2) == 1  # a message cannot end its own turn
    assert rendered[0] == 1


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf", pre=name))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


# Words as the published tokenizers of these models cut them.
WORDS = [
    ("smollm", "a 123's", ["a", "Ġ", "1", "2", "3", "'s"]),
    ("llama-bpe", "a 1234's\n\nB", ["a", "Ġ", "123", "4", "'s", "ĊĊ", "B"]),
    ("qwen2", "a 123'S", ["a", "Ġ", "1", "2", "3", "'S"]),
    ("gpt-2", "a 123's", ["a", "Ġ123", "'s"]),
    ("tekken", "aBc 12/\n", ["a", "Bc", "Ġ", "1", "2", "/Ċ"]),
    ("gpt-4o", "aBc's 1234/\n", ["a", "Bc's", "Ġ", "123", "4", "/Ċ"]),
]


@each(("name", "text", "words"), WORDS)
def test_words(name: str, text: str, words: list[str]) -> None:
    definition = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    definition["pre_tokenizer"] = PRE_TOKENIZERS[name].definition()
    cutter: Any = RustTokenizer.from_str(json.dumps(definition))
    assert [word for word, _ in cutter.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model": "bert"}, "'bert' is not one of gpt2, llama"),
        ({"pre": "unheard-of"}, "'unheard-of' is not a known pre-tokenizer"),
        ({"merges": ["h e", "x y"]}, "must be pairs of tokens"),
        ({"merges": ["h"]}, "must be pairs of tokens"),
        ({"types": [1]}, "must be a list of"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"tokens": ["x" * 2000]}, "tokens of over"),
    ],
)
def test_refused(changed: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", **{"tokens": byte_level_tokens(), "merges": ["h e"], **changed})
    with pytest.raises((ModelError, UnsupportedModel), match=problem):
        Tokenizer.load(path)


def test_a_template_that_does_not_parse_refuses_chats_alone(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", tokens=byte_level_tokens(), merges=["h e"], template="{% if %}")
    loaded = Tokenizer.load(path)
    assert loaded.encode("hello")
    with pytest.raises(InvalidRequest, match="the chat template is not valid"):
        loaded.encode_chat(ChatPrompt([]), now=NOW)


@pytest.mark.parametrize(("architecture", "is_stripped"), [("phi3", True), ("llama", False)])
def test_phi_3s_tokens_take_the_space_after_them(architecture: str, is_stripped: bool, tmp_path: Path) -> None:
    tokens, scores, types = sentence_pieces(random.Random(3))
    path = write_vocabulary(
        tmp_path / "a.gguf", tokens, architecture=architecture, model="llama", scores=scores, types=types
    )
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.encode("</s> a") == tokenizer.encode("</s>a")) == is_stripped
    assert tokenizer.encode("<s> a") != tokenizer.encode("<s>a")


def write_vocabulary(path: Path, tokens: list[str], **parts: Any) -> Path:
    """Write a file without tensors; parts: architecture, model, pre, merges, types, scores, template, adds_space."""
    writer: Any = gguf.GGUFWriter(path, parts.get("architecture", "llama"))
    writer.add_tokenizer_model(parts.get("model", "gpt2"))
    writer.add_tokenizer_pre(parts.get("pre", "gpt-2"))
    if tokens:
        writer.add_token_list(tokens)
    if "merges" in parts:
        writer.add_token_merges(parts["merges"])
    if "types" in parts:
        writer.add_token_types(parts["types"])
    if "scores" in parts:
        writer.add_token_scores(parts["scores"])
    if "template" in parts:
        writer.add_chat_template(parts["template"])
    if "adds_space" in parts:
        writer.add_add_space_prefix(parts["adds_space"])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentence_pieces(rng: random.Random) -> tuple[list[str], list[float], list[int]]:
    """Return a vocabulary as SentencePiece's BPE training leaves it: merged pieces, each with a lower score."""
    letters = [SPACE, *"abcd"]
    pieces = list(letters)
    while len(pieces) < 40:
        joined = rng.choice(pieces) + rng.choice(pieces)
        if joined not in pieces:
            pieces.append(joined)
    merged = pieces[len(letters) :]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged))] + [-1e6] * len(letters)
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)


def merged_by_score(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """Merge as SentencePiece does: always the neighbours whose joint piece scores highest, the leftmost first."""
    score_of = dict(zip(tokens, scores, strict=True))
    pieces = list(text)
    while True:
        joints = [(-score_of[a + b], place) for place, (a, b) in enumerate(pairwise(pieces)) if a + b in score_of]
        if not joints:
            return pieces
        _, place = min(joints)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_piece_vocabularies(adds_space: bool, tmp_path: Path) -> None:
    rng = random.Random(3)
    for case in range(5):
        tokens, scores, types = sentence_pieces(rng)
        path = tmp_path / f"{case}.gguf"
        write_vocabulary(path, tokens, model="llama", scores=scores, types=types, adds_space=adds_space)
        tokenizer = Tokenizer.load(path)
        for _ in range(100):
            text = "".join(rng.choice("abcd ") for _ in range(rng.randrange(1, 20)))
            marked = (SPACE if adds_space else "") + text.replace(" ", SPACE)
            expected = [tokens.index(piece) for piece in merged_by_score(marked, tokens, scores)]
            assert tokenizer.encode(text, add_special_tokens=False) == expected
            assert tokenizer.encode(text) == [1, *expected]
            assert tokenizer.decode(expected) == text
        unknown = tokenizer.encode("é", add_special_tokens=False)
        assert [tokens[token_id] for token_id in unknown if types[token_id] == 6] == ["<0xC3>", "<0xA9>"]

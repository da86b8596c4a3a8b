"""Vectors and scores from Python: through the scheduler and the executor, from text to numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.offline.llm import LLM
from tests.support.models.tiny_encoders import make_tiny_encoder, write_sentence_files

TEXTS = ["hello there", "a", "the quick brown fox jumps over the lazy dog", *(chr(97 + at) * at for at in range(1, 20))]


def reference(folder: Path, model: Any, text: str, second: str | None = None) -> Any:
    """Return what transformers makes of a text or a pair, as its own tokenizer reads it."""
    encoding = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, second)
    types = {"token_type_ids": torch.tensor([encoding.type_ids])} if second is not None else {}
    with torch.no_grad():
        return model(input_ids=torch.tensor([encoding.ids]), **types)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert"])
def test_vectors_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, family)
    write_sentence_files(tmp_path, "pooling_mode_mean_tokens", prompts={"query": "ask "}, default_prompt_name=None)
    llm = LLM(str(tmp_path), dtype="float32", max_running=8)
    try:
        vectors, queries = llm.embed(TEXTS), llm.embed(["b"], prompt_name="query")
        scores = llm.score([TEXTS[0]], TEXTS[1:3])
    finally:
        llm.close()
    expected = torch.stack([reference(tmp_path, model, text).last_hidden_state[0].mean(0) for text in TEXTS])
    expected /= expected.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(vectors, expected.numpy(), atol=2e-6)
    asked = reference(tmp_path, model, "ask b").last_hidden_state[0].mean(0)
    np.testing.assert_allclose(queries[0], (asked / asked.norm()).numpy(), atol=2e-6)
    assert scores == pytest.approx((expected[1:3] @ expected[0]).tolist(), abs=2e-6)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_of_pairs(family: str, tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, family, scores=True)
    llm = LLM(str(tmp_path), dtype="float32", max_running=8)
    try:
        scores = llm.score([TEXTS[0]], TEXTS)
        beside = llm.score([TEXTS[0]], ["", *TEXTS], errors="return")
        assert (beside[0] != beside[0], beside[1:]) == (True, scores)
        with pytest.raises(InvalidRequest):
            llm.embed(["a"])
    finally:
        llm.close()
    logits = [reference(tmp_path, model, TEXTS[0], text).logits[0, 0] for text in TEXTS]
    assert scores == pytest.approx(torch.sigmoid(torch.stack(logits)).tolist(), abs=2e-6)


def test_refusals(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 16]}))
    llm = LLM(str(tmp_path), dtype="float32")
    try:
        assert llm.embed(["abc"], dimensions=16).shape == (1, 16)
        assert llm.embed(["abc " * 60], truncate_prompt_tokens=-1).shape == (1, 48)
        for refused in (
            lambda: llm.embed(["abc"], dimensions=9),
            lambda: llm.embed(["abc"], prompt_name="query"),
            lambda: llm.embed([""]),
            lambda: llm.embed([]),
            lambda: llm.score(["a", "b"], ["c"]),
            lambda: llm.generate(["a"]),
        ):
            with pytest.raises(InvalidRequest):
                refused()
        with pytest.raises(ContextTooLong):
            llm.embed(["abc " * 60])
    finally:
        llm.close()

"""Embeddings of prompts: the output vector of the last token, whatever shares its step."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from alignedserve.core.request import SamplingParams
from tests.support.models.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

EMBEDDING = SamplingParams(max_tokens=0, wants_embedding=True)


def last_hidden(reference: Any, prompt: list[int]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        hidden = reference.base_model(torch.tensor([prompt])).last_hidden_state
    last: npt.NDArray[np.float32] = hidden[0, -1].numpy()
    return last


@pytest.mark.parametrize("family", ["opt", "llama", "gpt_neox", "gemma3_text"])
def test_embeddings_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, family)
    prompts = {"a": random_tokens(1, 33), "b": random_tokens(2, 1), "c": random_tokens(3, 12)}
    tiny = TinyEngine(tiny_decoder(tmp_path))
    for name, prompt in prompts.items():
        tiny.add(name, prompt, EMBEDDING)
    tiny.add("chat", random_tokens(4, 5))
    found = {}
    for slices in ({"a": 20, "chat": 5}, {"a": 12, "b": 1, "chat": 1}, {"a": 1, "c": 12, "chat": 1}):
        for token in tiny.step(**slices).sampled:
            found[str(token.request_id)] = token.embedding
    assert found.pop("chat") == b""
    assert found.keys() == prompts.keys()
    for name, prompt in prompts.items():
        embedding = np.frombuffer(found[name], np.float32)
        np.testing.assert_allclose(embedding, last_hidden(reference, prompt), atol=2e-5, rtol=1e-4)

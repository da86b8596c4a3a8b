"""Encoders give what transformers gives in float64, and a prompt's result is the same bits in any company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.encoder.encoder import Encoder, prompt_attention
from alignedserve.runtime.encoder.prompt_batch import EncoderPrompt, PromptBatch
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.encoder.encoder_weights import load_encoder_weights
from alignedserve.runtime.model.served_model import resolve_model
from kernels.cpu.packed_linear import Int8Linear
from tests.support.models.tiny_encoders import TINY_ENCODERS, make_tiny_encoder, write_sentence_files

BLOCK_SIZE = 16
LENGTHS = (1, 2, 17, 128, 40)


class Runner:
    """An encoder with blocks for several prompts."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, attention: str = "auto", quantization: str | None = None
    ) -> None:
        section = ModelSectionConfig(
            path=str(folder), dtype=str(dtype).removeprefix("torch."), quantization=quantization
        )
        served = resolve_model(section)
        config = served.encoder
        assert config is not None
        self.storage = BlockStorage(served.block_layout(BLOCK_SIZE), 256)
        self.weights = load_encoder_weights(folder, config, dtype, torch.device("cpu"), served.quantization)
        self.encoder = Encoder(config, self.weights, prompt_attention(attention, config, self.storage, dtype))

    def encode(self, prompts: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        first, own = 0, []
        for number, (token_ids, second_at) in enumerate(prompts):
            blocks = [BlockId(first + at) for at in range(-(-len(token_ids) // BLOCK_SIZE))]
            first += len(blocks)
            ids = np.array(token_ids, np.int64)
            own.append(EncoderPrompt(RequestId(str(number)), ids, second_at, blocks, wants_embedding=True))
        return self.encoder.encode(PromptBatch(own, BLOCK_SIZE, self.storage.slot_stride))


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed).integers
    return [draw(4, 50, length).tolist() for length in lengths]


def hidden_states(model: Any, token_ids: Sequence[int], second_at: int = 0) -> Tensor:
    """Compute the last hidden states of one prompt [tokens, hidden_size], by transformers."""
    with torch.no_grad():
        hidden: Tensor = model(**inputs_of(token_ids, second_at)).last_hidden_state[0]
    return hidden


def inputs_of(token_ids: Sequence[int], second_at: int) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.tensor([token_ids]), "attention_mask": torch.ones(1, len(token_ids))}
    if second_at:
        types = torch.zeros(1, len(token_ids), dtype=torch.int64)
        types[0, second_at:] = 1
        inputs["token_type_ids"] = types
    return inputs


def assert_near(computed: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert torch.cosine_similarity(computed.double(), expected, dim=0) > 1 - 1e-9
    torch.testing.assert_close(computed.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("family", TINY_ENCODERS)
def test_every_family_is_that_of_transformers(family: str, attention: str, tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, family)
    prompts = prompts_of(LENGTHS)
    vectors = Runner(tmp_path, attention=attention).encode([(prompt, 0) for prompt in prompts])
    for prompt, vector in zip(prompts, vectors, strict=True):
        assert_near(vector, hidden_states(model, prompt).mean(0))


def test_the_second_text_of_a_pair_has_its_own_type(tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, "bert")
    (prompt,) = prompts_of((30,))
    runner = Runner(tmp_path)
    pair, alone = runner.encode([(prompt, 12), (prompt, 0)])
    assert_near(pair, hidden_states(model, prompt, 12).mean(0))
    assert not torch.allclose(pair, alone)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"])
def test_scores_of_cross_encoders(family: str, tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, family, scores=True)
    second_at = 9 if family == "bert" else 0
    prompts = prompts_of((20, 50, 3))
    scores = Runner(tmp_path).encode([(prompt, second_at if len(prompt) > 9 else 0) for prompt in prompts])
    for prompt, score in zip(prompts, scores, strict=True):
        with torch.no_grad():
            logits = model(**inputs_of(prompt, second_at if len(prompt) > 9 else 0)).logits[0]
        torch.testing.assert_close(score.double(), torch.sigmoid(logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_a_cross_encoder_may_give_its_output_as_it_is(settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, "bert", scores=True, **settings)
    (prompt,) = prompts_of((20,))
    (score,) = Runner(tmp_path).encode([(prompt, 0)])
    with torch.no_grad():
        logits = model(**inputs_of(prompt, 0)).logits[0]
    torch.testing.assert_close(score.double(), logits, atol=1e-5, rtol=1e-5)


def weighted(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=torch.float64)[:, None]
    return (hidden * weights).sum(0) / weights.sum()


@pytest.mark.parametrize(
    ("flag", "pool"),
    [
        ("pooling_mode_cls_token", lambda hidden: hidden[0]),
        ("pooling_mode_mean_tokens", lambda hidden: hidden.mean(0)),
        ("pooling_mode_max_tokens", lambda hidden: hidden.max(0).values),
        ("pooling_mode_mean_sqrt_len_tokens", lambda hidden: hidden.sum(0) / len(hidden) ** 0.5),
        ("pooling_mode_weightedmean_tokens", weighted),
        ("pooling_mode_lasttoken", lambda hidden: hidden[-1]),
    ],
)
def test_modes_of_pooling(flag: str, pool: Any, tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, "bert")
    write_sentence_files(tmp_path, flag)
    (prompt,) = prompts_of((21,))
    (vector,) = Runner(tmp_path).encode([(prompt, 0)])
    assert_near(vector, pool(hidden_states(model, prompt)))


def test_a_dense_layer_follows_pooling(tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, "distilbert")
    dense = (32, "torch.nn.modules.activation.Tanh")
    weight = write_sentence_files(tmp_path, "pooling_mode_mean_tokens", dense=dense)
    assert weight is not None
    (prompt,) = prompts_of((21,))
    (vector,) = Runner(tmp_path).encode([(prompt, 0)])
    assert_near(vector, torch.tanh(weight @ hidden_states(model, prompt).mean(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_is_the_same_bits_in_any_company(dtype: torch.dtype, tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    runner = Runner(tmp_path, dtype)
    draw = np.random.default_rng(1)
    prompts = prompts_of(draw.integers(1, 129, 24).tolist(), seed=2)
    alone = [runner.encode([(prompt, 0)])[0] for prompt in prompts]
    for _ in range(4):
        order = draw.permutation(len(prompts))[: int(draw.integers(2, 24))].tolist()
        for place, vector in zip(order, runner.encode([(prompts[at], 0) for at in order]), strict=True):
            assert torch.equal(vector, alone[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "bert_tanh", "roberta", "distilbert"])
def test_weights_of_8_bits_are_near(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path, family)
    runner = Runner(tmp_path, dtype, quantization="int8")
    assert all(isinstance(layer.qkv, Int8Linear) for layer in runner.weights.layers)
    prompts = prompts_of(LENGTHS)
    for prompt, vector in zip(prompts, runner.encode([(prompt, 0) for prompt in prompts]), strict=True):
        expected = hidden_states(model, prompt).mean(0)
        assert torch.cosine_similarity(vector.double(), expected, dim=0) > 0.999

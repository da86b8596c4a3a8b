"""Encoders give what transformers gives in float64, and a prompt's result is the same bits in any company."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.offline.llm import LLM
from alignedserve.runtime.encoder.encoder import Encoder, prompt_attention
from alignedserve.runtime.encoder.executor import EncoderExecutor
from alignedserve.runtime.encoder.prompt_batch import EncoderPrompt, PromptBatch
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.executor import make_executor
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


# The executor of encoders: prompts in slices, several passes, failures.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    make_tiny_encoder(folder, "bert")
    return folder


def executor_of(folder: Path) -> EncoderExecutor:
    served = resolve_model(ModelSectionConfig(path=str(folder), dtype="float32"))
    made = make_executor(served, EngineSizes(1 << 22, 64, BLOCK_SIZE, num_threads=1))
    assert isinstance(made, EncoderExecutor)
    return made


def addition(name: str, length: int, first_block: int, num_blocks: int) -> Addition:
    token_ids = tuple(4 + (at * 7 + len(name)) % 40 for at in range(length))
    sampling = SamplingParams(max_tokens=0, wants_embedding=True)
    request = Request(RequestId(name), token_ids, sampling, reply_to="", arrival_s=0.0)
    return Addition(request, (), tuple(BlockId(first_block + at) for at in range(num_blocks)))


def run(
    executor: EncoderExecutor,
    additions: tuple[Addition, ...],
    slices: tuple[tuple[str, int], ...],
    extensions: tuple[tuple[RequestId, tuple[BlockId, ...]], ...] = (),
) -> IterationCompleted:
    own = tuple((RequestId(name), count) for name, count in slices)
    return executor.run_iteration(RunIteration((), additions, extensions, own))


def test_a_prompt_in_slices_has_the_vector_of_the_whole_one(folder: Path) -> None:
    executor = executor_of(folder)
    (whole,) = run(executor, (addition("a", 40, 0, 3),), (("a", 40),)).sampled
    assert len(whole.embedding) == 4 * 48
    executor.run_iteration(RunIteration((RequestId("a"),), (), (), ()))
    assert run(executor, (addition("a", 40, 7, 2),), (("a", 25),)).sampled == ()
    extended = ((RequestId("a"), (BlockId(3),)),)
    (sliced,) = run(executor, (), (("a", 15),), extended).sampled
    assert sliced.embedding == whole.embedding


def test_more_prompts_than_fit_one_pass(folder: Path) -> None:
    executor = executor_of(folder)
    several = tuple(addition(f"{number}", 120, number * 8, 8) for number in range(12))
    sampled = run(executor, several, tuple((f"{number}", 120) for number in range(12))).sampled
    assert {token.request_id for token in sampled} == {str(number) for number in range(12)}
    assert len({token.embedding for token in sampled}) == 2  # by the length of their names


def test_a_prompt_whose_vector_is_not_a_number_fails_alone(folder: Path) -> None:
    executor = executor_of(folder)
    executor._encoder._weights.words[5] = torch.nan
    several = (addition("a", 1, 0, 1), addition("bb", 1, 1, 1))  # token 5, token 6
    completed = run(executor, several, (("a", 1), ("bb", 1)))
    assert [token.request_id for token in completed.sampled] == ["bb"]
    assert completed.failed == ("a",)


def test_grammars_are_refused(folder: Path) -> None:
    executor = executor_of(folder)
    executor.check_grammar("")
    with pytest.raises(InvalidRequest):
        executor.check_grammar("start: /a/")


# Vectors and scores from Python: through the scheduler and the executor, from text to numbers.

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

"""Two and more ranks compute what one computes: every family, form of weights and of cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignedserve.core.request import SampledToken, SamplingParams
from kernels.cpu.rank_exchange import has_rank_exchange
from tests.support.devices.ranked_engines import RankedEngine
from tests.support.models.quantized_checkpoints import FORMATS, quantize_folder
from tests.support.models.tiny_engines import GREEDY, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_models import TINY_MODELS, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_rank_exchange(), reason="the native kernels are not built")]

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=100)
SCORED = SamplingParams(temperature=0.0, max_tokens=100, num_logprobs=3, num_prompt_logprobs=2)
NUM_TOKENS = 8
TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 5e-2
NARROW_TOLERANCE = 1e-2  # where products round their inputs, those of one rank by itself


@contextmanager
def ranked(folder: Path, size: int, **options: str | None) -> Iterator[RankedEngine]:
    engine = RankedEngine(folder, size, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.ranks.close()


def answers(engine: TinyEngine) -> dict[str, list[SampledToken]]:
    """Prompts whole and in chunks, answers alone and together: of each what was sampled."""
    prompts = {name: random_tokens(seed, 9 + 7 * seed) for seed, name in enumerate(("greedy", "seeded", "scored"), 1)}
    engine.add("greedy", prompts["greedy"], GREEDY)
    engine.add("seeded", prompts["seeded"], SEEDED)
    engine.add("scored", prompts["scored"], SCORED)
    engine.step(scored=11, greedy=5)
    found = {"scored": engine.generate("scored", 2)}
    found["greedy"] = engine.generate("greedy", NUM_TOKENS)
    found["seeded"] = engine.generate("seeded", NUM_TOKENS, "greedy")
    found["scored"] += engine.generate("scored", NUM_TOKENS, "seeded", "greedy")
    return found


def check_equal(
    one: dict[str, list[SampledToken]], several: dict[str, list[SampledToken]], tolerance: float = TOLERANCE
) -> None:
    for name, expected in one.items():
        assert [token.token_id for token in several[name]] == [token.token_id for token in expected], name
    for own, other in zip(one["scored"], several["scored"], strict=True):
        assert own.logprob is not None
        assert other.logprob is not None
        assert other.logprob.logprob == pytest.approx(own.logprob.logprob, abs=tolerance)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_two_ranks_compute_what_one_does(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    one = answers(TinyEngine(tiny_decoder(tmp_path)))
    with ranked(tmp_path, 2) as engine:
        check_equal(one, answers(engine))


@pytest.mark.parametrize("family", ["llama_mha", "qwen3_moe"])
def test_four_ranks_compute_what_one_does(family: str, tmp_path: Path) -> None:
    """In the second, key heads are fewer than ranks, and held by several of them."""
    make_tiny_model(tmp_path, family)
    one = answers(TinyEngine(tiny_decoder(tmp_path)))
    with ranked(tmp_path, 4) as engine:
        check_equal(one, answers(engine))


def test_a_cache_of_8_bits_is_the_same(tmp_path: Path) -> None:
    """Its scales are of a token and a head, which one rank has."""
    make_tiny_model(tmp_path, "llama_mha")
    one = answers(TinyEngine(tiny_decoder(tmp_path), cache_dtype="int8"))
    with ranked(tmp_path, 2, cache_dtype="int8") as engine:
        check_equal(one, answers(engine))


@pytest.mark.parametrize("name", ["awq", "w4a16 with zero points", "fp8 in blocks", "gptq of 8 bits"])
def test_quantised_checkpoints_are_divided_at_blocks(name: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama_mha", intermediate_size=128)
    quantize_folder(tmp_path, FORMATS[name])
    one = answers(TinyEngine(tiny_decoder(tmp_path)))
    with ranked(tmp_path, 2) as engine:
        check_equal(one, answers(engine), NARROW_TOLERANCE)


@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "w8a8"])
def test_blocks_that_no_rank_has_whole_are_unpacked(name: str, tmp_path: Path) -> None:
    """An inner width of 96 has three blocks. One rank rounds the inputs of its products, which unpacked ones do not."""
    make_tiny_model(tmp_path, "llama_mha", intermediate_size=96)
    quantize_folder(tmp_path, FORMATS[name])
    one = first_logprobs(TinyEngine(tiny_decoder(tmp_path)))[0]
    with ranked(tmp_path, 2) as engine:
        assert first_logprobs(engine)[0] == pytest.approx(one, abs=ROUNDED_TOLERANCE)


@pytest.mark.parametrize("types", [("Q8_0",), ("Q4_K", "Q6_K")])
def test_gguf_files_are_divided(types: tuple[str, ...], tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", types=types)
    one = first_logprobs(TinyEngine(tiny_decoder(path)))[0]
    with ranked(path, 2) as engine:
        assert first_logprobs(engine)[0] == pytest.approx(one, abs=ROUNDED_TOLERANCE)


def test_a_row_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2")
    with ranked(tmp_path, 2, dtype="bfloat16") as engine:
        alone = first_logprobs(engine, "alone")
        engine.add("other", random_tokens(9, 31), SEEDED)
        engine.add("another", random_tokens(8, 3), SEEDED)
        engine.step(other=31, another=3)
        assert first_logprobs(engine, "beside", "other", "another") == alone


def first_logprobs(engine: TinyEngine, name: str = "one", *companions: str) -> list[float]:
    """Return the log-probabilities of the first tokens after a prompt."""
    engine.add(name, random_tokens(4, 20), SCORED)
    return [token.logprob.logprob for token in engine.generate(name, 4, *companions) if token.logprob is not None]

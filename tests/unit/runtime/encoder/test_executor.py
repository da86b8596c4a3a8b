"""The executor of encoders: prompts in slices, several passes, failures."""

from pathlib import Path

import pytest
import torch

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.runtime.encoder.executor import EncoderExecutor
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.executor import make_executor
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.tiny_encoders import make_tiny_encoder

BLOCK_SIZE = 16


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

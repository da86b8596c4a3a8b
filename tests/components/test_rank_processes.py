"""Ranks as processes: the same tokens as one rank, and what happens when a rank dies or hangs."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from alignedserve import LLM, LoRARequest, SamplingParams
from alignedserve.core.errors import ModelError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.sequence_table import NewSequence
from alignedserve.runtime.engine.engine import Engine, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.ranks.rank_group import RankGroup
from alignedserve.runtime.engine.ranks.rank_spec import RankEngineSpec, load_shard, make_storage
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.runtime.model.weight_files import ModelSpec
from kernels.cpu.rank_exchange import ExchangeBroken, has_rank_exchange
from tests.support.child_processes import children_running
from tests.support.models.lora_folders import write_adapter
from tests.support.models.tiny_engines import GREEDY, random_tokens
from tests.support.models.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_rank_exchange(), reason="the native kernels are not built")]

PROMPT = random_tokens(1, 20)
NAME = RequestId("request")
TIMEOUT_S = 5.0
FOLLOWER = "follower_process"
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "llama")
    return path


def spec_of(folder: Path, size: int = 2, timeout_s: float = 60.0) -> RankEngineSpec:
    return RankEngineSpec(
        model=ModelSpec(read_config(folder), folder, "float32"),
        size=size,
        devices=("cpu",) * size,
        block_size=16,
        num_blocks=8,
        max_sequences=4,
        max_context_len=100,
        attention="auto",
        cache_dtype="float32",
        num_threads=1,
        timeout_s=timeout_s,
    )


class Started:
    """A group of ranks and the engine of the first."""

    def __init__(self, spec: RankEngineSpec, *, uses_process_group: bool = False) -> None:
        self.group = RankGroup(spec, uses_process_group=uses_process_group)
        try:
            decoder, storage = load_shard(spec, self.group.collectives), make_storage(spec, 0, self.group.meeting)
            self.group.wait()
        except BaseException:
            self.group.close()
            raise
        self.engine = Engine(
            model=decoder,
            storage=storage,
            options=EngineOptions(max_sequences=4, max_context_len=100),
            ranks=self.group,
        )

    def start(self) -> list[int]:
        blocks = tuple(BlockId(block) for block in range(4))
        self.engine.add_sequence(NewSequence(NAME, tuple(PROMPT), len(PROMPT), 0, blocks, GREEDY))
        return self.step(len(PROMPT))

    def step(self, count: int = 1) -> list[int]:
        return [token.token_id for token in self.engine.execute([StepSlice(NAME, count)]).sampled]


@pytest.fixture
def ranks(folder: Path) -> Iterator[Started]:
    started = Started(spec_of(folder, timeout_s=TIMEOUT_S))
    yield started
    started.group.kill()
    started.group.close()


@pytest.mark.parametrize("uses_process_group", [False, True])
def test_processes_generate_what_one_does(folder: Path, *, uses_process_group: bool) -> None:
    tokens = []
    for size in (1, 2):
        started = Started(spec_of(folder, size), uses_process_group=uses_process_group and size > 1)
        tokens.append(started.start() + [token for _ in range(10) for token in started.step()])
        assert len(children_running(FOLLOWER)) == size - 1
        started.group.close()
        assert not children_running(FOLLOWER)
    assert tokens[0] == tokens[1]


def test_a_killed_rank_fails_the_next_step(ranks: Started) -> None:
    ranks.start()
    children_running(FOLLOWER)[0].kill()
    with pytest.raises(ExchangeBroken):
        ranks.step()


def test_a_rank_that_hangs_is_noticed(ranks: Started) -> None:
    ranks.start()
    (rank,) = children_running(FOLLOWER)
    rank.suspend()
    with pytest.raises(ExchangeBroken):
        ranks.step()
    ranks.group.kill()
    ranks.group.close()
    assert not rank.is_running()


class Reached:
    """An event of a device that comes to it after so many seconds, or never."""

    def __init__(self, after_s: float) -> None:
        self._at_s = time.monotonic() + after_s

    def is_done(self) -> bool:
        return time.monotonic() >= self._at_s

    def synchronize(self) -> None:
        assert self.is_done(), "a wait that may never end"


def test_a_sum_that_a_device_never_ends_fails_the_step(ranks: Started) -> None:
    """As where a rank hangs, and lives, while others replay a graph: nothing but the clock tells."""
    ranks.group.wait_for(Reached(0.3))
    began_s = time.monotonic()
    with pytest.raises(ExchangeBroken):
        ranks.group.wait_for(Reached(math.inf))
    assert TIMEOUT_S <= time.monotonic() - began_s < 2 * TIMEOUT_S


def test_a_rank_that_ends_within_a_sum_of_a_device_fails_the_step_at_once(ranks: Started) -> None:
    began_s = time.monotonic()
    children_running(FOLLOWER)[0].kill()
    with pytest.raises(ExchangeBroken):
        ranks.group.wait_for(Reached(math.inf))
    assert time.monotonic() - began_s < TIMEOUT_S


def test_what_a_rank_cannot_load_is_told_by_name(folder: Path) -> None:
    spec = spec_of(folder)
    broken = replace(spec.model.config, vocab_size=100)
    with pytest.raises(ModelError, match="has shape"):
        Started(msgspec.structs.replace(spec, model=replace(spec.model, config=broken)))


def test_adapters_are_divided_too(tmp_path: Path) -> None:
    """Each prompt with its adapter, by the Python API, beside one without."""
    model = read_config(pocket_folder())
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, model, seed=seed)
    asked = [None, *(LoRARequest(name, tmp_path / name) for name in ("one", "two"))]
    found = []
    for size in (1, 2):
        llm = LLM("pocket", dtype="float32", memory_bytes=16 * 2**20, enable_lora=True, tensor_parallel_size=size)
        outputs = llm.generate(["what is 4 + 5?"] * 3, SAMPLING, lora_request=asked)
        found.append([output.token_ids for output in outputs])
        llm.close()
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


@pytest.mark.parametrize("end", ["", "llm.close()", "del llm", "sys.exit(0)"])
def test_a_program_with_two_ranks_ends_in_silence(end: str) -> None:
    made = "LLM('pocket', memory_bytes=2**22, tensor_parallel_size=2)"
    program = f"import sys; from alignedserve import LLM; llm = {made}; llm.chat('spell otter'); {end}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_model_that_nobody_has_any_more_ends_its_ranks() -> None:
    llm = LLM("pocket", memory_bytes=2**22, tensor_parallel_size=2)
    assert children_running(FOLLOWER)
    del llm
    assert not children_running(FOLLOWER)

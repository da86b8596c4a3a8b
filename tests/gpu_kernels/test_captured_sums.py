"""Sums of ranks within recorded graphs: recorded once ranks have met, alike on all, replayed in one order."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.device.collectives import Collectives
from kernels.cpu.rank_exchange import ExchangeBroken, has_rank_exchange
from tests.support.devices.ranked_engines import RankedEngine, make_collectives
from tests.support.models.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytest.importorskip("triton")

from triton.runtime import interpreter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_rank_exchange(), reason="the native kernels are not built"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what GPUs would do"),
]

FALLEN = "CUDA error: GPU has fallen off the bus"
PROMPT = random_tokens(3, 9)
Call = tuple[str, tuple[int, ...]]


class CapturedRank:
    """Implements Collectives and Capture: notes what one rank adds up, records and replays.

    Sums find each other by the order of calls, as NCCL's do: ranks that replayed different graphs would mix theirs.
    """

    exchange = None  # no native pass: the sums are the graph's

    def __init__(self, collectives: Collectives) -> None:
        self.rank, self.size = collectives.rank, collectives.size
        self._collectives = collectives
        self._recording: list[Call] | None = None
        self.num_met = 0  # calls before the first graph
        self.graphs: list[list[Call]] = []
        self.replayed: list[int] = []
        self.is_lost = False

    def all_reduce_(self, x: Tensor) -> Tensor:
        self._note("sum", x)
        return self._collectives.all_reduce_(x)

    def gather(self, x: Tensor) -> Tensor | None:
        self._note("gather", x)
        return self._collectives.gather(x)

    def break_off(self) -> None:
        self._collectives.break_off()

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()
        number = len(self.graphs)
        self._recording = []
        work()
        self.graphs.append(self._recording)
        self._recording = None

        def replay() -> Tensor:
            if self.is_lost:
                self.break_off()  # as who watches its process does
                raise torch.AcceleratorError(FALLEN, 0)
            self.replayed.append(number)
            return work()

        return replay

    def _note(self, kind: str, x: Tensor) -> None:
        if self._recording is not None:
            self._recording.append((kind, tuple(x.shape)))
        elif not self.graphs:
            self.num_met += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "llama")
    return path


@pytest.fixture
def ranks() -> list[CapturedRank]:
    return [CapturedRank(end) for end in make_collectives(2)]


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and the interpreter replaces functions of its modules while a kernel runs.

    It parses a kernel's source before its first run, which two threads cannot do at once before Python 3.11.8 (CPython
    issue 106905).
    """
    turn = threading.RLock()

    def alone(work: Callable[..., Any]) -> Callable[..., Any]:
        def work_alone(*args: Any, **options: Any) -> Any:
            with turn:
                return work(*args, **options)

        return work_alone

    for owner, name in ((interpreter.GridExecutor, "__call__"), (interpreter.InterpretedFunction, "rewrite")):
        monkeypatch.setattr(owner, name, alone(getattr(owner, name)))


@pytest.fixture
def engine(folder: Path, ranks: list[CapturedRank]) -> Iterator[RankedEngine]:
    made = RankedEngine(folder, 2, attention=TRITON, collectives=ranks, captures=ranks, max_sequences=4)
    yield made
    if not any(rank.is_lost for rank in ranks):
        made.ranks.close()


@pytest.mark.slow
def test_all_ranks_record_the_same_graphs_and_replay_them_in_one_order(
    folder: Path, engine: RankedEngine, ranks: list[CapturedRank]
) -> None:
    plain = TinyEngine(tiny_decoder(folder))
    found = []
    for made in (engine, plain):
        for name in "abc":
            made.add(name, PROMPT[: 3 + ord(name) % 5])
        found.append([token.token_id for token in made.generate("a", 3)])
        found.append([token.token_id for token in made.generate("b", 3, "a")])
        found.append([token.token_id for token in made.generate("c", 3, "a", "b")])
    assert found[:3] == found[3:]
    engine.ranks.close()
    first, second = ranks
    assert first.graphs == second.graphs
    assert len(first.graphs) == 3  # of one, two, and three or four rows
    num_layers = engine.engine.model.config.num_layers
    for calls in first.graphs:  # two sums a layer, one of the embedding, logits to the first
        assert [kind for kind, _ in calls] == ["sum"] * (2 * num_layers + 1) + ["gather"]
    assert first.replayed == second.replayed
    assert len(set(first.replayed)) == 3
    assert all(rank.num_met > 0 for rank in ranks)


def test_a_rank_that_is_lost_in_a_replay_fails_the_step(engine: RankedEngine, ranks: list[CapturedRank]) -> None:
    engine.add("a", PROMPT)
    engine.generate("a", 2)
    ranks[1].is_lost = True
    with pytest.raises(ExchangeBroken):
        engine.step(a=1)
    with pytest.raises(ExchangeBroken):
        engine.step(a=1)


def test_results_of_sums_that_broke_unseen_are_not_used(
    engine: RankedEngine, ranks: list[CapturedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's sums within a graph end when they are aborted, and raise nothing."""
    engine.add("a", PROMPT)
    engine.generate("a", 2)
    has_ended = threading.Event()

    def aborted(x: Tensor) -> Tensor:
        has_ended.wait(60.0)
        return x

    monkeypatch.setattr(ranks[0], "all_reduce_", aborted)
    monkeypatch.setattr(ranks[0], "gather", lambda x: torch.stack([x, x]))
    monkeypatch.setattr(
        engine.ranks, "wait_for", lambda _event: (_ for _ in ()).throw(ExchangeBroken("a rank has ended"))
    )
    ranks[1].is_lost = True
    has_ended.set()
    with pytest.raises(ExchangeBroken):
        engine.step(a=1)

"""Requests that are offloaded, moved, evicted and resumed at random generate what they generate undisturbed, whatever
order a device's streams choose; and an order that no wait ensures shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alignedserve.runtime.device.streams import CudaStreams, DeviceStreams, HostStreams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.next_step import ChunkGuess, NextStep
from alignedserve.runtime.engine.steps.step import StepLaunch
from alignedserve.runtime.kv.direct_copies import PendingCopies
from tests.harnesses.engine_histories import EngineHistory, generated_alone, undisturbed
from tests.support.devices.checked_streams import CheckedStream, CheckedStreams
from tests.support.marks import many, slow
from tests.support.models.tiny_engines import tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

NUM_HISTORIES, NUM_SLOW_HISTORIES = 30, many(4_000)
NUM_ROUNDED_HISTORIES, NUM_SLOW_ROUNDED_HISTORIES = 20, many(100)
MAX_HISTORIES_TO_SHOW = 400
NUM_HISTORIES_ON_A_GPU = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama_mha")
    make_tiny_model(folder, "llama_mha")
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return tiny_decoder(folder)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> list[list[int]]:
    return generated_alone(decoder, CheckedStreams)


def is_undisturbed(
    decoder: Decoder,
    alone: list[list[int]],
    seed: int,
    folder: Path,
    make_streams: Callable[[int], DeviceStreams],
    *,
    launches_ahead: bool = False,
) -> tuple[bool, int]:
    history = EngineHistory(decoder, make_streams, seed, folder, launches_ahead=launches_ahead)
    try:
        history.run()
    finally:
        history.close()
    generated = sum(len(request.tokens) - request.prompt_len for request in history.requests)
    return undisturbed(history.requests, alone), generated


def check(
    decoder: Decoder, alone: list[list[int]], seeds: range, folder: Path, *, launches_ahead: bool = False
) -> None:
    num_generated = 0
    for seed in seeds:
        holds, generated = is_undisturbed(decoder, alone, seed, folder, CheckedStreams, launches_ahead=launches_ahead)
        assert holds, f"seed {seed}"
        num_generated += generated
    assert num_generated > 10 * len(seeds)


def test_whatever_happens_to_a_request_its_tokens_are_the_same(
    decoder: Decoder, alone: list[list[int]], tmp_path: Path
) -> None:
    check(decoder, alone, range(NUM_HISTORIES), tmp_path)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the steps that are launched ahead, and the sequences whose results are taken and dropped."""
    counts = {"launched": 0, "taken": 0, "dropped": 0, "lent": 0, "chunks": 0, "lent to chunks": 0}
    keep, take = NextStep.keep, NextStep.take_launched

    def kept(self: NextStep, launched: StepLaunch) -> None:
        counts["launched"] += 1
        chunks = launched.step.rows[launched.step.counts > 1]
        counts["chunks"] += len(chunks)
        if launched.loans is not None:
            counts["lent"] += len(launched.loans.rows)
            counts["lent to chunks"] += np.isin(launched.loans.rows, chunks).sum()
        keep(self, launched)

    def took(self: NextStep, slices: Any) -> Any:
        before = self._launched
        launched, rest = take(self, slices)
        if before is not None:
            num_taken = 0 if launched is None else len(launched.rows)
            counts["taken"] += num_taken
            counts["dropped"] += len(before.step.sampled_rows) - num_taken
        return launched, rest

    monkeypatch.setattr(NextStep, "keep", kept)
    monkeypatch.setattr(NextStep, "take_launched", took)
    return counts


def test_steps_that_are_launched_ahead_of_their_tokens_change_none(
    decoder: Decoder, alone: list[list[int]], tmp_path: Path, taken: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts go on with every step, whatever became of the chunk before."""
    monkeypatch.setattr(ChunkGuess, "is_trusted", property(lambda _: True, lambda *_: None), raising=False)
    check(decoder, alone, range(NUM_HISTORIES), tmp_path, launches_ahead=True)
    assert min(taken.values()) > NUM_HISTORIES, taken


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launches_ahead", [False, True])
def test_many_histories(decoder: Decoder, alone: list[list[int]], tmp_path: Path, launches_ahead: bool) -> None:
    check(decoder, alone, range(NUM_SLOW_HISTORIES), tmp_path, launches_ahead=launches_ahead)


@pytest.mark.parametrize("num_histories", [NUM_ROUNDED_HISTORIES, *slow(NUM_SLOW_ROUNDED_HISTORIES)])
def test_rounded_copies_are_the_same_whatever_the_order(decoder: Decoder, num_histories: int, tmp_path: Path) -> None:
    """Against copies that happen at once: what is rounded differs from what a request generates alone."""
    num_generated = 0
    for seed in range(num_histories):
        tokens: list[list[list[int]]] = []
        kinds: tuple[Callable[[int], DeviceStreams], ...] = (lambda _: HostStreams(), CheckedStreams)
        for number, make_streams in enumerate(kinds):
            folder = tmp_path / f"{seed}-{number}"
            folder.mkdir()
            history = EngineHistory(decoder, make_streams, seed, folder, has_int8_swaps=True)
            history.run()
            history.close()
            tokens.append([request.tokens for request in history.requests])
        assert tokens[0] == tokens[1], f"seed {seed}"
        num_generated += sum(map(len, tokens[0]))
    assert num_generated > 10 * num_histories


@pytest.mark.gpu
def test_streams_of_a_gpu_keep_the_order_too(folder: Path, tmp_path: Path) -> None:
    device = torch.device("cuda")
    decoder = tiny_decoder(folder, device=device)
    alone = generated_alone(decoder, lambda _: CudaStreams(device))
    for seed in range(NUM_HISTORIES_ON_A_GPU):
        holds, _ = is_undisturbed(decoder, alone, seed, tmp_path, lambda _: CudaStreams(device))
        assert holds, f"seed {seed}"


def _nothing(*_: Any) -> None:
    """Do nothing, in place of a wait."""


@pytest.mark.parametrize(
    ("owner", "wait"),
    [
        (PendingCopies, "wait"),  # of a stream for what other streams do with the same blocks
        (PendingCopies, "synchronize"),  # of the host, before a transfer
        (CheckedStream, "wait"),  # of a prefetch for its own offload, as well
    ],
)
def test_a_wait_that_is_left_out_shows(
    owner: Any, wait: str, decoder: Decoder, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, wait, _nothing)
    for seed in range(MAX_HISTORIES_TO_SHOW):
        try:
            holds, _ = is_undisturbed(decoder, alone, seed, tmp_path, CheckedStreams)
        except AssertionError:
            return
        if not holds:
            return
    pytest.fail(f"{MAX_HISTORIES_TO_SHOW} histories without a wait, and nothing was wrong")


@pytest.mark.slow
def test_a_step_launched_ahead_that_nothing_waits_for_shows(
    decoder: Decoder, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sequences have blocks that it writes; here no copy knows of it."""
    record = PendingCopies.record

    def of_copies(self: PendingCopies, stream: Any, block_ids: Any) -> None:
        if stream is not stream._streams.stream("compute"):
            record(self, stream, block_ids)

    monkeypatch.setattr(PendingCopies, "record", of_copies)
    for seed in range(MAX_HISTORIES_TO_SHOW):
        try:
            holds, _ = is_undisturbed(decoder, alone, seed, tmp_path, CheckedStreams, launches_ahead=True)
        except AssertionError:
            return
        if not holds:
            return
    pytest.fail(f"{MAX_HISTORIES_TO_SHOW} histories, and nothing was wrong")

"""Learnt lengths outlive the predictor's process: the journal, whole, torn, of another model, or full."""

import asyncio
import logging
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from alignedserve.core.request import RequestClass
from alignedserve.messages.events import Received
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.workers import RequestFinished
from router.async_predictor import AsyncLengthPredictor
from router.prediction import journal as journal_module
from router.prediction.encoders import HashedNgrams
from router.prediction.journal import LearntLengths, LearntRequest
from router.prediction.predictor import LengthPredictor, PredictionSource
from router.state import LengthPredicted
from tests.support.samples import request

ENCODER = HashedNgrams()


def journal(folder: Path, encoder: str = "hashed_ngrams m") -> LearntLengths:
    return LearntLengths(folder, encoder=encoder, num_features=ENCODER.num_features)


def learnt(number: int) -> LearntRequest:
    made = request(f"r{number}", prompt_len=5 + number % 7, request_class=RequestClass.BEST_EFFORT)
    return LearntRequest(made, ENCODER.encode((number, number + 1, 7)), number)


def lens_in(folder: Path, encoder: str = "hashed_ngrams m") -> list[int]:
    opened = journal(folder, encoder)
    found = [one.num_generated for one in opened.open()]
    opened.close()
    return found


def write(folder: Path, numbers: range) -> None:
    opened = journal(folder)
    assert all(one is not None for one in opened.open())
    for number in numbers:
        opened.append(learnt(number))
    opened.close()


def test_what_was_learnt_comes_back(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    opened = journal(tmp_path)
    for found, expected in zip(opened.open(), (learnt(number) for number in range(3)), strict=True):
        assert found.num_generated == expected.num_generated
        assert found.request.prompt_len == expected.request.prompt_len
        assert found.request.sampling.max_tokens == expected.request.sampling.max_tokens
        assert found.request.request_class is RequestClass.BEST_EFFORT
        assert np.allclose(found.code.key, expected.code.key, atol=1e-3)
        assert np.allclose(found.code.features, expected.code.features, atol=1e-3)
    opened.close()


def test_a_torn_end_and_damage_cost_only_their_records(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    path = tmp_path / "learnt_lengths"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:-10])
    first = lens_in(tmp_path)
    assert first in ([0, 1], [0, 2])
    write(tmp_path, range(9, 10))
    assert lens_in(tmp_path) == [*first, 9]


@pytest.mark.parametrize("content", [b"", b"\x00" * 5000, bytes(range(256)) * 40, b"alignedserve lengths 1\n"])
def test_any_other_file_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "learnt_lengths").write_bytes(content)
    assert lens_in(tmp_path) == []
    write(tmp_path, range(1, 2))
    assert lens_in(tmp_path) == [1]


def test_codes_of_another_model_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    assert lens_in(tmp_path, "hashed_ngrams another") == []


def test_a_full_file_becomes_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MAX_RECORDS", 4)
    write(tmp_path, range(11))
    assert lens_in(tmp_path) == [4, 5, 6, 7, 8, 9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learnt_lengths", "learnt_lengths.old"]


def test_of_two_routers_in_one_folder_one_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = journal(tmp_path)
    assert list(first.open()) == []
    with caplog.at_level(logging.WARNING):
        assert lens_in(tmp_path) == []
    assert "ends with this process" in caplog.text
    first.append(learnt(5))
    first.close()
    assert lens_in(tmp_path) == [5]


def test_a_disk_that_is_full_in_the_middle_of_a_record_ends_the_journal(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    num_bytes = (tmp_path / "learnt_lengths").stat().st_size
    opened = journal(tmp_path)
    assert len(list(opened.open())) == 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes + 10, before[1]))
        opened.append(learnt(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    opened.append(learnt(3))
    opened.close()
    assert lens_in(tmp_path) == [0, 1]


async def test_a_new_process_predicts_as_the_old_one_would(tmp_path: Path) -> None:
    asked = request("r1", prompt_len=4, max_tokens=100)
    delivered: asyncio.Queue[LengthPredicted] = asyncio.Queue()
    first = AsyncLengthPredictor(LengthPredictor(ENCODER), delivered.put_nowait, journal(tmp_path))
    first.observe(Received("gateway-0", SubmitRequest(asked)))
    await delivered.get()
    first.observe(Received("decode-0", RequestFinished(asked.request_id, 0, 37)))
    first.observe(Received("gateway-0", SubmitRequest(asked)))
    expected = await delivered.get()
    first.close()
    predictor = LengthPredictor(ENCODER)
    second = AsyncLengthPredictor(predictor, delivered.put_nowait, journal(tmp_path))
    second.observe(Received("gateway-0", SubmitRequest(asked)))
    assert (await delivered.get()).predicted_len == pytest.approx(expected.predicted_len)
    assert predictor.predict(asked, predictor.encode(asked)).source is PredictionSource.RETRIEVAL
    second.close()

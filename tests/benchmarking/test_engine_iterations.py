"""Single iterations of the engine against what the device can do, at toy size; lists of blocks to host memory."""

import dataclasses
import json
import re
import time

import numpy as np
import pytest
import torch

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.streams import HostStreams
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.engine import __main__ as command
from benchmarks.engine.iterations import TOY, IterationSpec, run_iteration_benchmark
from benchmarks.measuring.device_ceilings import SIZES, TOY_SIZES
from benchmarks.measuring.pinned_copies import OFFLOAD, PREFETCH, BackgroundCopies, PinnedLists, lists_at_the_end
from lab.profiling.shapes import SHAPES
from tests.support.devices.checked_streams import CheckedStreams
from tests.support.waiting import wait_until


def test_every_iteration_is_measured() -> None:
    report = run_iteration_benchmark(TOY)
    kinds = ["decode", "prefill", "decode beside copies", OFFLOAD, PREFETCH, "decode beside listed copies"]
    assert [row.kind for row in report.rows] == kinds
    decode, prefill, beside = report.rows[:3]
    assert decode.ratio == pytest.approx(decode.milliseconds / decode.bound_milliseconds)
    assert prefill.ratio == pytest.approx(prefill.bound_milliseconds / prefill.milliseconds)
    assert "GB/s both ways" in beside.what
    assert decode.is_met == (decode.ratio <= 1.25)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["model"] == "toy"


def test_a_cpu_copies_nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "cpu", TOY_SIZES)
    report = run_iteration_benchmark(dataclasses.replace(TOY, is_toy=False, num_decodes=1))
    assert len(report.rows) == 2
    assert report.left_out == ["copies beside an iteration, and alone: they are of a GPU"]


def test_bad_specs() -> None:
    with pytest.raises(ConfigError, match="num_decodes"):
        IterationSpec("toy", num_decodes=0)
    with pytest.raises(ConfigError, match="context_len"):
        IterationSpec("toy", context_len=1)


def storage() -> BlockStorage:
    made = BlockStorage(SHAPES["toy"].block_layout(4, "float32"), 7)
    made.blocks.normal_()
    return made


def test_lists_lie_at_the_end_and_share_no_block() -> None:
    outwards, inwards = lists_at_the_end(storage(), 3)
    assert sorted([*outwards.tolist(), *inwards.tolist()]) == [1, 2, 3, 4, 5, 6]


def test_lists_are_copied_and_timed() -> None:
    made = storage()
    before = made.bytes.clone()
    lists = PinnedLists(made, HostStreams(), np.array([5, 2]), np.array([4, 6]))
    lists.begin(OFFLOAD).synchronize()
    lists.begin(PREFETCH).synchronize()
    assert lists.num_bytes == 2 * made.layout.block_bytes
    assert torch.equal(made.bytes[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])
    assert not torch.equal(made.bytes[4], before[4])
    for name in (OFFLOAD, PREFETCH):
        assert min(lists.measure(name, 1)) > 0.0


def test_traffic_goes_on_in_both_directions_until_its_end() -> None:
    made = storage()
    with BackgroundCopies(PinnedLists(made, CheckedStreams(0), np.array([1]), np.array([2])), num_ahead=3) as traffic:
        wait_until(lambda: traffic.num_copied >= 10, 20.0, lambda: traffic.num_copied, 0.001)
    ended = traffic.num_copied
    time.sleep(0.01)
    assert traffic.num_copied == ended


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["engine", "--device", "cpu", "--shape", "toy", "--workload", "iterations"])
    command.main()
    assert "decode, 3 x 24" in capsys.readouterr().out


def test_a_workload_on_a_named_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["engine", "--device", "cpu", "--shape", "toy", "--workload", "2x5:3"])
    command.main()
    assert re.search(r"num output tokens\s*│\s*6 ", capsys.readouterr().out)

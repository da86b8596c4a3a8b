"""The transfer benchmark says how fast every way of this machine is, and refuses what it cannot run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignedserve.core.errors import ConfigError, HandoffRejected, PeerLost
from alignedserve.runtime.device.cores import num_cores
from benchmarks.measuring.results import TransferReport, TransferResult
from benchmarks.transfer import __main__ as command
from benchmarks.transfer import benchmark as transfer
from benchmarks.transfer.benchmark import measure_device_transfers, measure_host_transfers
from benchmarks.transfer.device_transfers import pinned_rows, registered_rows
from benchmarks.transfer.peer_transfers import PeerWay, peer_process, peer_rows
from benchmarks.transfer.spec import TransferBenchmarkSpec

SMALL = TransferBenchmarkSpec(("pocket",), (1,), num_rounds=1)
ROW = TransferResult("pocket", 81920, 12, "pinned", "offload", 1.0, 2.0, 0.5)
CPU = torch.device("cpu")


def test_every_way_of_the_host_is_measured() -> None:
    report = TransferReport()
    measure_host_transfers(SMALL, report)
    in_memory = ("shm", "shm, 2 threads")[: min(num_cores(), 2)]
    assert [(row.transport, row.operation) for row in report.rows] == [
        *((transport, operation) for transport in in_memory for operation in ("offload", "fetch", "relay")),
        ("gloo", "offload"),
        ("gloo", "fetch"),
    ]
    check(report.rows)


def check(rows: list[TransferResult]) -> None:
    for row in rows:
        assert (row.block_bytes, row.num_blocks) == (81920, 12)
        assert row.share == pytest.approx(row.gb_per_s / row.plain_gb_per_s, abs=0.01)
        assert 0.0001 < row.gb_per_s < 10_000.0


def test_lists_of_blocks_to_the_host_and_back() -> None:
    rows = list(pinned_rows(SMALL, CPU))
    assert [(row.transport, row.operation) for row in rows] == [("pinned", "offload"), ("pinned", "prefetch")]
    check(rows)


def test_lists_of_blocks_to_an_arena_and_back() -> None:
    rows = list(registered_rows(SMALL, CPU))
    assert [(row.transport, row.operation) for row in rows] == [("registered", "offload"), ("registered", "prefetch")]
    check(rows)


@pytest.mark.slow
def test_memory_that_cannot_be_mapped_is_said() -> None:
    with pytest.raises(HandoffRejected, match="the blocks are not in a device's memory"):
        list(peer_rows(SMALL, PeerWay("cuda_ipc", "cpu", "cpu")))


def ends_at_once(told: Any) -> None:
    told.close()


@pytest.mark.slow
def test_another_process_that_does_not_begin() -> None:
    with pytest.raises(PeerLost, match="ended as it began"), peer_process(ends_at_once):
        pass


# --- which ways there are


def test_a_cpu_has_none_of_the_device() -> None:
    report = TransferReport()
    measure_device_transfers(SMALL, CPU, report)
    assert (report.rows, report.failures) == ([], [])
    (line,) = report.left_out
    assert line.startswith("pinned copies, registered arenas and cuda_ipc move blocks of a GPU: ")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, ways: dict[str, Any]) -> TransferReport:
    """Return the report for so many GPUs; `ways`: the results of each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(transfer, "pinned_rows", lambda *_: iter([ROW]))
    monkeypatch.setattr(transfer, "registered_rows", lambda *_: iter([ROW]))

    def rows(_: object, way: PeerWay) -> list[TransferResult]:
        found = ways[f"{way.transport} {way.there}"]
        if isinstance(found, Exception):
            raise found
        return [found]

    monkeypatch.setattr(transfer, "_module", lambda _: SimpleNamespace(peer_rows=rows, PeerWay=PeerWay))
    report, seen = TransferReport(), []
    measure_device_transfers(SMALL, torch.device("cuda"), report, lambda known: seen.append(len(known.rows)))
    assert seen == list(range(1, len(report.rows) + 1))
    return report


def test_one_gpu_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    report = gpus(monkeypatch, 1, {"cuda_ipc cuda:0": ROW})
    assert report == TransferReport([ROW] * 3, ["cuda_ipc between two GPUs: there is one GPU"], [])


def test_what_does_not_work_costs_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = HandoffRejected("the memory cannot be mapped\nat all")
    report = gpus(monkeypatch, 2, {"cuda_ipc cuda:0": refusal, "cuda_ipc cuda:1": ROW})
    assert report == TransferReport([ROW] * 3, [], ["cuda_ipc: HandoffRejected: the memory cannot be mapped"])


def test_without_msgspec_it_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(transfer, "_module", missing)
    report = TransferReport()
    measure_host_transfers(SMALL, report)
    said = "moving blocks between processes needs msgspec (pip install msgspec)"
    assert report == TransferReport([], [f"shm: {said}", f"gloo: {said}"], [])


# --- the command


def test_the_command_prints_rows_and_what_there_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(spec: TransferBenchmarkSpec, report: TransferReport) -> None:
        assert spec.mebibytes == (3,)
        report.rows.append(ROW)
        report.failures.append("gloo: no peer there")

    monkeypatch.setattr("benchmarks.transfer.__main__.measure_host_transfers", measured)
    monkeypatch.setattr("sys.argv", ["transfer", "--device", "cpu", "--sizes", "3"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 1
    shown = capsys.readouterr().out
    assert "50%" in shown
    assert "- left out: pinned copies" in shown
    assert "- failed: gloo: no peer there" in shown


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shapes": ("gpt-9",)}, "shape 'gpt-9' is none of pocket, "),
        ({"mebibytes": ()}, "mebibytes must be"),
        ({"mebibytes": (0,)}, "mebibytes must be"),
        ({"num_rounds": 0}, "num_rounds must be"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TransferBenchmarkSpec(**changes)  # type: ignore[arg-type]

"""The transfer benchmark says how fast every way of this machine is, and refuses what it cannot run."""

import pytest

from alignedserve.bench.transfer import TransferBenchmarkSpec, run_transfer_benchmark
from alignedserve.core.errors import ConfigError


def test_every_way_of_this_machine_is_measured() -> None:
    rows = run_transfer_benchmark(TransferBenchmarkSpec(("pocket",), (1,), num_rounds=1))
    assert [(row.transport, row.operation) for row in rows] == [
        ("shm", "offload"),
        ("shm", "fetch"),
        ("shm", "relay"),
        ("gloo", "offload"),
        ("gloo", "fetch"),
    ]
    for row in rows:
        assert (row.block_bytes, row.num_blocks) == (81920, 12)
        assert min(row.gb_per_s, row.plain_gb_per_s, row.share) > 0


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

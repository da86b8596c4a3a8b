"""A step of the GPU path has the kernels, bytes and waits of the ledger."""

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.ledger import ledger
from benchmarks.gpu.ledger.counted_steps import count_model
from benchmarks.gpu.ledger.forms import DENSE, FEW

MENDED = "where that is meant, run python -m benchmarks.gpu.ledger and say in the commit what changed"


def test_a_step_launched_ahead_is_as_in_the_ledger() -> None:
    assert count_model(DENSE, (FEW,))[FEW.name] == ledger.read()[DENSE.name][FEW.name], MENDED

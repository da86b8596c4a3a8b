"""The ledger of the GPU path: what the engine launches now is what stands in the file."""

import pytest

from benchmarks.gpu.estimates import with_tables
from benchmarks.gpu.ledger import ledger
from benchmarks.gpu.ledger.__main__ import PAGE
from benchmarks.gpu.ledger.counted_steps import count_model
from benchmarks.gpu.ledger.forms import DENSE, FEW, MODELS, STEPS, ModelForm, StepForm

MENDED = "where that is meant, run python -m benchmarks.gpu.ledger and say in the commit what changed"


def assert_as_kept(form: ModelForm, steps: tuple[StepForm, ...]) -> None:
    kept = ledger.read()[form.name]
    for name, step in count_model(form, steps).items():
        assert step == kept[name], f"{form.name}, {name}: {MENDED}"


def test_a_step_launched_ahead_has_the_kernels_bytes_and_waits_of_the_ledger() -> None:
    assert_as_kept(DENSE, (FEW,))


@pytest.mark.slow
@pytest.mark.parametrize("form", MODELS, ids=lambda form: form.name)
def test_every_step_of_a_model_is_as_in_the_ledger(form: ModelForm) -> None:
    assert_as_kept(form, STEPS)
    assert set(ledger.read()) == {one.name for one in MODELS}


def test_the_page_says_what_the_ledger_gives() -> None:
    page = PAGE.read_text()
    assert with_tables(page, ledger.read()) == page

"""The ledger of the GPU path: every step of every form is as it stands in the file."""

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.ledger import ledger
from benchmarks.gpu.ledger.counted_steps import count_model
from benchmarks.gpu.ledger.forms import MODELS, STEPS, ModelForm

MENDED = "where that is meant, run python -m benchmarks.gpu.ledger and say in the commit what changed"


@pytest.mark.parametrize("form", MODELS, ids=lambda form: form.name)
def test_every_step_of_a_model_is_as_in_the_ledger(form: ModelForm) -> None:
    kept = ledger.read()
    assert set(kept) == {one.name for one in MODELS}
    for name, step in count_model(form, STEPS).items():
        assert step == kept[form.name][name], f"{form.name}, {name}: {MENDED}"

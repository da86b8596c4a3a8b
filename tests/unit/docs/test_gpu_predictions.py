"""What is predicted of a GPU: the table is that of the record, and the profile is fitted to what was timed."""

from dataclasses import asdict

from alignedserve.costmodel.linear import fit_error
from benchmarks.gpu import predicted
from benchmarks.gpu.timed_iterations import KINDS, timed_iterations
from benchmarks.gpu.timed_iterations import SHORT as HOST_BOUND
from lab.costmodel.profile_file import read_profile

_WRITES_IT = "python -m benchmarks.gpu.predicted writes it"


def test_the_table_is_that_of_the_record() -> None:
    text = predicted.PAGE.read_text()
    assert f"<!-- table: {predicted.TABLE} -->" in text
    assert predicted.with_table(text) == text, _WRITES_IT


def test_the_profile_is_fitted_to_what_was_timed() -> None:
    profile, fitted = read_profile(predicted.PROFILE), predicted.fitted_profile(predicted.FOLDER)
    assert profile.shape == fitted.shape, _WRITES_IT
    assert profile.num_threads is None, "of a GPU: nothing shares cores, no pass stops"
    for name, value in asdict(fitted.coefficients).items():
        # Not to the last digit: libraries add up in another order.
        assert abs(getattr(profile.coefficients, name) - value) <= 1e-3 * value, f"{name}: {_WRITES_IT}"
    iterations = timed_iterations(predicted.FOLDER)
    for kind in KINDS:
        error = fit_error(profile.cost_model(), [one.sample for one in iterations if one.kind == kind])
        assert error.median < 0.1, kind
    sheet = predicted.predicted(predicted.FOLDER)["kinds"][HOST_BOUND]["roofline"]
    assert sheet["median"] < 0.6, "no data sheet knows what the host needs for its launches"

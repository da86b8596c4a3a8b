"""No shipped experiment, and no default of `simulate`, tells schedulers a length or a cost that no live one knows."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain

from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.workers import PrefillRequest
from alignedserve.scheduling.table import COLUMN_NAMES
from experiments import accelgen, alignedserve, alise, apt_serve, bros, unseen
from experiments.common import LabelledCase
from lab.commands.simulation.options import SimulateOptions
from lab.commands.simulation.simulate_cases import plan_cases
from lab.sim.sweep import Case, WorkloadLine
from lab.workload.grammar import ClassSpec, ClientLimit, PredictionKind, parse_classes

SIZES = apt_serve.WorkerSizes(10, (1,), 1)
TELLING = {"ORCA, exact"}  # a baseline of ALISE's paper that reserves what will be needed: named by what it knows
KNOWING = {"Oracle"}  # ALISE with exact predictions: likewise


def labelled_cases() -> Iterator[LabelledCase]:
    """Return every case of every experiment; of AccelGen's, whose workloads take long to build, the reduced ones."""
    for parts in (alignedserve.parts_of(is_quick=False), unseen.parts_of(is_quick=False)):
        for part in parts:
            yield from part
    yield from alise.cases_of(is_quick=False)
    yield from bros.cases_of(is_quick=False)
    yield from accelgen.cases_of(is_quick=True)
    for make in (apt_serve.tables_4_and_5, apt_serve.figure_9, apt_serve.other_costs):
        yield from make(SIZES)
    for curve in apt_serve.curves_of(is_quick=False):
        yield apt_serve.AptServeLoad(curve.dataset, 1.0, 10, model=curve.model).case("figure 8", curve.policy, 1)


def cases() -> list[tuple[str, Case]]:
    own = [(str(labelled.labels["policy"]), labelled.case) for labelled in labelled_cases()]
    return own + [(one.policy, one.case) for one in plan_cases(SimulateOptions())]


def specs_of(case: Case) -> tuple[ClassSpec, ...]:
    workload = case.workload
    return parse_classes(workload.line if isinstance(workload, WorkloadLine) else workload.description.name)


def test_limits_tell_no_lengths_and_costs_are_learned() -> None:
    found = cases()
    assert len(found) > 600
    for name, case in found:
        assert case.config.learns_costs, case.name
        for spec in specs_of(case):
            is_telling = spec.max_tokens in (ClientLimit.EXACT, ClientLimit.POWER_OF_TWO)
            assert is_telling == (name in TELLING), case.name
            is_exact = spec.prediction is not None and spec.prediction.kind is PredictionKind.EXACT
            assert is_exact == (name in KNOWING), case.name


def test_what_schedulers_get_has_no_place_for_a_true_length() -> None:
    names = {field.name for kind in (Request, SamplingParams) for field in fields(kind)}
    names |= set(chain(*COLUMN_NAMES)) | set(PrefillRequest.__struct_fields__)
    assert {name for name in names if "output" in name or "answer" in name} == {"predicted_output_len"}

"""The tables of the policies that know classes are those of the record."""

from alignedserve.scheduling.policies import policy_entry
from benchmarks.measuring.recording import read_figures
from benchmarks.promise.classed_policies import LOADS, SHAPES
from benchmarks.promise.classed_policies import POLICIES as COMPARED
from benchmarks.promise.classed_table import PAGE, RECORD, with_tables


def test_the_tables_are_those_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "python -m benchmarks.promise.classed_table writes them"
    assert all(f"<!-- table: {shape} -->" in text for shape in SHAPES)


def test_every_load_has_every_policy_that_runs_there() -> None:
    rows = {(row["shape"], row["load"], row["policy"]) for row in read_figures(RECORD)}
    assert rows == {
        (shape, load, policy)
        for shape in SHAPES
        for load in LOADS
        for policy in COMPARED
        if "disaggregated" not in shape or "disaggregated" in [one.value for one in policy_entry(policy).topologies]
    }

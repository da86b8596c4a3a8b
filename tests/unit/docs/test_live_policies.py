"""The live table of policies is that of its record."""

from benchmarks.measuring.recording import read_figures
from benchmarks.promise.live_load import LOADS
from benchmarks.promise.live_policies import PAGE, RECORD, systems, table, with_table


def test_the_table_is_that_of_the_record() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m benchmarks.promise.live_policies --page writes it"
    assert table(read_figures(RECORD)) in text


def test_every_measured_policy_runs_there() -> None:
    able = set(systems())
    for topology, measured in read_figures(RECORD)["topologies"].items():
        assert {(policy, topology) for policy in measured["both"]} <= able
        assert all(set(loads) <= set(LOADS) for loads in measured["both"].values())

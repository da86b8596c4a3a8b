"""Each deliberate fault has its one place in the code of today, and tests that are there to catch it."""

from pathlib import Path

from tests.faults.run import misplaced, read_faults

ROOT = Path(__file__).parents[3]


def test_each_fault_has_one_place_in_its_file() -> None:
    assert misplaced(read_faults(), ROOT) == []


def test_each_fault_changes_something() -> None:
    assert [fault.name for fault in read_faults() if fault.old == fault.new] == []


def test_the_tests_that_are_to_catch_them_exist() -> None:
    named = {test for fault in read_faults() for test in fault.tests}
    assert sorted(test for test in named if not (ROOT / test).exists()) == []

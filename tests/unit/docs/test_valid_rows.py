"""Rows of the experiments hold while the code that decided them does: digests, and what a repeated sample says."""

import ast

from benchmarks.measuring.intervals import interval
from experiments.common import ColocatedWorkerSpec, colocated_case, line
from experiments.steady import is_served
from experiments.validity.decision_code import DecisionCode, digest_of, digests
from experiments.validity.rows import State, num_bursts, state_of
from experiments.validity.samples import is_same, sample
from lab.costmodel.choice import WorkerSpec
from tests.support.marks import each

WORKER = ColocatedWorkerSpec(WorkerSpec("opt-13b", "a100-80g"))
LINE = "rt: prompt=100, output=4, rate=5"
RULE = """
'''What it does.'''
MOST = 3
def room(num: int) -> bool:
    '''Return whether one more fits.'''
    return num < MOST  # not at most
"""


def digest(text: str) -> str:
    """Return the digest of a module with this text."""
    return digest_of(ast.parse(text))


@each(
    ("old", "new"),
    [
        ("# not at most", "# as many as are allowed"),
        ("Return whether one more fits.", "Tell it."),
        ("'''What it does.'''\n", ""),
        ("num: int", "num"),
        ("num < MOST", "(num <\n        MOST)"),
    ],
)
def test_prose_types_and_layout_change_no_digest(old: str, new: str) -> None:
    assert RULE.count(old) == 1
    assert digest(RULE.replace(old, new)) == digest(RULE)


@each(("old", "new"), [("num < MOST", "num <= MOST"), ("MOST = 3", "MOST = 4"), ("return num", "return not num")])
def test_a_rule_changes_the_digest(old: str, new: str) -> None:
    assert RULE.count(old) == 1
    assert digest(RULE.replace(old, new)) != digest(RULE)


POLICIES = "alignedserve/scheduling/policies"
FILES = {
    "lab/sim/simulation.py": "from router import logic\nfrom alignedserve.messages import events\n",
    "lab/sim/policies.py": "import alignedserve.scheduling.policies\n",
    "router/logic.py": "x = 1\n",
    "router/actor.py": "y = 1\n",
    "alignedserve/messages/events.py": "z = 1\n",
    f"{POLICIES}/__init__.py": f"from {POLICIES.replace('/', '.')} import bros, fcfs\n",
    f"{POLICIES}/bros.py": "b = 1\n",
    f"{POLICIES}/fcfs.py": "f = 1\n",
    "lab/policies/__init__.py": "from lab.policies import edf\n",
    "lab/policies/edf.py": "e = 1\n",
}


def changed(*paths: str) -> dict[str, str]:
    """Return by policy the digest where these files have one rule more."""
    files = {path: text + "more = 2\n" * (path in paths) for path, text in FILES.items()}
    code = DecisionCode(files.get)
    return {policy: code.digest(policy) for policy in ("bros", "fcfs", "edf")}


def test_what_a_simulation_imports_is_in_the_digest_and_nothing_else() -> None:
    before = changed()
    assert before["bros"] != before["fcfs"]
    for path in (
        "router/actor.py",
        "alignedserve/messages/events.py",
        f"{POLICIES}/__init__.py",
        "lab/policies/__init__.py",
    ):
        assert changed(path) == before
    for path in ("router/logic.py", "lab/sim/simulation.py"):
        now = changed(path)
        assert now["bros"] != before["bros"]
        assert now["fcfs"] != before["fcfs"]


def test_a_policy_s_own_rules_are_in_no_other_s_digest() -> None:
    before = changed()
    for path, policy in ((f"{POLICIES}/bros.py", "bros"), ("lab/policies/edf.py", "edf")):
        now = changed(path)
        assert [name for name in now if now[name] != before[name]] == [policy]


USED = "lab/sim/simulation.py"


def of_files(files: dict[str, str]) -> str:
    """Return the digest of all policies in a repository with these files."""
    return DecisionCode({**FILES, **files}.get).digest()


def test_files_may_be_moved_renamed_and_split() -> None:
    most, room = "MOST = 3\n", "def room(num):\n    return num < MOST\n"
    whole = of_files({USED: "from router.places import room\nx = room(2)\n", "router/places.py": most + room})
    moved = {USED: "from router.work.spots import room\nx = room(2)\n", "router/work/spots.py": most + room}
    assert of_files(moved) == whole
    split = {"router/work/spots.py": f"from router.most import MOST\n{room}", "router/most.py": most}
    assert of_files({**moved, **split}) == whole
    assert of_files({**moved, "router/work/spots.py": "MOST = 4\n" + room}) != whole


def test_what_a_name_stands_for_changes_the_digest() -> None:
    both = {"router/one.py": "def room():\n    return 1\n", "router/two.py": "def room():\n    return 2\n"}
    use = "from router.{} import room\nfrom router.{} import room as other\nx = room()\ny = other()\n"
    assert of_files({**both, USED: use.format("one", "two")}) != of_files({**both, USED: use.format("two", "one")})


def test_today_s_digests_are_of_the_code_that_is_there() -> None:
    assert len(set(digests().values())) == len(digests())


def test_a_row_is_stale_unless_a_sample_was_repeated_with_the_same_figures() -> None:
    row = {"policy": "fcfs", "code": "old"}
    same = {"system": "fcfs", "code": "old", "now": "new", "is_same": True}
    assert state_of({**row, "code": "new"}, (), ["new"]) is State.TODAY
    assert state_of(row, (), ["new"]) is State.OLDER
    assert state_of({**row, "code": ""}, [same], ["new"]) is State.UNKNOWN
    assert state_of(row, [same], ["new"]) is State.REPEATED
    assert state_of(row, [same], ["newer"]) is State.OLDER  # it was repeated by a code that is no more
    assert state_of(row, [same, {**same, "is_same": False}], ["new"]) is State.OLDER
    assert state_of({**row, "policy": "bros"}, [same], ["new"]) is State.OLDER


def test_the_quickest_and_the_hardest_stale_row_of_each_system_are_repeated_by_a_case_of_their_workload() -> None:
    of_rows = ((1.0, "old", 9.0, 0.3), (2.0, "old", 5.0, 1.0), (3.0, "new", 1.0, 0.0), (4.0, "older", 7.0, 0.9))
    rows = [
        {"policy": "fcfs", "rate": rate, "seed": 1, "code": code, "duration_s": duration_s, "rt.attainment": held}
        | {"workload": LINE}
        for rate, code, duration_s, held in of_rows
    ]
    rows.append({**rows[1], "rate": 5.0, "rt.attainment": 0.5})
    rows.append({**rows[0], "rate": 6.0, "duration_s": 0.1, "workload": "data that is not here"})
    cases = [colocated_case({"rate": rate}, "fcfs", WORKER, line(LINE, 1)) for rate in range(1, 7)]
    found = sample(rows, cases, ["new"])
    assert [(one.row["rate"], one.case.labels["rate"]) for one in found] == [(2.0, 2), (1.0, 1), (4.0, 4)]


def test_figures_are_the_same_to_the_digits_of_a_record() -> None:
    row = {"policy": "fcfs", "code": "old", "x": 1.2346, "gone": 3}
    assert is_same(row, {"policy": "fcfs", "code": "new", "x": 1.23456789, "y": 2})
    assert not is_same(row, {"policy": "fcfs", "code": "new", "x": 1.2347})


def test_intervals_are_student_s() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half is not None
    assert abs(found.half - 2.776 * 2.5**0.5 / 5**0.5) < 1e-12
    assert interval([2.0]).half is None
    assert interval([2.0] * 30).half == 0.0


def test_a_rate_that_ends_less_than_arrives_is_not_served() -> None:
    assert is_served([0.94, 0.97])
    assert not is_served([0.94, 0.95])


def test_a_point_has_five_seeds_of_ten_minutes() -> None:
    rows = [{"policy": "fcfs", "rate": 1.0, "x": seed / 7, "seed": seed, "sent_s": 600.0} for seed in range(5)]
    assert num_bursts(rows) == 0
    assert num_bursts(rows[:4]) == 4
    assert num_bursts([{**row, "sent_s": 599.0} for row in rows]) == 5

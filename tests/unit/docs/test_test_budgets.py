"""What makes the default tests slow is counted, and no count grows unseen (docs/testing.md)."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.run_tests import NUM_PARTS, ROOT, SECONDS, files_under, hands_of, part_of, recorded_seconds, run

MAX_S = 400.0  # of default tests, recorded on one machine; two processes share them
MAX_LONG_SLEEPS = 12
# Clusters of Ray that tests start beside those that whole sessions share: that guard the promise, and the rest, of
# which a run of CI takes an eighth. With the shared ones (of elastic and of separate workers, of hosts) it starts some
# seventeen.
MAX_PROMISE_CLUSTERS = 8
MAX_REST_CLUSTERS = 31
MAX_INTERPRETERS = 29  # that default tests start: most import torch or ray

_MARKS_OF_FILE = re.compile(r"^pytestmark = (\[\n[^\]]*|[^\n]*)", re.MULTILINE)
_STARTS_CLUSTER = re.compile(r"(?<!def )\b(?:serving|kill_cluster|RayNodes|NamespaceHosts)\(")
_INTERPRETER = re.compile(r"sys\.executable")
_ELSEWHERE = ("tests/clients/", "tests/inside_vllm/")  # in environments of their own
_AT_THE_TOP = re.compile(r"^(?:import|from) (?:anthropic|openai|transformers)\b", re.MULTILINE)
_LONG_SLEEP = re.compile(r"\bsleep\((0\.[1-9]\d+|0\.[2-9]|[1-9]\d*(?:\.\d+)?)\)")


def _default_sources() -> dict[str, str]:
    return {file: source for file, source in _sources("tests").items() if not _is_marked(source, "slow")}


def _sources(folder: str) -> dict[str, str]:
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in files_under([folder])}


def _is_marked(source: str, mark: str) -> bool:
    """Return whether every test of a file has this mark, which may stand on one line or several."""
    marks = _MARKS_OF_FILE.search(source)
    return marks is not None and f"mark.{mark}" in marks.group(1)


def test_default_tests_share_one_cluster() -> None:
    assert [file for file, source in _default_sources().items() if _takes_cluster(file, source)] == [
        "tests/cluster/shared/test_batches_survive.py",
        "tests/cluster/shared/test_served_faults.py",
    ]


def _takes_cluster(file: str, source: str) -> bool:
    """Return whether a default test of a file starts a cluster, or shares the one of others."""
    tests = re.findall(r"((?:^@.*\n)*)^(?:async )?def test_\w+\(([^)]*)", source, re.MULTILINE)
    marks = [marks for marks, arguments in tests if "luster: Serving" in arguments or "serving(" in source]
    return file.startswith("tests/cluster/") and any("mark.slow" not in of_one for of_one in marks)


def test_long_tests_start_few_clusters() -> None:
    sources = _sources("tests/cluster").values()
    assert _num_clusters(source for source in sources if "promise" in source) <= MAX_PROMISE_CLUSTERS
    rest = (source for source in sources if "slow" in source and not _is_marked(source, "promise"))
    assert _num_clusters(rest) <= MAX_REST_CLUSTERS


def _num_clusters(sources: Iterable[str]) -> int:
    """Return how many places of these files start a cluster of their own."""
    return sum(len(_STARTS_CLUSTER.findall(source)) for source in sources)


def test_default_tests_do_not_sleep_to_wait() -> None:
    sleeps = [sleep for source in _default_sources().values() for sleep in _LONG_SLEEP.findall(source)]
    assert len(sleeps) <= MAX_LONG_SLEEPS


def test_default_tests_start_few_interpreters() -> None:
    assert sum(len(_INTERPRETER.findall(source)) for source in _default_sources().values()) <= MAX_INTERPRETERS


def test_no_test_imports_an_sdk_before_it_uses_it() -> None:
    """They take seconds of the collection of all tests, in every process."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if not any(folder in str(path) for folder in _ELSEWHERE)]
    assert [path.name for path in files if _AT_THE_TOP.search(path.read_text(encoding="utf-8"))] == []


def test_default_tests_keep_their_seconds() -> None:
    assert sum(json.loads(SECONDS.read_text())["default"].values()) <= MAX_S


def test_all_parts_are_the_whole_rest() -> None:
    files, seconds = files_under(["tests"]), recorded_seconds("rest")
    parts = [part_of(hands_of(files, seconds), seconds, part) for part in range(NUM_PARTS)]
    assert sorted(file for part in parts for hand in part for file in hand) == files


@pytest.mark.slow
def test_processes_share_a_list_and_what_runs_alone_comes_last(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begins = f"    with open({str(begun)!r}, 'a') as file:\n        file.write('NAME ')\n"
    bodies = {"first": "", "second": "    assert False\n", "third": "    pytest.skip()\n"}
    for name, body in bodies.items():
        test = f"def test_{name}():\n{begins.replace('NAME', name)}{body}"
        alone = f"@pytest.mark.alone\ndef test_{name}_alone():\n{begins.replace('NAME', 'alone')}"
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n\n\n{test}\n\n{alone}")
    outcome = run([[str(tmp_path / f"test_{name}.py")] for name in bodies], "", 2, str(tmp_path))
    assert (outcome.counts["passed"], outcome.counts["skipped"], outcome.is_broken) == (4, 1, False)
    assert [test.partition("::")[2] for test in outcome.failed] == ["test_second"]
    order = begun.read_text().split()
    assert (sorted(order[:3]), order[3:]) == (sorted(bodies), ["alone"] * 3)

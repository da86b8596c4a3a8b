"""What makes the default tests slow is counted, and no count grows unseen (docs/testing.md)."""

import json
import re
from pathlib import Path

from scripts.run_tests import NUM_PARTS, ROOT, SECONDS, TIERS, deal, is_slow_file

MAX_S = 400.0  # of default tests, recorded on one machine; two processes share them
MAX_LONG_SLEEPS = 12
# Clusters of Ray that tests start beside those that whole sessions share: that guard the promise, and the rest, of
# which a run of CI takes an eighth. With the shared ones (of elastic and of separate workers, of hosts) it starts some
# seventeen.
MAX_PROMISE_CLUSTERS = 8
MAX_REST_CLUSTERS = 29
MAX_INTERPRETERS = 28  # that default tests start: most import torch or ray

_STARTS_CLUSTER = re.compile(r"(?<!def )\b(?:serving|kill_cluster|RayNodes|NamespaceHosts)\(")
_INTERPRETER = re.compile(r"sys\.executable")
_AT_THE_TOP = re.compile(r"^(?:import|from) (?:anthropic|openai|transformers)\b", re.MULTILINE)
_LONG_SLEEP = re.compile(r"\bsleep\((0\.[1-9]\d+|0\.[2-9]|[1-9]\d*(?:\.\d+)?)\)")


def _default_sources() -> dict[str, str]:
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in TIERS["default"].files(["tests"])}


def test_default_tests_share_one_cluster() -> None:
    assert [file for file, source in _default_sources().items() if _takes_cluster(file, source)] == [
        "tests/cluster/faults/test_batches_survive.py",
        "tests/cluster/faults/test_served_faults.py",
    ]


def _takes_cluster(file: str, source: str) -> bool:
    """Return whether a default test of a file starts a cluster, or shares the one of others."""
    tests = re.findall(r"((?:^@.*\n)*)^(?:async )?def test_\w+\(([^)]*)", source, re.MULTILINE)
    marks = [marks for marks, arguments in tests if "luster: Serving" in arguments or "serving(" in source]
    return file.startswith("tests/cluster/") and any("mark.slow" not in of_one for of_one in marks)


def test_long_tests_start_few_clusters() -> None:
    assert _num_clusters(TIERS["promise"].files(["tests"])) <= MAX_PROMISE_CLUSTERS
    assert _num_clusters(TIERS["rest"].files(["tests"])) <= MAX_REST_CLUSTERS


def _num_clusters(files: list[str]) -> int:
    """Return how many places of these files start a cluster of their own."""
    of_clusters = [file for file in files if file.startswith("tests/cluster/")]
    return sum(len(_STARTS_CLUSTER.findall((ROOT / file).read_text(encoding="utf-8"))) for file in of_clusters)


def test_default_tests_do_not_sleep_to_wait() -> None:
    sleeps = [sleep for source in _default_sources().values() for sleep in _LONG_SLEEP.findall(source)]
    assert len(sleeps) <= MAX_LONG_SLEEPS


def test_default_tests_start_few_interpreters() -> None:
    assert sum(len(_INTERPRETER.findall(source)) for source in _default_sources().values()) <= MAX_INTERPRETERS


def test_no_test_imports_an_sdk_before_it_uses_it() -> None:
    """They take seconds of the collection of all tests, in every process."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if "tests/clients/" not in str(path)]
    assert [path.name for path in files if _AT_THE_TOP.search(path.read_text(encoding="utf-8"))] == []


def test_default_tests_keep_their_seconds() -> None:
    assert sum(json.loads(SECONDS.read_text())["default"].values()) <= MAX_S


def test_five_parts_are_the_whole_rest() -> None:
    files = TIERS["rest"].files(["tests"])
    parts = deal(files, json.loads(SECONDS.read_text()).get("rest", {}), NUM_PARTS)
    assert sorted(file for part in parts for file in part) == files


def test_every_slow_file_is_in_a_tier_of_its_own(tmp_path: Path) -> None:
    """`make test` passes over a file whose tests are all slow; its marks may stand on one line or several."""
    (tmp_path / "one.py").write_text("pytestmark = [pytest.mark.cluster, pytest.mark.slow]\n")
    (tmp_path / "more.py").write_text("pytestmark = [\n    pytest.mark.alone,\n    pytest.mark.slow,\n]\n")
    (tmp_path / "none.py").write_text("pytestmark = pytest.mark.cluster\n\n\n@pytest.mark.slow\ndef test_it(): ...\n")
    assert [is_slow_file(tmp_path / name) for name in ("one.py", "more.py", "none.py")] == [True, True, False]

"""Put each deliberate fault into a copy of the tree and say whether its tests fail: `python -m tests.faults.run`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 300.0  # a fault may make tests wait for ever: then they have caught it
_TESTS_FAILED = 1  # exit codes of pytest
_PASSED = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Replaces `old`, which stands once in the file at `path`, by `new`; one of `tests` must then fail."""

    name: str
    path: str
    tests: tuple[str, ...]
    old: str
    new: str
    is_slow: bool  # slow tests run as well


def read_faults() -> list[Fault]:
    """Return the faults of faults.yaml, in its order."""
    files = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
    return [
        Fault(name, file["file"], tuple(file["tests"]), old, new, file.get("slow", False))
        for file in files
        for name, (old, new) in file["faults"].items()
    ]


def copy_of(root: Path, target: Path) -> None:
    """Copy what git knows of a tree, edits included, and the native kernels built in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    native = [str(path.relative_to(root)) for path in root.glob("kernels/_native*.so")]
    for name in [*listed.stdout.splitlines(), *native]:
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name)


def outcome_of(tests: Sequence[str], is_slow: bool, tree: Path, python: str) -> str:
    """Return passed, failed, timeout, or broken where the tests could not even be collected."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    marker = ["-m", "not gpu and not clients"] if is_slow else []
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *marker, *tests]
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "timeout"
    return {_PASSED: "passed", _TESTS_FAILED: "failed"}.get(ended.returncode, "broken")


def misplaced(faults: Iterable[Fault], tree: Path) -> list[str]:
    """Return the faults whose `old` does not stand exactly once in their file."""
    texts = {path: path.read_text() if path.is_file() else "" for path in {tree / fault.path for fault in faults}}
    counts = [(fault, texts[tree / fault.path].count(fault.old)) for fault in faults]
    return [f"{fault.path}: {count} times: {fault.name}" for fault, count in counts if count != 1]


def run(faults: Sequence[Fault], tree: Path, python: str) -> list[dict[str, object]]:
    """Run the named tests under every fault, one after another; the tree is as before afterwards."""
    rows: list[dict[str, object]] = []
    for fault in faults:
        path = tree / fault.path
        sound = path.read_text()
        path.write_text(sound.replace(fault.old, fault.new))
        began_s = time.monotonic()
        try:
            outcome = outcome_of(fault.tests, fault.is_slow, tree, python)
        finally:
            path.write_text(sound)
        is_caught = outcome in ("failed", "timeout")
        seconds = round(time.monotonic() - began_s, 1)
        rows.append({"fault": fault.name, "file": fault.path, "outcome": outcome, "is_caught": is_caught, "s": seconds})
        print(
            f"{'caught' if is_caught else 'MISSED':7} {outcome:8} {seconds:6.1f} s  {fault.path}: {fault.name}",
            flush=True,
        )
    return rows


def main() -> int:
    """Run the faults of the command line; 1 when one is missed, 2 when sound code fails or a fault has no place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words of the faults' names or files; all by default")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--check", action="store_true", help="only say which faults have no place in the code")
    arguments = parser.parse_args()
    chosen = [
        one for one in read_faults() if not arguments.names or any(n in one.name + one.path for n in arguments.names)
    ]
    if problems := misplaced(chosen, _ROOT):
        print("\n".join(problems))
        return 2
    if arguments.check:
        return 0
    with tempfile.TemporaryDirectory(prefix="alignedserve-faults-") as folder:
        copy_of(_ROOT, Path(folder))
        for tests, is_slow in dict.fromkeys((one.tests, one.is_slow) for one in chosen):
            if (outcome := outcome_of(tests, is_slow, Path(folder), sys.executable)) != "passed":
                print(f"without a fault: {outcome}: {' '.join(tests)}")
                return 2
        rows = run(chosen, Path(folder), sys.executable)
    num_caught = sum(bool(row["is_caught"]) for row in rows)
    print(f"{num_caught} of {len(rows)} faults caught")
    if arguments.output is not None:
        arguments.output.write_text(
            json.dumps({"num_faults": len(rows), "num_caught": num_caught, "faults": rows}, indent=1)
        )
    return 0 if num_caught == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

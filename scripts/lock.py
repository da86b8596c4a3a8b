"""Keep requirements.lock, by which pip verifies what an installation serves with: `python scripts/lock.py [--check]`.

The lock has what constraints.txt pins of the dependencies of AlignedServe and of theirs, as they are installed here,
each with the hashes of its files on PyPI. `--check` compares it offline, as `make check` does. Without it the lock is
written anew by uv, which asks the registry for hashes. Of PyTorch it has the CPU builds alone: those of PyPI for ARM,
and the wheels for x86-64 that `--torch FILE` names, which PyPI lacks; hashes stay as long as the version does.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
PINS = ROOT / "constraints.txt"
TOOLS = ROOT / "build" / "lock"
UV = "uv==0.13.8"
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """\
# What AlignedServe serves with on a CPU, for pip's hash-checking mode. By scripts/lock.py from constraints.txt:
#   pip install --require-hashes --no-deps -r requirements.lock --extra-index-url https://download.pytorch.org/whl/cpu
"""
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")
Hashes = dict[str, tuple[str, list[str]]]  # version and hashes of each package


def pins_of(text: str) -> dict[str, str]:
    """Return the pinned version of each package, by its normalised name."""
    found = (PIN.match(line) for line in text.splitlines())
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def locked(text: str) -> Hashes:
    """Return what a lock holds."""
    found: Hashes = {}
    name = ""
    for line in text.splitlines():
        match = PIN.match(line)
        if match:
            name = canonicalize_name(match[1])
            found[name] = (match[2], [])
        if name and not line.lstrip().startswith("#"):
            found[name][1].extend(HASH.findall(line))
    return found


def needed(requirements: Iterable[str]) -> set[str]:
    """Return the names of all packages that these requirements need here, themselves included.

    Raises PackageNotFoundError for one that is not installed.
    """
    found: set[tuple[str, str]] = set()  # with extras, which have requirements of their own
    left = [Requirement(one) for one in requirements]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        for extra in one.extras or {""}:
            if (name, extra) in found:
                continue
            found.add((name, extra))
            found.add((name, ""))
            asked = map(Requirement, requires(name) or ())
            left += [each for each in asked if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def problems(lock: Hashes, pins: Mapping[str, str], wanted: Collection[str]) -> list[str]:
    """Return why the lock is not the one of these pins and packages."""
    found = [f"{name} is missing" for name in sorted(set(wanted) - lock.keys())]
    for name, (version, hashes) in sorted(lock.items()):
        if name not in wanted:
            found.append(f"{name} is not needed")
        elif version != pins.get(name):
            found.append(f"{name} is {version}, and {pins.get(name, 'nothing')} in {PINS.name}")
        elif not hashes:
            found.append(f"{name} has no hash")
    return found


def hashes_of(pins: Mapping[str, str]) -> Hashes:
    """Return the hashes of all files that the registry has of these versions. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", TOOLS, "--upgrade", UV], check=True)
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "pins.in"
        asked.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        options = ("--generate-hashes", "--no-deps", "--no-annotate", "--no-header", "--quiet")
        said = subprocess.run(
            [TOOLS / "bin" / "uv", "pip", "compile", *options, asked], capture_output=True, text=True, check=True
        )
    return locked(said.stdout)


def written(lock: Hashes) -> str:
    """Return the text of a lock."""
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes)]) + "\n"
        for name, (version, hashes) in sorted(lock.items())
    ]
    return HEAD + "".join(lines)


def torch_on_arm(version: str) -> set[str]:
    """Return the hashes of PyPI's PyTorch for Linux on ARM, by its metadata. Raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    where = ["--no-deps", "--only-binary", ":all:", "--target", "/nowhere", "--platform", "manylinux_2_28_aarch64"]
    found = set()
    for python in PYTHONS:
        asked = [*pip, *where, "--python-version", python, f"torch==={version}"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True)
        (item,) = json.loads(said.stdout)["install"]
        found.add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def renewed(pins: Mapping[str, str], former: Hashes, torch_wheels: Sequence[Path]) -> Hashes:
    """Return the lock of these pins. The former one's hashes of PyTorch stay if its version does."""
    version = pins["torch"]
    lock = hashes_of({name: pin for name, pin in pins.items() if name != "torch"})
    kept = former["torch"][1] if "torch" in former and former["torch"][0] == version else []
    own = {hashlib.sha256(path.read_bytes()).hexdigest() for path in torch_wheels}
    lock["torch"] = version, sorted({*torch_on_arm(version), *kept, *own})
    return lock


def main(given: Sequence[str] | None = None) -> int:
    """Do as the arguments, those of the command line unless given, say; return 1 where the lock does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, offline")
    parser.add_argument("--torch", type=Path, nargs="+", default=[], metavar="FILE")
    arguments = parser.parse_args(given)
    pins = pins_of(PINS.read_text())
    former = locked(LOCK.read_text()) if LOCK.exists() else {}
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = needed([*project["dependencies"], *project["optional-dependencies"]["vision"]])
    except PackageNotFoundError as error:
        print(f"{LOCK.name}: {error.name} is not installed here; run `make install-dev` first")
        return 1
    if not arguments.check:
        former = renewed({name: pins[name] for name in sorted(wanted)}, former, arguments.torch)
        LOCK.write_text(written(former))
    found = problems(former, pins, wanted)
    for problem in found:
        print(f"{LOCK.name}: {problem}; `python scripts/lock.py` writes it anew")
    if not found:
        print(f"{LOCK.name} has the hashes of {len(former)} packages, at the versions of {PINS.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

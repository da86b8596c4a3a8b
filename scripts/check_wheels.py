"""Resolve what an NVIDIA GPU's machine installs, by the packages' metadata: `python scripts/check_wheels.py [--all]`.

The pins in constraints.txt are tried where PyTorch is the CPU's, whose wheel asks for no Triton: so a pin that CUDA's
wheel contradicts is seen here alone. Nothing is installed, and no wheel is fetched whose index has its metadata apart.
Without a registry it says so and ends well.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
NEWEST_GLIBC = 40  # 2.x; a wheel names the oldest that it runs with
OF_GPU = "gpu"  # the extra
TORCH = re.compile(r"torch(?![\w.-])")  # a requirement of PyTorch itself
PINNED = re.compile(r"^torch==(\S+)", re.MULTILINE)
SHOWN = ("torch", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "flash-attn-4", "nvidia-cutlass-dsl")
_SAID_LINES = 12

# A platform must be given, or pip takes this machine's; then it takes no sources either.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
    "linux_x86_64",
)


class Unresolved(Exception):
    """Requirements that no set of packages meets; the text is what pip said."""


def requirements(project: dict[str, Any], torch: str, *, has_all: bool) -> list[str]:
    """Return what is to be installed together, by pyproject.toml: PyTorch, Triton and the extra; or everything.

    `torch`: the version that is pinned. Three equal signs take PyPI's own build of it, which is CUDA's, where a mirror
    has the CPU's too.
    """
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["dev"], *extras[OF_GPU]]
    of_gpu = [one for one in needed if TORCH.match(one) or one.startswith("triton") or one in extras[OF_GPU]]
    return [f"torch==={torch}" if TORCH.match(one) else one for one in (needed if has_all else of_gpu)]


def resolve(needed: Sequence[str], constraints: Path, *options: str) -> dict[str, str]:
    """Return the version of each package by its name. Raises Unresolved."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    where = ["--target", "/nowhere", "--only-binary", ":all:", "--python-version", version]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    patience = ["--retries", "1", "--timeout", "30", "--disable-pip-version-check"]
    asked = subprocess.run(
        [*pip, *where, *platforms, *patience, "--constraint", str(constraints), *options, *needed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if asked.returncode != 0:
        said = [line for line in asked.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise Unresolved("\n".join(said[-_SAID_LINES:]))
    found = (item["metadata"] for item in json.loads(asked.stdout)["install"])
    return {one["name"].lower().replace("_", "-"): one["version"] for one in found}


def main(given: Sequence[str] | None = None) -> int:
    """Resolve as the arguments, those of the command line unless given, say; return 1 where pins contradict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every dependency and the tools of development: minutes")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="another file of pins")
    arguments = parser.parse_args(given)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = PINNED.search(arguments.constraints.read_text())
    assert pinned is not None, "constraints that do not pin PyTorch"
    needed = requirements(project, pinned[1], has_all=arguments.all)
    try:
        resolve([one for one in needed if TORCH.match(one)], arguments.constraints, "--no-deps")
    except Unresolved:
        print("wheels for NVIDIA GPUs: not checked, as no registry here has PyTorch's build for them")
        return 0
    try:
        found = resolve(needed, arguments.constraints)
    except Unresolved as error:
        print(f"what an NVIDIA GPU's machine installs does not go together ({', '.join(needed)}):\n{error}")
        return 1
    shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    print(f"wheels for NVIDIA GPUs on Linux x86-64 go together, {len(found)} packages: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

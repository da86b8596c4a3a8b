"""Runs tests on kernels that check what they do: python -m tests.sanitized [pytest arguments].

The kernels are compiled by GCC with AddressSanitizer and UndefinedBehaviorSanitizer into build/sanitized, which takes
some minutes, unless they are there and no source is newer. A read or write outside its memory ends the run. Others are
reported at its end, and fail it. Memory that was never written holds NaN.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "sanitized"
TOOLS = ROOT / "build" / "install" / "tools"  # see scripts/install.py
REPORTS = FOLDER / "reports"  # of UndefinedBehaviorSanitizer, a file for each process
TESTS = ("tests/unit/kernels", "tests/unit/runtime/attention", "tests/unit/scheduling")
LIBRARIES = ("libasan.so", "libubsan.so")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255",
    "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={REPORTS / 'report'}",
    "PYTHONMALLOC": "malloc",
    "OMP_WAIT_POLICY": "passive",  # threads that spin take minutes of what is slow anyway
}


def build() -> Path:
    """Compile the kernels, if need be, and return the module's file."""
    sources = [ROOT / "setup.py", *(ROOT / "kernels" / "csrc").rglob("*.[ch]*")]
    built = next(FOLDER.glob("kernels/_native.*.so"), None)
    if built is not None and built.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        built.unlink()
        built = None
    if built is None:
        command: list[str | Path] = [
            sys.executable,
            "setup.py",
            "build_ext",
            "--force",
            "--build-lib",
            FOLDER,
            "--build-temp",
            FOLDER / "temp",
        ]
        paths = os.pathsep.join((str(TOOLS), os.environ.get("PYTHONPATH", "")))
        subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "ALIGNEDSERVE_SANITIZE": "1"}, check=True
        )
        built = next(FOLDER.glob("kernels/_native.*.so"), None)
    assert built is not None, "the kernels were not compiled"
    return built


def begin_again(arguments: list[str]) -> None:
    """Replace this process with one that has loaded the sanitizers first, as they ask for."""
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in LIBRARIES
    ]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": os.pathsep.join(found)}
    os.execve(sys.executable, [sys.executable, "-m", "tests.sanitized", *arguments], environment)


def load(path: Path) -> None:
    """Import the kernels from this file, whichever others are there. Child processes load those."""
    spec = importlib.util.spec_from_file_location("kernels._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["kernels._native"] = module


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if they pass and nothing was reported."""
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        build()
        REPORTS.mkdir(parents=True, exist_ok=True)
        for report in REPORTS.iterdir():
            report.unlink()
        begin_again(arguments)
    load(build())
    code = int(pytest.main([*(arguments or TESTS), "-p", "no:cacheprovider"]))
    reports = [report.read_text() for report in REPORTS.iterdir()]
    print("\n".join(reports), file=sys.stderr)
    return code or bool(reports)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

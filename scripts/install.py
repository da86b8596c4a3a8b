"""Make a virtual environment and install AlignedServe into it: `install.py VENV [EXTRA]`.

The native kernels are compiled while pip fetches and unpacks what AlignedServe needs. A terminal shows one line that
changes, anything else a line per step. What pip and the compiler said is in build/install.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("AlignedServe needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3 ...")

import argparse
import os
import re
import shutil
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "install"
TOOLS = LOGS / "tools"  # what compiles the kernels; the environment has no use for it
CPU_INDEX = ("--index-url", "https://download.pytorch.org/whl/cpu", "--extra-index-url", "https://pypi.org/simple")
# Where the driver knows CUDA 12 and not 13, which PyPI's build is for.
CUDA_12_INDEX = (
    "--index-url",
    "https://download.pytorch.org/whl/cu126",
    "--extra-index-url",
    "https://pypi.org/simple",
)
OLDEST_DRIVER, OLDEST_DRIVER_OF_CUDA_12 = 580, 525
DRIVER = Path("/proc/driver/nvidia/version")
LOOK_S = 0.2
EXTRAS = ("vision", "jwt")  # what a checkout always has
RUNNING: set[subprocess.Popen[bytes]] = set()  # what this process waits for
# Whatever serves imports these, so that their compiled files are there before the first start.
SERVING = ("alignedserve.cli.wiring", "decode_worker.service", "prefill_worker.service")
NAME = re.compile(r"[\w.-]+?(?=-\d|[^\w.-]|$)")  # of a package, at the start of a requirement or a file's name
TORCH = re.compile(r"torch(?![\w.-])")  # a requirement of PyTorch itself
OF_CUDA = re.compile(r"(nvidia|cuda)-")  # the name of a package that only a build for NVIDIA GPUs needs
NEEDS_CUDA = """
import json, sys
from pip._vendor.packaging.requirements import Requirement
lines = [line for item in json.load(sys.stdin)["install"] for line in item["metadata"].get("requires_dist", [])]
for needed in map(Requirement, lines):
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        print(needed.name)
"""


class Failed(Exception):
    """A step that failed; its log says why."""

    def __init__(self, log: Path) -> None:
        super().__init__(f"the end of {log.relative_to(ROOT)}:\n" + "\n".join(_lines(log)[-25:]))


@dataclass(slots=True)
class Screen:
    """The progress of the installation."""

    began_s: float
    step: str = ""
    is_terminal: bool = sys.stdout.isatty()

    def begin(self, step: str) -> None:
        """Say which step begins."""
        self.step = step
        if not self.is_terminal:
            print(f"[{self._elapsed_s:4.0f} s] {step}", flush=True)
        self.show("")

    def show(self, detail: str) -> None:
        """Draw the line anew with what the step is at, where it can be."""
        if self.is_terminal:
            minutes, seconds = divmod(int(self._elapsed_s), 60)
            line = f"{minutes}:{seconds:02d}  {self.step}" + (f": {detail}" if detail else "")
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def end(self, message: str) -> None:
        """Leave a last line."""
        print(f"{chr(13)}\x1b[K{message}" if self.is_terminal else message, flush=True)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began_s


class Environment:
    """A virtual environment that packages are installed into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def make(self) -> None:
        """Make it, unless it is there. pip comes last: an environment without it was broken off, and is made again."""
        if not self.python.exists() or not any(self.folder.glob("lib/python*/site-packages/pip/__main__.py")):
            run([sys.executable, "-m", "venv", "--clear", self.folder], LOGS / "venv.log")

    def install(self, log: str, *arguments: str) -> None:
        """Install what the arguments of `pip install` name; `log`: the name of its log. Raises Failed."""
        self._pip(log, "--no-compile", "--constraint", "constraints.txt", *arguments)

    def install_checkout(self) -> None:
        """Install what is here in place, without its kernels, which are compiled. Raises Failed."""
        env = with_tools(ALIGNEDSERVE_PLAIN="1")
        packages = ("--editable", ".", "--editable", "lab")
        self._pip("alignedserve", "--no-deps", "--no-build-isolation", "--no-compile", *packages, env=env)

    def fetch_tools(self, requirements: list[str]) -> None:
        """Install into the folder of tools. Raises Failed."""
        self._pip("tools", "--no-compile", "--target", str(TOOLS), *requirements)

    def has_cuda_build(self, torch: str) -> bool:
        """Return whether pip would take a build of PyTorch that brings CUDA along."""
        pip: list[str | Path] = [self.python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report"]
        report = subprocess.run([*pip, "-", torch], cwd=ROOT, capture_output=True, text=True)
        if report.returncode != 0:
            return False  # pip says why when it is to install it
        needed = subprocess.run([self.python, "-c", NEEDS_CUDA], input=report.stdout, capture_output=True, text=True)
        return any(OF_CUDA.match(name) for name in needed.stdout.split())

    def drop_torch_tests(self) -> None:
        """Drop PyTorch's own tests of C++, a fifth of its bytes."""
        for torch in self.folder.glob("lib/python*/site-packages/torch"):
            shutil.rmtree(torch / "test", ignore_errors=True)
            for program in torch.glob("bin/test_*"):
                program.unlink()

    def has(self, requirement: str) -> bool:
        """Return whether this version of a package is installed, in whichever build."""
        name, version = requirement.split("==")
        return any(self.folder.glob(f"lib/python*/site-packages/{name}-{version}[+.]*dist-info"))

    def _pip(self, log: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        options = ("--progress-bar", "off", "--disable-pip-version-check")
        run([self.python, "-m", "pip", "install", *options, *arguments], LOGS / f"{log}.log", env=env)


class Job:
    """Work that goes on beside other work."""

    def __init__(self, work: Callable[[], None], progress: Callable[[], str]) -> None:
        """`progress`: says in a few words what it is at."""
        self._work = work
        self._progress = progress
        self._failure: Failed | None = None
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    def _do(self) -> None:
        try:
            self._work()
        except Failed as failure:
            self._failure = failure

    @property
    def is_going_on(self) -> bool:
        """Return whether it goes on. Raises Failed."""
        if self._failure is not None:
            raise self._failure
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end. Raises Failed."""
        self._thread.join()
        assert not self.is_going_on

    @property
    def progress(self) -> str:
        """Return what it is at."""
        return self._progress() if self.is_going_on else ""


def with_tools(**variables: str) -> dict[str, str]:
    """Return the environment of a process that finds the tools."""
    return {**os.environ, **variables, "PYTHONPATH": str(TOOLS)}


def run(command: Sequence[str | Path], log: Path, *, env: dict[str, str] | None = None) -> None:
    """Run a command whose output goes to its log. Raises Failed."""
    with log.open("a") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    RUNNING.add(process)
    code = process.wait()
    RUNNING.remove(process)
    if code != 0:
        raise Failed(log)


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def pip_progress(log: Path) -> str:
    """Return what pip does now, from its output."""
    for line in reversed(_lines(log) if log.exists() else []):
        words = line.split()
        if line.startswith("Installing collected packages"):
            return f"unpacking {words[3] if len(words) == 4 else f'{len(words) - 3} packages'}"
        if words[:1] in (["Collecting"], ["Downloading"], ["Processing"]) and len(words) > 1:
            found = NAME.match(Path(words[1]).name)
            return f"fetching {found[0] if found else words[1]}"
    return "looking for packages"


def kernel_progress(began_s: float) -> str:
    """Return how many of the kernels' sources are compiled."""
    objects = [path for path in ROOT.glob("build/temp.*/**/*.o") if path.stat().st_mtime > began_s]
    return f"{len(objects)} of {len(list(ROOT.glob('kernels/csrc/**/*.cpp')))} kernel sources compiled"


def install(venv: Path, extras: list[str], screen: Screen) -> None:
    """Install AlignedServe with these extras. Raises Failed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = list(project["project"]["dependencies"])
    for extra in (*EXTRAS, *extras):
        needed += project["project"]["optional-dependencies"][extra]
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    environment = Environment(venv)
    screen.begin(f"Making a virtual environment in {venv.name}")
    environment.make()
    screen.begin("Installing packages, compiling native kernels")
    tools = Job(partial(environment.fetch_tools, project["build-system"]["requires"]), str)
    kernels = Job(partial(compile_kernels, environment, tools), partial(kernel_progress, time.time()))
    install_packages(environment, needed, kernels, screen)
    wait_for([kernels, Job(partial(install_here, environment, tools), str)], screen)


def install_here(environment: Environment, tools: Job) -> None:
    """Install AlignedServe itself, and compile the modules that serve."""
    tools.wait()
    environment.install_checkout()
    compile_modules(environment)


def compile_kernels(environment: Environment, tools: Job) -> None:
    """Compile the native kernels in place. They are optional: without a compiler, plain PyTorch computes."""
    tools.wait()
    build: list[str | Path] = [environment.python, "setup.py", "build_ext", "--inplace"]
    run(build, LOGS / "kernels.log", env=with_tools(ALIGNEDSERVE_HERE="1"))


def install_packages(environment: Environment, needed: list[str], kernels: Job, screen: Screen) -> None:
    """Install what AlignedServe needs: PyTorch, whose file is as large as all others, beside these; then what is left.

    No other package needs PyTorch, and two that are installed at the same time share no file.
    """
    others = [requirement for requirement in needed if not TORCH.match(requirement)]
    wait_for(
        [
            Job(partial(install_torch, environment), partial(pip_progress, LOGS / "torch.log")),
            Job(partial(environment.install, "packages", *others), partial(pip_progress, LOGS / "packages.log")),
        ],
        screen,
        beside=kernels,
    )
    environment.install("left", *needed)


def install_torch(environment: Environment) -> None:
    """Install the pinned PyTorch without what it needs: the build that this machine's driver runs.

    Without an NVIDIA driver the CPU build is wanted, which is gigabytes smaller. Where pip already finds one (a local
    wheel, a mirror), no index is named.
    """
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    if environment.has(torch):
        return
    index = torch_index(driver_of(DRIVER))
    if index == CPU_INDEX and not environment.has_cuda_build(torch):
        index = ()
    environment.install("torch", *index, "--no-deps", torch)
    environment.drop_torch_tests()


def driver_of(file: Path) -> int | None:
    """Return the first number of the NVIDIA driver's version, 580 of 580.95.05; None: no driver is loaded."""
    try:
        found = re.search(r"\s(\d{3,})\.\d+", file.read_text(errors="replace"))
    except OSError:
        return None
    return int(found[1]) if found else OLDEST_DRIVER


def torch_index(driver: int | None) -> Sequence[str]:
    """Return pip's options for the build of PyTorch that this driver runs; none: PyPI's own."""
    if driver is None or driver < OLDEST_DRIVER_OF_CUDA_12:
        return CPU_INDEX
    return () if driver >= OLDEST_DRIVER else CUDA_12_INDEX


def compile_modules(environment: Environment) -> None:
    """Keep compiled files of the modules that serve, a tenth of all; those of others are kept once they are used."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([environment.python, "-c", f"import {', '.join(SERVING)}"], cwd=ROOT, env=env, capture_output=True)


def wait_for(jobs: list[Job], screen: Screen, beside: Job | None = None) -> None:
    """Wait for jobs, showing what they are at, and what another is at. Raises Failed, also for that one."""
    shown = jobs if beside is None else [*jobs, beside]
    while sum(job.is_going_on for job in jobs):
        screen.show(", ".join(progress for job in shown if (progress := job.progress)))
        time.sleep(LOOK_S)


def main() -> int:
    """Install what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", help="folder of the environment")
    parser.add_argument("extras", nargs="*", metavar="extra", help="such as dev")
    options = parser.parse_args()
    screen = Screen(time.monotonic())
    try:
        install(ROOT / options.venv, options.extras, screen)
    except Failed as failure:
        screen.end(f"The installation failed; {failure}")
        return 1
    except KeyboardInterrupt:
        screen.end("Interrupted; the next `make` goes on.")
        return 130
    finally:
        for process in list(RUNNING):
            process.terminate()
    has_kernels = any(ROOT.glob("kernels/_native*.so"))
    screen.end(f"Installed in {time.monotonic() - screen.began_s:.0f} s" + ("" if has_kernels else ", without kernels"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

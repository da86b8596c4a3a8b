"""The engine against transformers and OpenVINO GenAI: the same shapes, lengths and threads, random weights, greedy.

Every contender is a process of its own that sleeps while the others run; rounds alternate, medians count. OpenVINO
GenAI gets an environment of its own (.venv-compare), made on the first run from the package registry, and its own
defaults but for precision, cache size and the 2048 tokens that a step may have. One of these defaults is a cache of 8
bits, whatever the precision: `openvino_exact` keeps keys and values in the dtype, as `alignedserve` does;
`alignedserve_int8` has a cache of 8 bits too. transformers gets static batches of equal prompts, so it is left out
where every length differs.

    python -m benchmarks.compare [--shape opt-125m] [--workload w1 ...] [--dtype float32 ...] [--rounds 3]
    python -m benchmarks.compare --shape opt-125m --workload w4 --contenders alignedserve_int8 openvino
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from alignedserve.microbench.engine.workloads import W4, parse_workload
from benchmarks.compare.contender_process import ROOT, Contender
from benchmarks.compare.shapes import TRANSFORMERS_CONFIGS
from benchmarks.support.recording import read_figures, write_result

ENVIRONMENT = ROOT / ".venv-compare"
PACKAGES = ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
DTYPES = ("float32", "bfloat16")
WORKLOADS = ("w1", "w2", "w3", W4)
OPENVINO = frozenset({"openvino", "openvino_exact"})
OURS = frozenset({"alignedserve", "alignedserve_int8"})


class ComparedCase(NamedTuple):
    """One row of the table."""

    shape: str
    workload: str
    dtype: str

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Return (prompt, output) of every request."""
        groups = parse_workload(self.workload)
        return [(group.prompt_len, group.output_len) for group in groups for _ in range(group.num_requests)]


def main() -> None:
    """Run every case, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(TRANSFORMERS_CONFIGS), default=list(TRANSFORMERS_CONFIGS))
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--contenders", nargs="+", default=["alignedserve", "transformers", "openvino"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT)
    parser.add_argument("--name", default="compare", help="of the file under benchmarks/results")
    parser.add_argument("--add", action="store_true", help="keep the recorded rows of other cases")
    arguments = parser.parse_args()
    if OPENVINO.intersection(arguments.contenders):
        make_environment(arguments.environment)
    recorded = read_figures(arguments.name) if arguments.add else None
    rows = [] if recorded is None else recorded["rows"]
    for shape in arguments.shape:
        for workload in arguments.workload:
            for dtype in arguments.dtype:
                case = ComparedCase(shape, workload, dtype)
                rows = [row for row in rows if any(row[name] != value for name, value in case._asdict().items())]
                rows.append(compare(case, arguments))
                print(line_of(rows[-1]), flush=True)
                write_result(arguments.name, {"rounds": arguments.rounds, "openvino": PACKAGES[1], "rows": rows})


def make_environment(folder: Path) -> None:
    """Make OpenVINO's own environment, where there is none yet."""
    if (folder / "made").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", *PACKAGES], check=True)
    # Comes along built for another PyTorch, with which transformers cannot be imported; nothing here needs it.
    subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)
    (folder / "made").touch()


def compare(case: ComparedCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of every contender, and the ratio of the first of ours to each other one."""
    names = [name for name in arguments.contenders if name != "transformers" or case.workload != W4]
    contenders = {name: Contender(command_of(name, case, arguments.environment)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name, contender in contenders.items():
            seconds[name].append(contender.play())
    for contender in contenders.values():
        contender.close()
    num_tokens = sum(output_len for _, output_len in case.lengths)
    rates = {name: num_tokens / statistics.median(values) for name, values in seconds.items()}
    ours = next((name for name in names if name in OURS), None)
    ratios = {name: rates[ours] / rate for name, rate in rates.items() if ours is not None and name != ours}
    times = {"seconds": seconds, "load_1min": psutil.getloadavg()[0]}
    return {**case._asdict(), "output_tokens_per_s": rates, "ratio_to": ratios, **times}


def command_of(name: str, case: ComparedCase, environment: Path) -> list[str]:
    """Return the command of this contender."""
    workload = json.dumps(case.lengths)
    if name not in OPENVINO:
        module = ["-m", "benchmarks.compare.contenders", name]
        return [sys.executable, *module, case.shape, case.dtype, workload]
    folder = environment / "models"
    folder.mkdir(exist_ok=True)
    (folder / f"{case.shape}.json").write_text(json.dumps(TRANSFORMERS_CONFIGS[case.shape]))
    script = str(Path(__file__).parent / "openvino_contender.py")
    kind = ["exact"] if name == "openvino_exact" else []
    return [str(environment / "bin" / "python"), script, str(folder), case.shape, case.dtype, workload, *kind]


def line_of(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in row["output_tokens_per_s"].items())
    ratios = "  ".join(f"{ratio:.2f} x {name}" for name, ratio in row["ratio_to"].items())
    return f"{row['shape']:10} {row['workload']:4} {row['dtype']:8}  {rates}  |  {ratios}"


if __name__ == "__main__":
    main()

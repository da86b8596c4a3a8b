"""The tables of docs/gpu.md from what benchmarks/results/gpu has of a GPU: targets, and where each part has run.

python -m benchmarks.gpu.seen
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.part_list import PART_LIST
from benchmarks.gpu.targets import outcomes
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def main() -> None:
    """Write them."""
    PAGE.write_text(with_seen(PAGE.read_text(), recorded(RESULTS / "gpu")))


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each part has recorded, by its name."""
    files = {part.name: folder / f"gpu_{part.name}.json" for part in PART_LIST}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def with_seen(page: str, records: dict[str, dict[str, Any]]) -> str:
    """Return the page with the tables of these records."""
    found = outcomes({name: record["figures"] for name, record in records.items()}, is_toy=False)
    targets = "| figure | target | seen | |\n|---|---|---|---|\n" + "".join(
        f"| {one.what} | {_spaced(one.target)} | {_spaced(one.seen)} | {one.verdict} |\n" for one in found
    )
    runs = "| part | day | GPU | driver | PyTorch | Triton |\n|---|---|---|---|---|---|\n" + "".join(
        f"| `{name}` | {_run(record)} |\n" for name, record in records.items()
    )
    return put_table(put_table(page, "gpu targets", targets), "gpu runs", runs)


def _spaced(figure: str) -> str:
    """Return a figure as pages show it, without the reasons why something was left out, which the record has."""
    why = figure.find("; left out: ")
    shown = figure if why < 0 else figure[:why] + "; others left out)"
    return shown.replace(".0%", "%").replace("%", " %")


def _run(record: dict[str, Any]) -> str:
    machine = record["machine"]
    names = " + ".join(gpu["name"] for gpu in machine["gpus"])
    torch = f"{machine['torch']}, CUDA {machine['cuda']}"
    return " | ".join((record["measured_at"][:10], names, machine["driver"], torch, str(machine["triton"])))


if __name__ == "__main__":
    main()

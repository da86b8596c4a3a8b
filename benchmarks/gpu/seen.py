"""The tables of docs/gpu.md and of decision 73 from what benchmarks/results/gpu has of a GPU.

python -m benchmarks.gpu.seen
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.targets import outcomes
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import RESULTS

_DOCS = Path(__file__).parents[2] / "docs"
PAGES = (_DOCS / "gpu.md", _DOCS / "decisions" / "0073-lists-of-copies.md")


def main() -> None:
    """Write them."""
    parser_of(__doc__).parse_args()
    for page in PAGES:
        page.write_text(with_seen(page.read_text(), recorded(RESULTS / "gpu")))


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem.removeprefix("gpu_"): json.loads(file.read_text()) for file in sorted(folder.glob("gpu_*.json"))}


def with_seen(page: str, records: dict[str, dict[str, Any]]) -> str:
    found = outcomes({name: record.get("figures", {}) for name, record in records.items()}, is_toy=False)
    targets = "| figure | target | seen | |\n|---|---|---|---|\n" + "".join(
        f"| {one.what} | {_spaced(one.target)} | {_spaced(one.seen)} | {one.verdict} |\n" for one in found
    )
    tables = {"gpu targets": targets}
    if "promise" in records:
        tables["gpu promise"] = _promise(records["promise"]["figures"])
    if "list-copies" in records:
        tables["gpu lists"] = _lists(records["list-copies"]["figures"])
    for name, table in tables.items():
        page = put_table(page, name, table)
    return page


def _promise(figures: dict[str, Any]) -> str:
    lines = [
        "| policy | phase | chats held | TTFT p50, p99, ms | TPOT p50, p99, ms | longest gap p99, ms "
        "| documents: prompt, output tokens/s | iterations/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, found in figures["policies"].items():
        for phase, seen in found["phases"].items():
            chat, documents = seen.get("chat"), seen.get("documents")
            cells = [policy, phase, "", "", "", "", "", f"{seen['iterations']['per_s']:.1f}"]
            if chat:
                cells[2] = f"{chat['held']:.0%} of {chat['num']}".replace("%", " %")
                cells[3:6] = [
                    *(
                        ", ".join(f"{chat[name][at] * 1e3:.0f}" for at in ("p50", "p99"))
                        for name in ("ttft_s", "tpot_s")
                    ),
                    f"{chat['longest_gap_s']['p99'] * 1e3:.0f}",
                ]
            if documents:
                cells[6] = f"{documents['prompt_tokens_per_s']:,.0f}, {documents['output_tokens_per_s']:,.0f}"
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _lists(figures: dict[str, Any]) -> str:
    ways = [name for name in figures["rows"][0]["gb_per_s"] if name != "plain"]
    lines = [f"| block | {' | '.join(ways)} | plain copy |", "|---" * (len(ways) + 2) + "|"]
    for row in figures["rows"]:
        rates = [f"{row['gb_per_s'][name]:.1f}" for name in (*ways, "plain")]
        lines.append(f"| {row['block_bytes'] >> 10} KiB | {' | '.join(rates)} |")
    return "\n".join(lines) + "\n"


def _spaced(figure: str) -> str:
    return figure.replace(".0%", "%").replace("%", " %")


if __name__ == "__main__":
    main()

"""Writes the tables of docs/policies/field.md from the record of `benchmarks.promise.classed_policies`.

python -m benchmarks.promise.classed_table
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import read_figures

PAGE = Path(__file__).parents[2] / "docs/policies/field.md"
RECORD = "scheduling/classed_policies"
_HEAD = "| load | | chat attains both | TTFT p99, s | longest gap, s | documents, tokens/s |\n|---|---|---|---|---|---|"
_PLACE = re.compile(r"<!-- table: (.+) -->\n\n(?:\|.*\n)*")


def table(shape: str) -> str:
    """Return the rows of this shape, load by load; the best attainments of a load are bold."""
    rows = [row for row in read_figures(RECORD) if row["shape"] == shape]
    loads = dict.fromkeys(row["load"] for row in rows)
    lines = [line for load in loads for line in _lines(load, [row for row in rows if row["load"] == load])]
    return "\n".join((_HEAD, *lines))


def _lines(load: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    best = max(row["attainment"] for row in rows)
    for number, row in enumerate(rows):
        attained = f"{row['attainment']:.1%}".replace("%", " %")
        shown = f"**{attained}**" if row["attainment"] > best - 0.0005 else attained
        name = "" if number else load
        budget = row["settings"].get("token_budget")
        size = f", {budget} tokens" if budget else ""
        figures = f"{row['ttft_p99_s']:.2f} | {row['longest_gap_s']:.2f} | {row['document_tokens_per_s']:.0f}"
        yield f"| {name} | `{row['policy']}`{size} | {shown} | {figures} |"


def with_tables(text: str) -> str:
    """Return the page with the tables of the record."""
    return _PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n\n{table(place[1])}\n", text)


def main() -> None:
    """Write them."""
    parser_of(__doc__).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()

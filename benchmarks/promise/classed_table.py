"""Writes the tables of docs/policies/field.md from the record of `benchmarks.promise.classed_policies`.

python -m benchmarks.promise.classed_table
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import read_figures

PAGE = Path(__file__).parents[2] / "docs/policies/field.md"
RECORD = "scheduling/classed_policies"
_PLACE = re.compile(r"<!-- table: (.+) -->\n\n(?:\|.*\n)*")


def table(shape: str) -> str:
    """Return a line for each policy and a column for each load; the best attainments of a load are bold."""
    rows = [row for row in read_figures(RECORD) if row["shape"] == shape]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    best = {load: max(row["attainment"] for row in rows if row["load"] == load) for load in loads}
    policies = dict.fromkeys(row["policy"] for row in rows)
    lines = [_line(policy, [row for row in rows if row["policy"] == policy], best) for policy in policies]
    return "\n".join((f"| policy, tokens | {' | '.join(loads)} |", "|---" * (len(loads) + 1) + "|", *lines))


def _line(policy: str, rows: Sequence[dict[str, Any]], best: Mapping[str, float]) -> str:
    budgets = {row["load"]: row["settings"].get("token_budget") for row in rows}
    usual = next(iter(budgets.values()))
    others = [f"{load} {budget}" for load, budget in budgets.items() if budget != usual]
    name = ", ".join([f"`{policy}` {usual}" if usual else f"`{policy}`", *others])
    return f"| {name} | " + " | ".join(_cell(row, best[row["load"]]) for row in rows) + " |"


def _cell(row: Mapping[str, Any], best: float) -> str:
    attained = f"{100 * row['attainment']:.1f}"
    shown = f"**{attained}**" if row["attainment"] > best - 0.0005 else attained
    return f"{shown}, {row['ttft_p99_s']:.2f}, {row['longest_gap_s']:.2f}, {row['document_tokens_per_s']:.0f}"


def with_tables(text: str) -> str:
    return _PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n\n{table(place[1])}\n", text)


def main() -> None:
    """Write them."""
    parser_of(__doc__).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()

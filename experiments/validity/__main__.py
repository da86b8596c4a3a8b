"""Which pages of docs/experiments are stale: measured with a decision code that is not today's.

    python -m experiments.validity [PAGE ...]               # a line for each page; exit code 1: some are stale
    python -m experiments.validity --repeat [PAGE ...]      # simulate a sample of the stale rows again, where none was
    python -m experiments.pages                             # writes what is found on the pages

A row is valid while the digest of the code that decided it is one of today's, or if the quickest row of its system and
code and the one that holds least, simulated again by today's code, have the same figures (results/repeated.json).
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence

from benchmarks.measuring.arguments import parser_of
from experiments.common import Row, print_table
from experiments.grid import repeats as grid_repeats
from experiments.grid.record import PATH, Record
from experiments.grid.search import simulate
from experiments.pages.record import figures
from experiments.pages.stale import PAGES, rows_of
from experiments.validity.decision_code import digests
from experiments.validity.rows import REPEATED, Repeat, State, is_stale, repeats, states, system_of, told_today
from experiments.validity.samples import CASES, repeat, sample


def main() -> None:
    """Say which pages are stale; repeat samples if asked to."""
    parser = parser_of(__doc__)
    parser.add_argument("pages", nargs="*", help=f"only these: {', '.join(PAGES)}")
    parser.add_argument("--repeat", action="store_true", help="simulate a sample of the stale rows again")
    parser.add_argument("--anew", action="store_true", help="with --repeat: of rows too that hold by a repeated sample")
    parser.add_argument("--each", type=int, default=1, help="rows of each system and code")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    options = parser.parse_args()
    unknown = [page for page in options.pages if page not in PAGES]
    if unknown:
        parser.error(f"unknown page {unknown[0]!r}; known: {', '.join(PAGES)}")
    pages = options.pages or list(PAGES)
    if options.repeat:
        for page in pages:
            known = () if options.anew else told_today(page)
            _record(page, known, _repeated(page, known, num_each=options.each, processes=options.processes))
        repeats.cache_clear()
    sys.exit(_show(pages))


def _repeated(page: str, known: Sequence[Repeat], *, num_each: int, processes: int) -> list[Row]:
    today, are_told = list(digests().values()), {(one["system"], one["code"]) for one in known}
    if page not in CASES:
        outcomes = grid_repeats.sample(Record(PATH), today, num_each=num_each)
        return grid_repeats.repeat([one for one in outcomes if (one.kind, one.code) not in are_told], simulate)
    rows = [row for row in figures(page)["runs"] if (system_of(row), row.get("code")) not in are_told]
    return repeat(sample(rows, CASES[page](), today, num_each=num_each), processes=processes)


def _record(page: str, known: Sequence[Repeat], found: Sequence[Row]) -> None:
    recorded = json.loads(REPEATED.read_text()) if REPEATED.exists() else {}
    REPEATED.write_text(json.dumps({**recorded, page: [*known, *found]}, indent=1) + "\n")
    print(f"{page}: {len(found)} rows again")
    for one in found:
        print(f"  {one['system']} of {one['code']}: {'the same' if one['is_same'] else 'other figures'}")


def _show(pages: Sequence[str]) -> int:
    lines = []
    for page in pages:
        rows = rows_of(page)
        counts = Counter(states(page, rows))
        num_stale = sum(count for state, count in counts.items() if is_stale(state))
        shown = {state.name.lower(): counts[state] for state in State}
        lines.append({"page": page, "stale": "stale" if num_stale else "", "rows": len(rows), **shown})
    print_table(lines, {name: name for name in lines[0]})
    return int(any(line["stale"] for line in lines))


if __name__ == "__main__":
    main()

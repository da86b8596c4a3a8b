"""Which pages of docs/experiments are stale: measured with a decision code that is not today's.

    python -m experiments.validity [PAGE ...]               # a line for each page; exit code 1: some are stale
    python -m experiments.validity --repeat [PAGE ...]      # simulate a sample of the stale rows again
    python -m experiments.pages                             # writes what is found on the pages

A row is valid while the digest of the code that decided it is one of today's, or if the quickest row of its system and
code, simulated again by today's code, has the same figures (results/repeated.json).
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence

from benchmarks.measuring.arguments import parser_of
from experiments.common import print_table
from experiments.pages.record import figures
from experiments.validity.decision_code import digests
from experiments.validity.rows import REPEATED, State, is_stale, num_bursts, repeats, states
from experiments.validity.samples import CASES, repeat, sample


def main() -> None:
    """Say which pages are stale; repeat samples if asked to."""
    parser = parser_of(__doc__)
    parser.add_argument("pages", nargs="*", help="only these")
    parser.add_argument("--repeat", action="store_true", help="simulate a sample of the stale rows again")
    parser.add_argument("--each", type=int, default=1, help="rows of each system and code")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    options = parser.parse_args()
    pages = options.pages or list(CASES)
    if options.repeat:
        for page in pages:
            _repeat(page, num_each=options.each, processes=options.processes)
        repeats.cache_clear()
    sys.exit(_show(pages))


def _repeat(page: str, *, num_each: int, processes: int) -> None:
    chosen = sample(figures(page)["runs"], CASES[page](), list(digests().values()), num_each=num_each)
    print(f"{page}: {len(chosen)} rows again")
    found = repeat(chosen, processes=processes)
    known = json.loads(REPEATED.read_text()) if REPEATED.exists() else {}
    REPEATED.write_text(json.dumps({**known, page: found}, indent=1) + "\n")
    for one in found:
        print(f"  {one['system']} of {one['code']}: {'the same' if one['is_same'] else 'other figures'}")


def _show(pages: Sequence[str]) -> int:
    """Print a line for each page; return 1 if one is stale."""
    lines = []
    for page in pages:
        rows = figures(page)["runs"]
        counts = Counter(states(page, rows))
        num_stale = sum(count for state, count in counts.items() if is_stale(state))
        shown = {state.name.lower(): counts[state] for state in State}
        bursts = num_bursts(rows)
        lines.append(
            {"page": page, "stale": "stale" if num_stale else "", "rows": len(rows), **shown, "bursts": bursts}
        )
    print_table(lines, {name: name for name in lines[0]})
    return int(any(line["stale"] for line in lines))


if __name__ == "__main__":
    main()

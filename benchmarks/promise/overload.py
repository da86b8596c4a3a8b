"""More chats than a server can compute, live: what becomes of them with and without refusals.

    python -m benchmarks.promise.overload                               # eight minutes, on a quiet machine
    python -m benchmarks.promise.overload --topology elastic --rate 30  # those of other topologies are kept
    python -m benchmarks.promise.overload --page                        # only the table of the page

A model of 125M OPT's shape with random weights in bfloat16. Chat alone: Poisson, prompts log-normal around 100 tokens,
answers around 60, TTFT 0.4 s, TPOT 0.2 s, some three times as many as the server can compute, for a minute. To fit a
minute gateways give up after 20 s, a sixth of the default; so the router refuses who would wait for more than 15 s.
With `off` it refuses nobody; `held` counts chats a second that were in time by both objectives. The table stands in
docs/policies/aligned_slo.md; tests/unit/docs/test_overload.py holds page and record together.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import CHAT, TOPOLOGIES, served, settings_of, traffic_report

RECORD = "serving/overload"
PAGE = Path(__file__).parents[2] / "docs" / "policies" / "aligned_slo.md"
PATIENCE_S = 20.0
_WAYS = {"off": ("router.max_real_time_wait_s=100000",), "on": ()}
_HEAD = "| workers | chats | refused | given up | completed | held, a second | TTFT p50, s | longest TTFT, s |"
Row = dict[str, Any]


def measure(folder: Path, topology: str, way: str, rate: float, duration_s: float) -> Row:
    """Serve and load; return what became of the chats."""
    settings = [*settings_of(topology), f"gateway.first_token_timeout_s={PATIENCE_S}", *_WAYS[way]]
    with served(folder, settings) as port:
        traffic_report(port, folder, [CHAT.format(rate=1.0)], 5.0)
        report = traffic_report(port, folder, [CHAT.format(rate=rate)], duration_s)
    (chat,) = (one for one in report["classes"] if one["name"] == "chat")
    return {
        "num_sent": chat["num_sent"],
        "num_completed": chat["num_completed"],
        "failures": chat["failures"],
        "failure_reasons": chat["failure_reasons"],
        "held_per_s": chat["slo_attainment"] * chat["num_sent"] / duration_s,
        "ttft_s": chat["ttft_s"],
    }


def table(figures: Mapping[str, Any]) -> str:
    """Return the table: each topology without refusals, then with them."""
    rows = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for topology, of_topology in figures["topologies"].items():
        ways = [_cells(way) for way in of_topology.values()]
        rows.append(f"| {topology} | " + " | ".join(_pair(*pair) for pair in zip(*ways, strict=True)) + " |")
    return "\n".join(rows) + "\n"


def _cells(way: Row) -> list[str]:
    counts = (way["num_sent"], *(way["failures"].get(label, 0) for label in ("http 503", "error event")))
    ttft_s = way["ttft_s"]
    figures = (way["held_per_s"], ttft_s["p50"], ttft_s["max"])
    return [*(str(count) for count in (*counts, way["num_completed"])), *(f"{figure:.1f}" for figure in figures)]


def _pair(off: str, on: str) -> str:
    return off if off == on else f"{off}, {on}"


def with_table(page: str) -> str:
    figures = read_figures(RECORD)
    return page if figures is None else put_table(page, "overload, live", table(figures))


def main() -> None:
    """Measure, print, record, and write the table into its page."""
    parser = parser_of(__doc__, name=RECORD)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--rate", type=float, default=40.0, help="chats per second")
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    if not arguments.page:
        load = {"rate": arguments.rate, "duration_s": arguments.duration}
        known = read_figures(arguments.name)
        figures = known if known and known["load"] == load else {"load": load, "topologies": {}}
        with tempfile.TemporaryDirectory() as name:
            folder = make_opt_125m(Path(name) / "opt-125m")
            for topology in arguments.topology:
                of_topology = figures["topologies"].setdefault(topology, {})
                for way in _WAYS:
                    of_topology[way] = row = measure(folder, topology, way, arguments.rate, arguments.duration)
                    print(topology, way, row, flush=True)
                print(f"written to {write_result(arguments.name, figures)}", flush=True)
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

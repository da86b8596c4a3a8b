"""Simulates chat beside documents on a GPU whose passes stop between layers, and on one whose passes do not.

    python -m benchmarks.gpu.stops_simulated        # about three minutes of one core

The loads of the live runs, by costs fitted to iterations of that GPU, and with what passed between iterations there. A
stop waits for one layer in the simulator; live for up to three, as the host launches two ahead. Writes the record, and
prints it as a table.
"""

from typing import Any

from benchmarks.gpu.promise_simulated import BETWEEN, BOTH, CHAT, FITTED, live_runs, simulate
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import RESULTS, write_result

NAME = "gpu/stops_simulated"


def main() -> None:
    """Simulate, print each run, write the record, and print it as a table."""
    parser_of(__doc__).parse_args()
    runs = []
    for number, live in enumerate(live_runs(RESULTS / "gpu"), 1):
        for source in (FITTED, BETWEEN):
            for stops in (False, True):
                found = simulate(live, source, stops=stops)
                runs.append(
                    {"load": number, "costs": source, "stops": stops} | {one: found[one] for one in (CHAT, BOTH)}
                )
                print(runs[-1], flush=True)
    write_result(NAME, {"runs": runs})
    print(table({"runs": runs}))


def table(figures: dict[str, Any]) -> str:
    """Return it: a row for each run."""
    lines = [
        "| load, costs | stops | chats held | TTFT p50, p99, ms | of alone | TPOT p50, ms | "
        "a chat's longest gap p50, p99, ms | documents: prompt, output tokens/s |\n",
        "|---" * 8 + "|\n",
    ]
    for run in figures["runs"]:
        both, alone = run[BOTH], run[CHAT]
        ratios = [f"{both[key] / alone[key]:.1f}" for key in ("ttft_ms_p50", "ttft_ms_p99")]
        cells = (
            f"{run['load']}, `{run['costs']}`",
            "on" if run["stops"] else "off",
            f"{both['held']:.1%} of {both['chats']}".replace("%", " %"),
            f"{both['ttft_ms_p50']:.0f}, {both['ttft_ms_p99']:.0f}",
            ", ".join(ratios),
            f"{both['tpot_ms_p50']:.1f}",
            f"{both['longest_gap_ms_p50']:.0f}, {both['longest_gap_ms_p99']:.0f}",
            f"{both['prompt_tokens_per_s']:,.0f}; {both['output_tokens_per_s']:,.0f}".replace(",", " "),
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    main()

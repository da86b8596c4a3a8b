"""Chat of one model beside documents of another on the same cores, live: what giving way brings, and what it costs.

    python -m benchmarks.promise.other_models          # seven minutes, on a quiet machine
    python -m benchmarks.promise.other_models --page   # only the table of the page

Two models of 125M OPT's shape with random weights in bfloat16, a worker each, with all cores. Chat: Poisson, a request
a second, prompts log-normal around 100 tokens, answers around 60. Documents: 8 `flex` streams outstanding, prompts 512
to 1 024, answers 32 to 128. In every round a server of each way, in turns: first chat alone, then both. `no`: nothing
gives way (`engine.best_effort_share=1`). Figures are means over the rounds. The table stands in docs/many-models.md;
tests/unit/docs/test_other_models.py holds page and record together.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import CHAT, served, traffic_report

RECORD = "serving/other_models"
PAGE = Path(__file__).parents[2] / "docs" / "many-models.md"
_CHAT, _DOCUMENTS = "chat", "documents"
_MODELS = """\
models:
- model: {{path: {folder}, served_model_name: chat}}
- model: {{path: {folder}, served_model_name: documents}}
"""
_SETTINGS = ("model.random_weights=true", "model.dtype=bfloat16", "decode.kv_cache_bytes=2GiB")
_LOAD = "documents: prompt=uniform(512,1024), output=uniform(32,128), outstanding=8, tier=flex"
_WAYS = {"no": ("engine.best_effort_share=1",), "yes": ()}
_WARM_UP_S = 10.0
_HEAD = (
    "| documents give way | chat alone: TTFT p50, p99; gap p50, p99, ms | beside documents: the same "
    "| both objectives held | documents, tokens/s |"
)
Row = dict[str, Any]


def measure(folder: Path, way: str, duration_s: float, seed: int) -> dict[str, Row]:
    """Serve both models; return what clients saw of chat alone, and of both kinds."""
    config = folder.parent / "models.yaml"
    config.write_text(_MODELS.format(folder=folder))
    with served(None, (*_SETTINGS, *_WAYS[way]), "--config", str(config)) as port:

        def load(model: str, traffic: str) -> Row:
            report = traffic_report(port, folder, [traffic], duration_s, _WARM_UP_S, seed=seed, model=model)
            (only,) = (one for one in report["classes"] if one["name"] == model)
            return {
                "failures": only["failures"],
                "held": only["slo_attainment"],
                "tokens_per_s": only["output_tokens_per_s"],
                "ttft_s": only["ttft_s"],
                "gap_s": only["tbt_s"],
            }

        chat = CHAT.format(rate=1.0)
        alone = load(_CHAT, chat)
        with ThreadPoolExecutor(2) as pool:
            beside, documents = pool.map(load, (_CHAT, _DOCUMENTS), (chat, _LOAD))
    return {"alone": alone, "beside": beside, _DOCUMENTS: documents}


def table(figures: Mapping[str, Any]) -> str:
    """Return the table: each way, by the means of its rounds."""
    return "\n".join([_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *_rows(figures)]) + "\n"


def _rows(figures: Mapping[str, Any]) -> Iterator[str]:
    for way, rounds in figures["ways"].items():
        times = [_times([one[phase] for one in rounds]) for phase in ("alone", "beside")]
        held = statistics.fmean(one["beside"]["held"] for one in rounds)
        tokens = statistics.fmean(one[_DOCUMENTS]["tokens_per_s"] for one in rounds)
        yield f"| {way} | {times[0]} | {times[1]} | {held:.0%} | {tokens:.0f} |"


def _times(chats: Sequence[Row]) -> str:
    def mean(field: str, name: str) -> str:
        return f"{1e3 * statistics.fmean(one[field][name] for one in chats):.0f}"

    return "; ".join(", ".join(mean(field, name) for name in ("p50", "p99")) for field in ("ttft_s", "gap_s"))


def with_table(page: str) -> str:
    """Return the page with the table as the record has it now."""
    figures = read_figures(RECORD)
    return page if figures is None else put_table(page, "another model, live", table(figures))


def main() -> None:
    """Measure, print, record, and write the table into its page."""
    parser = parser_of(__doc__, rounds=2, name=RECORD)
    parser.add_argument("--duration", type=float, default=40.0)
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    if not arguments.page:
        figures: Row = {"duration_s": arguments.duration, "ways": {way: [] for way in _WAYS}}
        with tempfile.TemporaryDirectory() as name:
            folder = make_opt_125m(Path(name) / "opt-125m")
            for seed in range(arguments.rounds):
                for way in list(_WAYS)[:: -1 if seed % 2 else 1]:
                    figures["ways"][way].append(measure(folder, way, arguments.duration, seed))
                    print(*_rows({"ways": {way: figures["ways"][way][-1:]}}), flush=True)
        print(table(figures))
        print(f"written to {write_result(arguments.name, figures)}", flush=True)
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

"""The certificate of each topology: chat beside documents, live, with one worker and with two of each.

    python -m benchmarks.promise.certificates # ten minutes each; those of other shapes are kept
    python -m benchmarks.promise.certificates --shapes elastic-2 --whole  # the whole protocol of one: 40 minutes
    python -m benchmarks.promise.certificates --model opt-125m            # five minutes each
    python -m benchmarks.promise.certificates --take FOLDER ... # those that `alignedserve certify` has written there
    python -m benchmarks.promise.certificates --page                      # only the table of the page

The pocket model, or one of 125M OPT's shape with random weights in bfloat16, whose prompts are no trifle for two cores:
chat of 100 and 60 tokens, TTFT 0.4 s, TPOT 0.2 s, documents of 768 and 80. Client and server are on this machine, so
nothing else may run. The tables stand in docs/certify.md; tests/unit/docs/test_certificates.py holds page and record
together.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.config.sections import Topology
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import CACHE_FILLED_SOON, served, settings_of

RECORD = "serving/certificates"
PAGE = Path(__file__).parents[2] / "docs" / "certify.md"
SHAPES = [f"{topology.value}-{count}" for topology in Topology for count in (1, 2)]
POCKET, OPT = MODELS = ("pocket", "opt-125m")
_SHORTENED = {
    POCKET: ("--burst", "45", "--idle", "45", "--bursts", "2"),
    OPT: ("--burst", "15", "--idle", "10", "--bursts", "3"),
}
_TRAFFIC_OF_OPT = (
    *("--ttft", "0.4", "--tpot", "0.2", "--chat-prompt", "100", "--chat-output", "60"),
    *("--document-prompt", "768", "--document-output", "80"),
)
_KEPT = ("holds", "about", "checks", "chat", "documents_share", "protocol", "speed", "notes")
_HEAD = (
    "| topology, workers | bursts, chats | attained | latest first token | TTFT p99, ms | TPOT p99, ms "
    "| longest gap, s | documents | lines | |"
)
Row = dict[str, Any]


def key_of(model: str, shape: str) -> str:
    """Return the name that the certificate of a shape has in the record."""
    return shape if model == POCKET else f"{model} {shape}"


def certify(model: str, shape: str, *, is_whole: bool) -> Row:
    """Run `alignedserve certify` in this topology with so many workers; return what the record keeps."""
    topology, _, count = shape.rpartition("-")
    protocol = () if is_whole else _SHORTENED[model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model == POCKET:
            _run(folder, *protocol, "--topology", topology, "--workers", count)
        else:
            counts = [f"{role}.count={count}" for role in _roles(topology)]
            with served(make_opt_125m(folder / model), [*settings_of(topology), CACHE_FILLED_SOON, *counts]) as port:
                _run(folder, f"http://127.0.0.1:{port}", *protocol, *_TRAFFIC_OF_OPT)
        row = row_of(json.loads((folder / "certificate.json").read_text()))
    if model != POCKET:
        row["about"] |= {"started": f"{topology}, {count} of each kind of worker, policy aligned_slo", "model": model}
    return row


def _roles(topology: str) -> tuple[str, ...]:
    return ("prefill", "decode") if Topology(topology).is_separate else ("decode",)


def _run(output: Path, *options: str) -> None:
    command = [sys.executable, "-m", "alignedserve", "certify", *options, "--output", str(output)]
    subprocess.run(command, check=False)  # 1: a bound does not hold, which is a result


def row_of(certificate: Mapping[str, Any]) -> Row:
    """Return what the record keeps of a certificate: all but single chats, and addresses of the moment."""
    row = {name: certificate[name] for name in _KEPT}
    row["about"] = {name: text for name, text in row["about"].items() if name not in ("server", "command")}
    figures = certificate["figures"]
    kept = ("num_sent", "num_answered", "failures", "attainment", "attainment_interval")
    row["chats"] = {phase: {name: figures[phase][name] for name in kept} for phase in ("alone", "beside")}
    row["lines"] = figures["lines"]
    return row


# --- the table


def table(figures: Mapping[str, Row], model: str) -> str:
    rows = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    rows += [_cells(shape, figures[key]) for shape in SHAPES if (key := key_of(model, shape)) in figures]
    return "\n".join(rows) + "\n"


def _cells(shape: str, row: Row) -> str:
    topology, _, count = shape.rpartition("-")
    protocol, chats, chat = row["protocol"], row["chats"], row["chat"]
    lines = row["lines"].values()
    bad = sum(phase[f"num_{kind}"] for phase in lines for kind in ("lost", "doubled", "wrong", "failed"))
    latest = next(one["measured"] for one in row["checks"] if one["name"].startswith("latest first token"))
    missed = [one["name"] for one in row["checks"] if not one["holds"]]
    cells = [
        f"{topology}, {count if topology != 'disaggregated' else f'{count} + {count}'}",
        f"{protocol['num_bursts']} of {protocol['burst_s']:.0f} s, {chats['beside']['num_sent']}",
        f"{_percent(chats['alone']['attainment'])}, {_percent(chats['beside']['attainment'])}",
        f"{latest:.2f} x",
        _off_on(chat["TTFT"]["p99"], 1e3, 0),
        _off_on(chat["TPOT"]["p99"], 1e3, 0),
        _off_on(chat["gap"]["max"], 1.0, 2),
        "-" if row["documents_share"] is None else f"{row['documents_share']:.0%}",
        f"{sum(phase['num_lines'] for phase in lines)}, {bad} bad",
        "holds" if row["holds"] else f"**not**: {', '.join(map(_short, missed))}",
    ]
    return f"| {' | '.join(cells)} |"


def _short(bound: str) -> str:
    name = bound.partition(",")[0]
    return {"attainment lost beside documents": "attained", "latest first token": "latest"}.get(name, name)


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _off_on(times: Mapping[str, float], factor: float, digits: int) -> str:
    return ", ".join(f"{factor * times[when]:.{digits}f}" for when in ("off", "on"))


def with_table(page: str) -> str:
    figures = read_figures(RECORD)
    for model in MODELS if figures is not None else ():
        page = put_table(page, f"certificates, {model}", table(figures, model))
    return page


# --- all of it


def main() -> None:
    """Certify, record, and write the table into its page."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default=POCKET)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--whole", action="store_true", help="the whole protocol: four bursts of 90 s")
    parser.add_argument("--take", nargs="+", type=Path, default=[], help="folders of certificates, named by shape")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the table of the page")
    arguments = parser.parse_args()
    figures = read_figures(RECORD) or {}
    if not arguments.page:
        taken = {folder.name: folder for folder in arguments.take}
        for shape in taken or arguments.shapes:
            if taken:
                figures[shape] = row_of(json.loads((taken[shape] / "certificate.json").read_text()))
            else:
                key = key_of(arguments.model, shape)
                figures[key] = certify(arguments.model, shape, is_whole=arguments.whole)
            write_result(RECORD, figures, command="python -m benchmarks.promise.certificates")
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

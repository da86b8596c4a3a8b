"""Simulated certificates of servers, models, lengths and objectives drawn at random: where is the promise broken?

    python -m benchmarks.promise.random_certificates                       # thirty, of half a minute of a core each
    python -m benchmarks.promise.random_certificates --first 200 --count 5 # others; nothing is recorded
    python -m benchmarks.promise.random_certificates --page                # only the table of the page

Each number draws one: topology, workers, model and accelerator, mean lengths of chats and documents between 16 and
8 000 tokens, objectives or the default ones or of 2.5 or 4 times what a chat takes alone, with or without prefix cache
and swaps, two bursts of 7 s with 4 s after each. Whatever does not hold is printed with the command that shows it. The
table stands in docs/certify.md; tests/unit/docs/test_random_certificates.py holds page and record together.
"""

import math
import random
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from alignedserve.core.errors import ConfigError
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recording import read_figures, write_result
from lab.certification.certificate import certificate_of
from lab.commands.certify.command import bounds_of, wanted_of
from lab.commands.certify.options import CertifyOptions
from lab.commands.certify.simulated import SimulatedRun, simulated_config

RECORD = "scheduling/random_certificates"
PAGE = Path(__file__).parents[2] / "docs" / "certify.md"
_FIRST, _COUNT = 100, 30
_MODELS = (
    ("h100", "llama-3-8b", 8192),
    ("a100-40g", "llama-3-8b", 8192),
    ("a100-80g", "llama-2-13b", 4096),
    ("h100", "opt-13b", 2048),
    ("a100-80g", "opt-2.7b", 2048),
)
_HEAD = "| topology | certificates | all bounds hold | chat lost more than a point | documents | windows |"
Row = dict[str, Any]


class _Draw:
    """The choices of one number."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(number)

    def one_of(self, *choices: Any) -> Any:
        return self._rng.choice(choices)

    def length(self, least: int, most: int) -> int:
        return round(math.exp(self._rng.uniform(math.log(least), math.log(most))))

    def happens(self, chance: float) -> bool:
        return self._rng.random() < chance


class Lengths(NamedTuple):
    """Mean lengths of one kind of request, in tokens."""

    prompt_len: int
    output_len: int

    def within(self, longest: int) -> "Lengths":
        share = min(longest / (1.5 * (self.prompt_len + self.output_len)), 1.0)
        return Lengths(max(int(self.prompt_len * share), 1), max(int(self.output_len * share), 2))


def options_of(number: int) -> dict[str, str]:
    """Return the options of this certificate, by their names on the command line; settings under `--set`."""
    draw = _Draw(number)
    hardware, model, longest = draw.one_of(*_MODELS)
    chat = Lengths(draw.length(16, 4096), draw.length(8, 512)).within(longest)
    documents = Lengths(draw.length(32, 8192), draw.length(1, 1024)).within(longest)
    options = {
        "--topology": draw.one_of("elastic", "colocated", "disaggregated"),
        "--workers": draw.one_of("1", "2", "4"),
        "--hardware": hardware,
        "--simulated-model": model,
        "--chat-prompt": str(chat.prompt_len),
        "--chat-output": str(chat.output_len),
        "--document-prompt": str(documents.prompt_len),
        "--document-output": str(documents.output_len),
        "--seed": str(number),
    }
    if draw.happens(0.5):
        options |= {"--ttft": draw.one_of("0.5", "1", "2", "5"), "--tpot": draw.one_of("0.03", "0.05", "0.1", "0.2")}
    settings = [text for text in ("prefix_cache.enabled=false", "decode.swap_space_bytes=0") if draw.happens(0.25)]
    options |= {"--set": " ".join(settings)} if settings else {}
    if draw.happens(0.25):
        with suppress(ConfigError):  # a server that serves no chat: the certificate says so, with its command
            ttft_s, tpot_s = _run_of(_parsed(options)).idle_times_s()
            options["--ttft"] = f"{draw.one_of(2.5, 4) * ttft_s:.2g}"
            options["--tpot"] = f"{draw.one_of(2.5, 4) * tpot_s:.2g}"
    return options


def command_of(options: Mapping[str, str]) -> str:
    words = ["alignedserve", "certify", "--simulated", "--burst", "7", "--idle", "4", "--bursts", "2"]
    for name, value in options.items():
        words += [word for one in value.split() for word in (name, one)]
    return shlex.join(words)


def certify(number: int) -> Row:
    """Run one; return what did not hold, and by how much. A server that cannot be measured has `refused`."""
    drawn = options_of(number)
    options = _parsed(drawn)
    row: Row = {"number": number, "topology": drawn["--topology"], "command": command_of(drawn)}
    try:
        protocol, speed, evidence = _run_of(options).run()
    except ConfigError as error:
        return row | {"refused": str(error)}
    certificate = certificate_of(
        title="", about=(), protocol=protocol, speed=speed, evidence=evidence, bounds=bounds_of(options),
        is_simulated=True,
    )  # fmt: skip
    figures = certificate.figures
    return row | {
        "missed": {check.name: check.measured for check in certificate.missed},
        "attained_alone": None if figures.alone is None else figures.alone.attainment,
        "attained_beside": None if figures.beside is None else figures.beside.attainment,
        "documents_share": None if figures.left_over is None else figures.left_over.share,
    }


def _parsed(drawn: Mapping[str, str]) -> CertifyOptions:
    return CertifyOptions(
        is_simulated=True, burst_s=7.0, idle_s=4.0, num_bursts=2, seed=int(drawn["--seed"]),
        topology=drawn["--topology"], num_workers=int(drawn["--workers"]),
        hardware=drawn["--hardware"], simulated_model=drawn["--simulated-model"],
        chat_prompt_len=int(drawn["--chat-prompt"]), chat_output_len=int(drawn["--chat-output"]),
        document_prompt_len=int(drawn["--document-prompt"]), document_output_len=int(drawn["--document-output"]),
        ttft_s=float(drawn["--ttft"]) if "--ttft" in drawn else None,
        tpot_s=float(drawn["--tpot"]) if "--tpot" in drawn else None,
        overrides=tuple(drawn.get("--set", "").split()),
    )  # fmt: skip


def _run_of(options: CertifyOptions) -> SimulatedRun:
    return SimulatedRun(simulated_config(options), wanted_of(options), lambda words: None)


def table(rows: list[Row]) -> str:
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for topology in ("elastic", "colocated", "disaggregated"):
        own = [row for row in rows if row["topology"] == topology and "refused" not in row]
        missed = Counter(name for row in own for name in row["missed"])
        cells = (
            len(own),
            sum(not row["missed"] for row in own),
            missed["attainment lost beside documents"],
            missed["documents, of what chat leaves over"],
            missed["windows missed"],
        )
        lines.append(f"| {topology} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    rows = read_figures(RECORD)
    return page if rows is None else put_table(page, "random certificates", table(rows))


def main() -> None:
    """Certify, print what does not hold, and record the default ones."""
    parser = parser_of(__doc__)
    parser.add_argument("--first", type=int, default=_FIRST, help="number of the first")
    parser.add_argument("--count", type=int, default=_COUNT)
    parser.add_argument("--page", action="store_true", help="only write the table from the record")
    options = parser.parse_args()
    if not options.page:
        rows = []
        for number in track(range(options.first, options.first + options.count), "certificates"):
            rows.append(certify(number))
            if rows[-1].get("missed", True):
                print(rows[-1])
        print(table(rows))
        if (options.first, options.count) != (_FIRST, _COUNT):
            return
        write_result(RECORD, rows)
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

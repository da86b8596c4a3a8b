"""`alignedserve bench versus`: the same loads on several servers in turn, and a table beside the first."""

import asyncio
import os
import shlex
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from alignedserve.cli.console import FAILURE, notes, print_table, require_writable, to_json, write_json
from alignedserve.client.openai_client import OpenAiClient
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import AlignedServeError, ConfigError
from alignedserve.process.addresses import free_ports
from lab.commands.bench.options import LoadOptions, VersusOptions
from lab.commands.bench.serve import make_plan, run_load
from lab.commands.machine import describe_machine
from lab.loadgen.report import remarks
from lab.loadgen.summary import ClassReport, summarise

DEFAULT_LOADS = {
    "1 stream": "outstanding=1, prompt=256, output=128",
    "16 streams": "outstanding=16, prompt=256, output=128",
    "64 streams": "outstanding=64, prompt=32, output=64",  # short answers: products of 64 rows
    "prompts": "outstanding=8, prompt=1024, output=1",
    "mixed": "outstanding=32, prompt=lognormal(150,1400), output=lognormal(60,256)",
    "chat beside documents": (
        "chat: rate=0.8, prompt=lognormal(100,440), output=lognormal(60,190), ttft=1, tpot=0.3; "
        "documents: outstanding=64, prompt=uniform(512,1024), output=uniform(32,128), tier=flex"
    ),
}
_LOOK_S, _END_S, _TAIL = 0.5, 30.0, 600  # between looks; until a server is killed; characters of its log


class Server(NamedTuple):
    """One server to compare."""

    name: str
    command: str  # with {port}; or the address of a running one

    @property
    def is_running(self) -> bool:
        return self.command.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class Row:
    """One load on one server, in one round."""

    round: int
    server: str
    load: str
    classes: tuple[ClassReport, ...]
    failures: Mapping[str, int]
    generator_was_limit: bool


def bench_versus(options: VersusOptions) -> int:
    """Run the command and return its exit code: 1 when a server completed nothing of a load."""
    servers = [_server(text) for text in options.servers]
    if len({server.name for server in servers}) < max(len(servers), 2):
        raise ConfigError("give two servers or more, each with a name of its own")
    loads = dict(map(_load, options.loads)) or DEFAULT_LOADS
    for spec in loads.values():  # bad ones before anything is started
        make_plan(_load_options(options, "", spec))
    if options.json_target is not None and options.json_target != "-":
        require_writable(Path(options.json_target), option="--json")
    rows = asyncio.run(_measure(options, servers, loads))
    if options.json_target is not None:
        document = {"machine": describe_machine(), "options": options, "loads": loads, "rows": rows}
        write_json(to_json(document), options.json_target)
    if options.json_target != "-":
        print_table(table(rows))
    return FAILURE if any(not numbers.num_completed for row in rows for numbers in row.classes) else 0


def _server(text: str) -> Server:
    name, equals, command = text.partition("=")
    server = Server(name.strip(), command.strip())
    if not (equals and server.name and server.command):
        raise ConfigError(f"server {text!r} must read like NAME=COMMAND or NAME=URL")
    if not server.is_running and "{port}" not in command:
        raise ConfigError(f"server {server.name!r}: its command must say {{port}} where the port belongs")
    return server


def _load(text: str) -> tuple[str, str]:
    label, equals, spec = text.partition("=")
    if not equals or not label.strip() or not spec.strip():
        raise ConfigError(f"--load {text!r} must read like LABEL=SPEC")
    return label.strip(), spec.strip()


def _load_options(options: VersusOptions, url: str, spec: str) -> LoadOptions:
    return LoadOptions(
        url=url,
        endpoint=options.endpoint,
        synthetic=spec,
        duration_s=options.warm_up_s + options.duration_s,
        warm_up_s=options.warm_up_s,
        ignore_eos=True,
        cuts_off=True,
        tokenizer=options.tokenizer,
        max_prompt=options.max_prompt,
        max_output=options.max_output,
        seed=options.seed,
    )


# --- servers, one at a time


async def _measure(options: VersusOptions, servers: Sequence[Server], loads: Mapping[str, str]) -> list[Row]:
    rows = []
    for number in range(options.rounds):
        for server in servers:
            async with _serving(server, options.start_timeout_s) as url:
                for label, spec in loads.items():
                    load = _load_options(options, url, spec)
                    plan = make_plan(load)
                    run, _ = await run_load(load, plan)
                    report = summarise(run, plan.classes)
                    limit = report.generator.was_limit
                    rows.append(Row(number, server.name, label, report.classes, report.total.failures, limit))
                    rate = report.total.output_tokens_per_s
                    lines = [
                        f"{number + 1}: {server.name}, {label}: {rate:.0f} tokens/s",
                        *remarks(report)[not limit :],
                    ]
                    notes().print("\n  - ".join(lines), markup=False, soft_wrap=True)
    return rows


@asynccontextmanager
async def _serving(server: Server, timeout_s: float) -> AsyncIterator[str]:
    """Yield the address of a server that answers; end it afterwards if it was started here.

    Raises ConfigError: it cannot be started, or does not answer in time.
    """
    if server.is_running:
        yield server.command
        return
    (port,) = free_ports(1)
    words = [word.replace("{port}", str(port)) for word in shlex.split(server.command)]
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"server {server.name!r} cannot be started: {error.strerror}") from error
        try:
            url = f"http://127.0.0.1:{port}"
            if not await _answers(url, process, timeout_s):
                log.seek(0)
                said = log.read().decode(errors="replace")[-_TAIL:]
                raise ConfigError(f"server {server.name!r} does not answer; its log ends with: {said}")
            yield url
        finally:
            await _end(process)


async def _answers(url: str, process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    async with OpenAiClient(url=url, api_key=client_api_key(), timeout_s=_LOOK_S * 10) as client:
        while process.returncode is None and time.monotonic() < until_s:
            try:
                await client.model_name()
            except AlignedServeError:
                await asyncio.sleep(_LOOK_S)
            else:
                return True
    return False


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


# --- the table


def table(rows: Sequence[Row]) -> Table:
    """Return medians over rounds, and the tokens beside those of the first server."""
    shown = Table(header_style="bold", title="medians over rounds; milliseconds", title_justify="left")
    for heading in ("load", "class", "server"):
        shown.add_column(heading)
    for heading in ("tokens/s", "of the first", "TTFT p50", "p99", "gap p99", "longest", "held"):
        shown.add_column(heading, justify="right")
    first: dict[tuple[str, str], float] = {}
    groups: dict[tuple[str, str, str], list[ClassReport]] = {}
    for row in rows:
        for numbers in row.classes:
            groups.setdefault((row.load, numbers.name, row.server), []).append(numbers)
    loads = list(dict.fromkeys(row.load for row in rows))
    for load, name, server in sorted(groups, key=lambda key: loads.index(key[0])):
        runs = groups[load, name, server]
        rate = statistics.median(run.output_tokens_per_s for run in runs)
        base = first.setdefault((load, name), rate)
        cells = (f"{rate:.1f}", f"{rate / base:.2f}" if base else "-", *_times(runs), _held(runs))
        shown.add_row(load, name, server, *cells)
    return shown


def _times(runs: Sequence[ClassReport]) -> list[str]:
    ttft_s = [run.ttft_s for run in runs if run.ttft_s is not None]
    gaps_s = [run.tbt_s for run in runs if run.tbt_s is not None]
    columns: list[list[float]] = [
        [times.p50 for times in ttft_s],
        [times.p99 for times in ttft_s],
        [times.p99 for times in gaps_s],
        [times.max for times in gaps_s],
    ]
    return [f"{1000 * statistics.median(column):.0f}" if column else "-" for column in columns]


def _held(runs: Sequence[ClassReport]) -> str:
    shares = [run.slo_attainment for run in runs if run.slo_attainment is not None]
    return f"{100 * statistics.median(shares):.0f} %" if shares else "-"

"""`alignedserve certify`: chat alone, chat beside documents, documents alone; one page, and an exit code by bounds."""

import asyncio
import contextlib
import sys
import time
from importlib.metadata import version

from rich.table import Table

from alignedserve.cli.console import FAILURE, notes, printable, results, to_json, write_json
from alignedserve.client.openai_client import CompletionApi
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.gateway.files.schemas import window_s
from lab.certification.certificate import Certificate, certificate_of
from lab.certification.notes import held_words, own_notes
from lab.certification.page import certificate_page
from lab.certification.protocol import Lengths, Wanted
from lab.certification.verdict import Bounds
from lab.certification.words import bound_of, measured_of
from lab.commands.certify.cluster_words import cluster_words
from lab.commands.certify.live import LiveOptions, LiveRun, Measured
from lab.commands.certify.options import CertifyOptions
from lab.commands.machine import describe_machine
from lab.commands.output_folder import command_line, make_folder, write_file

_STAGE_S, _SMALL_STAGE_S = 6.0, 2.0  # of measuring


def certify(options: CertifyOptions, template: WorkerTemplate | None = None) -> int:
    """Run the command and return its exit code: 1 when a bound does not hold or a phase was not reached.

    `template`: of the processes of a server that is started.
    """
    wanted = wanted_of(options)
    make_folder(options.output)
    certificate = _simulated(options, wanted) if options.is_simulated else _live(options, wanted, template)
    document = to_json(certificate.to_builtins())
    write_file(options.output / "certificate.json", document)
    page = options.output / "certificate.html"
    write_file(page, certificate_page(certificate).encode())
    if options.json_output:
        write_json(document, "-")
    else:
        _print(certificate)
    notes().print(f"{page} has the plots, certificate.json beside it every figure", markup=False, soft_wrap=True)
    return 0 if certificate.holds else FAILURE


def wanted_of(options: CertifyOptions) -> Wanted:
    """Return the sizes that were given. Raises ConfigError."""
    burst_s, idle_s, num_bursts = options.bursts
    return Wanted(
        burst_s=burst_s,
        idle_s=idle_s,
        num_bursts=num_bursts,
        chat=Lengths(
            options.chat_prompt_len, options.chat_output_len, options.chat_pictures / 100.0, options.picture_edge
        ),
        documents=Lengths(
            options.document_prompt_len,
            options.document_output_len,
            options.document_pictures / 100.0,
            options.picture_edge,
        ),
        rate=options.rate,
        num_lines=options.num_lines,
        windows_s=tuple(map(_window, options.windows)) or None,
        ttft_s=options.ttft_s,
        tpot_s=options.tpot_s,
        seed=options.seed,
    )


def bounds_of(options: CertifyOptions) -> Bounds:
    """Return the bounds that were given."""
    return Bounds(
        max_attainment_loss=options.max_attainment_loss,
        max_ttft_ratio=options.max_ttft_ratio,
        min_documents_share=options.min_documents / 100.0,
        max_lost=options.max_lost,
        max_doubled=options.max_doubled,
        max_wrong=options.max_wrong,
        max_failed=options.max_failed,
        max_timeouts=options.max_timeouts,
        max_missed_windows=options.max_missed_windows,
        min_beside=options.min_beside / 100.0,
        max_ttft_p99_ratio=options.max_ttft_p99_ratio,
        max_tpot_p99_ratio=options.max_tpot_p99_ratio,
        max_gap_p99_ratio=options.max_gap_p99_ratio,
        min_attainment=options.min_attainment,
    )


def _window(text: str) -> float:
    try:
        return window_s(text)
    except InvalidRequest as error:
        raise ConfigError(f"--window {text}: {error}") from error


# --- live


def _live(options: CertifyOptions, wanted: Wanted, template: WorkerTemplate | None) -> Certificate:
    # Ray prints to stdout that a process was lost; what is printed there is the report.
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        url, words = options.url, ""
        if url is None:
            # Here and not above: it loads Ray, which a URL does not need.
            from lab.commands.certify.server import started_server

            started = stack.enter_context(started_server(options, template))
            url, words = started.url, started.words
        began_s, load_before = time.time(), describe_machine()["load_1min"]
        measured = asyncio.run(LiveRun(_live_options(options, url), wanted, _say).run())
    return certificate_of(
        title="Certificate: chat beside documents",
        about=_about_live(url, words, measured, began_s, load_before),
        protocol=measured.protocol,
        speed=measured.speed,
        evidence=measured.evidence,
        bounds=bounds_of(options),
    )


def _live_options(options: CertifyOptions, url: str) -> LiveOptions:
    return LiveOptions(
        url=url,
        api_key=client_api_key(options.key_variable),
        model=options.model,
        api=CompletionApi(options.endpoint),
        outstanding=options.outstanding,
        streams=options.streams,
        patience_s=options.patience_s,
        stage_s=_SMALL_STAGE_S if options.is_small else _STAGE_S,
    )


def _about_live(
    url: str, words: str, measured: Measured, began_s: float, load_before: float
) -> tuple[tuple[str, str], ...]:
    machine = describe_machine()
    started = [("started", words)] if words else []
    return (
        ("server", url),
        *started,
        ("model", measured.model),
        ("documents", measured.documents),
        (
            "client",
            f"{machine['cpu']}, {machine['cores']} cores, load {load_before} before, {machine['load_1min']} after",
        ),
        *_about_run(began_s),
    )


def _about_run(began_s: float) -> tuple[tuple[str, str], ...]:
    return (
        ("command", command_line()),
        ("begun", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began_s))),
        ("version", f"alignedserve {version('alignedserve')}"),
    )


def _say(words: str) -> None:
    notes().print(words, markup=False, soft_wrap=True)


# --- simulated


def _simulated(options: CertifyOptions, wanted: Wanted) -> Certificate:
    from lab.commands.certify.simulated import SimulatedRun, model_words, simulated_config

    began_s, config = time.time(), simulated_config(options)
    protocol, speed, evidence = SimulatedRun(config, wanted, _say).run()
    about = (
        ("server", f"simulated: {cluster_words(config.cluster)}"),
        ("model", model_words(options, config.cluster)),
        ("documents", "lines handed over as places get free, as the batch worker does; answers are not computed"),
        *_about_run(began_s),
    )
    return certificate_of(
        title="Certificate, simulated: chat beside documents", about=about, protocol=protocol, speed=speed,
        evidence=evidence, bounds=bounds_of(options), is_simulated=True,
    )  # fmt: skip


# --- printing


def _print(certificate: Certificate) -> None:
    console = results()
    table = Table(title=certificate.title, title_justify="left")
    for heading in ("bound on", "measured", "bound", ""):
        table.add_column(heading)
    for check in certificate.checks:
        verdict = "held" if check.holds else "[bold red]NOT HELD"
        table.add_row(check.name, measured_of(check), bound_of(check), verdict)
    console.print(table)
    console.print(_latencies(certificate))
    for note in (*certificate.evidence.notes, *own_notes(certificate)):
        console.print(f"- {printable(note)}", markup=False, soft_wrap=True)
    if certificate.holds:
        console.print(f"held: {held_words(certificate)}", style="bold green", highlight=False)
    else:
        console.print(f"NOT held: {len(certificate.missed)} of {len(certificate.checks)} bounds", style="bold red")


def _latencies(certificate: Certificate) -> Table:
    table = Table(title="chat, documents off / on", title_justify="left")
    table.add_column("seconds")
    for heading in ("p50", "p90", "p99", "longest"):
        table.add_column(heading, justify="right")
    for phase in certificate.figures.compared():
        cells = []
        for field in ("p50", "p90", "p99", "max"):
            off, on = (None if of is None else getattr(of, field) for of in (phase.off, phase.on))
            cells.append(" / ".join("-" if value is None else f"{value:.3f}" for value in (off, on)))
        table.add_row(phase.measure, *cells)
    return table

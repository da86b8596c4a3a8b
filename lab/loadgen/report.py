"""Report of what clients saw, as tables."""

from rich.console import Console
from rich.table import Table

from alignedserve.core.metrics import READABLE_GAP_S, Distribution, in_percent
from alignedserve.core.request import Slo
from lab.loadgen.summary import ClassReport, GeneratorReport, LoadReport

_FAR_OFF = 1.5  # times the planned prompt tokens, or one by that: another load than was asked for
_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TBT (each gap)", "tbt_s"),
    ("TPOT (mean per request)", "tpot_s"),
    ("end to end", "end_to_end_s"),
)


def print_load_report(console: Console, report: LoadReport, *, title: str) -> None:
    """Print the whole report: counts, latencies, and remarks about the measurement itself."""
    print_counts(console, report, title=title)
    for numbers in _shown(report):
        print_latencies(console, numbers)
    for remark in remarks(report):
        console.print(f"- {remark}", markup=False, soft_wrap=True)


def _shown(report: LoadReport) -> tuple[ClassReport, ...]:
    return report.classes if len(report.classes) == 1 else (report.total, *report.classes)


def print_counts(console: Console, report: LoadReport, *, title: str) -> None:
    console.print(title, markup=False, style="bold")
    table = Table(header_style="bold")
    table.add_column(f"{report.duration_s:.1f} s")
    shown = _shown(report)
    for numbers in shown:
        table.add_column(numbers.name, justify="right")
    table.add_row("sent", *(str(numbers.num_sent) for numbers in shown))
    table.add_row("completed", *(str(numbers.num_completed) for numbers in shown))
    for label in report.total.failures:
        table.add_row(f"failed: {label}", *(str(numbers.failures.get(label, 0)) for numbers in shown))
    table.add_row("requests/s", *(f"{numbers.requests_per_s:.3f}" for numbers in shown))
    table.add_row("input tokens/s", *(f"{numbers.input_tokens_per_s:.1f}" for numbers in shown))
    if report.total.cached_tokens:
        table.add_row("input tokens cached", *(_cached(numbers) for numbers in shown))
    table.add_row("output tokens/s", *(f"{numbers.output_tokens_per_s:.1f}" for numbers in shown))
    if report.total.slo_attainment is not None:
        table.add_row("objectives", *(_slo(numbers.slo) for numbers in shown))
        table.add_row("attainment (of all sent)", *(_share(numbers.slo_attainment) for numbers in shown))
        table.add_row("goodput (requests/s)", *(_rate(numbers.goodput_per_s) for numbers in shown))
        table.add_row("token deadlines met (fluidity)", *(_share(numbers.fluidity) for numbers in shown))
    table.add_row("completed of sent, meanwhile", *(_served(numbers.completed_of_arrived) for numbers in shown))
    table.add_row("longest gap (s)", *(_longest(numbers.tbt_s) for numbers in shown))
    table.add_row(f"answers with a gap over {READABLE_GAP_S:g} s", *(_share(numbers.stalled) for numbers in shown))
    console.print(table)


def print_latencies(console: Console, numbers: ClassReport) -> None:
    """Print latencies of one class in milliseconds."""
    table = Table(title=f"{numbers.name}: milliseconds", title_justify="left", header_style="bold")
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max", "count"):
        table.add_column(heading, justify="right")
    for label, field in _LATENCIES:
        distribution: Distribution | None = getattr(numbers, field)
        table.add_row(label, *_milliseconds(distribution))
    console.print(table)


def remarks(report: LoadReport) -> list[str]:
    """Return remarks that a reader needs to judge the numbers."""
    remarks = [_generator_remark(report.generator)]
    if report.num_interrupted is not None:
        remarks.append(
            f"interrupted: what had ended by then counts, not the requests in the air ({report.num_interrupted})"
        )
    if report.prompt_ratio is not None and not 1.0 / _FAR_OFF < report.prompt_ratio < _FAR_OFF:
        remarks.append(
            f"by the server's count prompts had {report.prompt_ratio:.2g} times the tokens that were planned: "
            "with --tokenizer FOLDER their texts are exact"
        )
    remarks += [f"failed, {count} like this: {reason}" for reason, count in report.total.failure_reasons.items()]
    num_completed = report.total.num_completed
    if report.num_server_counts < num_completed:
        remarks.append(
            f"{num_completed - report.num_server_counts} of {num_completed} answers came without usage counts: "
            "their prompts count as planned and every chunk with text as one token"
        )
    if report.num_clamped_prompts or report.num_clamped_outputs:
        remarks.append(
            f"clamped to the limits: {report.num_clamped_prompts} prompts and {report.num_clamped_outputs} outputs"
        )
    return remarks


def _generator_remark(generator: GeneratorReport) -> str:
    lateness, lag = (
        "-"
        if delays is None
        else f"p50 {delays.p50 * 1000:.1f}, p99 {delays.p99 * 1000:.1f}, max {delays.max * 1000:.1f} ms"
        for delays in (generator.lateness_s, generator.loop_lag_s)
    )
    verdict = "not the limit"
    if generator.was_limit:
        verdict = "the generator, or the machine it shares, was a limit: these latencies hold its delays as well"
    share = f"{in_percent(generator.cpu_share, 0)} of a core"
    return f"load generator: sent late by {lateness}; own loop late by {lag}; took {share}: {verdict}"


def _milliseconds(delays: Distribution | None) -> list[str]:
    if delays is None:
        return ["-"] * 7
    values = (delays.mean, delays.p50, delays.p90, delays.p95, delays.p99, delays.max)
    return [f"{value * 1000:.1f}" for value in values] + [str(delays.count)]


def _cached(numbers: ClassReport) -> str:
    return _share(numbers.cached_tokens / max(numbers.input_tokens, 1))


def _slo(slo: Slo) -> str:
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("end", slo.deadline_s))
    return ", ".join(f"{name} {seconds:g} s" for name, seconds in named if seconds is not None) or "-"


def _share(value: float | None) -> str:
    return "-" if value is None else in_percent(value).replace("%", " %")


def _served(completed_of_arrived: float | None) -> str:
    return _share(completed_of_arrived if completed_of_arrived is None else min(completed_of_arrived, 1.0))


def _longest(gaps: Distribution | None) -> str:
    return "-" if gaps is None else f"{gaps.max:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

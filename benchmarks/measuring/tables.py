"""Flat records as tables for a person. Loads nothing but what prints them."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.results import DeviceCeilings, IterationReport, KernelReport, TransferReport


def print_kernels(console: Console, report: KernelReport) -> None:
    title = f"kernels, {report.shape} in {report.dtype} on {report.ceilings.device}"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("kernel", "case", "by"):
        table.add_column(heading, no_wrap=True)
    for heading in ("µs", "GB/s", "TFLOP/s", "share", "of", "by aligned"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        against = "" if row.against_aligned is None else f"{row.against_aligned:.2f}"
        figures = (f"{row.microseconds:,.1f}", f"{row.gb_per_s:,.1f}", f"{row.tflop_per_s:,.2f}", f"{row.share:.0%}")
        table.add_row(row.kernel, row.case, row.by, *figures, row.bound, against)
    console.print(table)
    _print_ceilings(console, report.ceilings, report.left_out)


def print_iterations(console: Console, report: IterationReport) -> None:
    title = f"engine, {report.model} in {report.dtype}, attention {report.attention}, on {report.ceilings.device}"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("iteration", no_wrap=True)
    for heading in ("ms", "bound, ms", "which is", "ratio", "target", ""):
        table.add_column(heading, justify="right")
    for row in report.rows:
        times = (f"{row.milliseconds:,.3f}", f"{row.bound_milliseconds:,.3f}")
        verdict = "met" if row.is_met else "missed"
        table.add_row(row.what, *times, row.bound, f"{row.ratio:.3f}", row.target, verdict)
    console.print(table)
    _print_ceilings(console, report.ceilings, report.left_out)


def _print_ceilings(console: Console, ceilings: DeviceCeilings, left_out: Sequence[str]) -> None:
    said = [
        f"read {ceilings.read_gb_per_s:,.0f} GB/s, copy {ceilings.copy_gb_per_s:,.0f} GB/s (bytes read and written)",
        f"product {ceilings.matrix_tflop_per_s:,.3g} TFLOP/s",
    ]
    if ceilings.host_to_device_gb_per_s is not None and ceilings.device_to_host_gb_per_s is not None:
        said.append(
            f"link {ceilings.host_to_device_gb_per_s:.1f} GB/s in, {ceilings.device_to_host_gb_per_s:.1f} GB/s out"
        )
    console.print(f"- ceilings in {ceilings.dtype}: {'; '.join(said)}", markup=False, soft_wrap=True)
    _print_lines(console, _said("left out", left_out))


def print_transfers(console: Console, report: TransferReport) -> None:
    """Print the speeds of block transfers, one row for each; then what was left out."""
    table = Table(title="block transfers, GB/s", title_justify="left", header_style="bold")
    table.add_column("blocks")
    for heading in ("MiB", "by", "what", "moved", "plain copy", "share"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        size = f"{row.num_blocks * row.block_bytes / 2**20:.0f}"
        speeds = (f"{row.gb_per_s:.2f}", f"{row.plain_gb_per_s:.2f}", f"{row.share:.0%}")
        blocks = f"{row.shape}, {row.block_bytes // 1024} KiB"
        table.add_row(blocks, size, row.transport, row.operation, *speeds)
    if report.rows:
        console.print(table)
    _print_lines(console, [*_said("left out", report.left_out), *_said("failed", report.failures)])


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _said(what: str, lines: Sequence[str]) -> list[str]:
    return [f"- {what}: {line}" for line in lines]


def print_fields(console: Console, fields: Mapping[str, object], *, title: str) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), _shown_value(value))
    console.print(table)


def _shown_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

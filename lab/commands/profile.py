"""`alignedserve profile`: what iterations of a model cost on this machine, as a cost model and a file."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from alignedserve.cli.console import notes, progress, results, to_json, write_json
from alignedserve.costmodel.linear import LinearCoefficients
from lab.commands.machine import describe_machine
from lab.commands.options import ProfileOptions
from lab.commands.output_folder import command_line, make_folder, write_file
from lab.profiling.profile import PointResult, ProfileResult, ProfileSpec, run_profile

_UNITS = {
    "base_s": "an iteration",
    "prompt_token_s": "a token of a prompt",
    "prompt_pair_s": "a (query, key) pair of a chunk",
    "chunk_s": "a chunk",
    "decode_s": "a decode",
    "context_token_s": "a token of a decode's context",
    "hidden_token_s": "a token of a hidden cache",
    "sampled_s": "a sampled token",
    "beyond_token_s": "a token beyond the bend",
}
_QUICK_S = 15.0


def profile(options: ProfileOptions) -> int:
    duration_s = _QUICK_S if options.is_quick else options.duration_s
    spec = ProfileSpec(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        duration_s=duration_s,
        num_threads=options.num_threads,
        is_cpu_time=options.is_cpu_time,
    )
    if options.output is not None:
        make_folder(options.output.parent)
    with progress() as bar:
        task = bar.add_task(f"{options.model}, {options.dtype}: seconds", total=duration_s, status="loading")
        result = run_profile(spec, lambda gone_s: bar.update(task, completed=round(gone_s, 1), status=""))
    document = to_json(_document(result, "processor time" if options.is_cpu_time else "wall"))
    if options.json_output:
        write_json(document, "-")
    else:
        _print(results(), result)
    if options.output is not None:
        write_file(options.output, document)
        notes().print(f"written to {options.output}; use it as fitted:{options.output}", markup=False, soft_wrap=True)
    return 0


def _document(result: ProfileResult, clock: str) -> dict[str, Any]:
    return {
        **result.profile.as_fields(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "machine": {**describe_machine(), "threads": result.num_threads, "clock": clock},
        "num_rounds": result.num_rounds,
        "errors": {kind: error._asdict() for kind, error in result.errors.items()},
        "samples": [_sample(point) for point in (*result.fitted, *result.held_out)],
    }


def _sample(point: PointResult) -> dict[str, Any]:
    work = {name: value for name, value in asdict(point.point.work).items() if value}
    return {"kind": point.point.kind, "work": work, "seconds": point.sample.seconds, "num_visits": len(point.seconds)}


def _print(console: Console, result: ProfileResult) -> None:
    coefficients = result.profile.coefficients
    table = Table(title="microseconds for each", title_justify="left", show_header=False)
    for name, unit in _UNITS.items():
        table.add_row(unit, f"{getattr(coefficients, name) * 1e6:.4g}")
    console.print(table)
    if coefficients.bend_tokens:
        console.print(f"- the bend is at {coefficients.bend_tokens:.0f} tokens", markup=False)
    errors = Table(title="predicted / measured - 1", title_justify="left", header_style="bold")
    for heading in ("iterations", "points", "median size", "p90", "bias"):
        errors.add_column(heading, justify="left" if heading == "iterations" else "right")
    for kind, error in result.errors.items():
        errors.add_row(kind, str(error.num_samples), f"{error.median:.1%}", f"{error.p90:.1%}", f"{error.bias:+.1%}")
    console.print(errors)
    console.print(_kernel_remark(coefficients), markup=False, soft_wrap=True)
    rate = result.profile.memory_link.bytes_per_s / 1e9
    console.print(f"- copies of cache blocks within memory: {rate:.2f} GB/s", markup=False, soft_wrap=True)
    if result.num_rounds < 1:
        console.print("- the time was up before every point was measured once", markup=False, soft_wrap=True)


def _kernel_remark(coefficients: LinearCoefficients) -> str:
    if not coefficients.context_token_s:
        return "- decode attention costs nothing that can be seen"
    if not coefficients.straggler:
        return "- decode attention: its time follows the sum of all contexts"
    return f"- decode attention: at least as long as {coefficients.straggler:.3g} of the longest context"

"""`alignedserve bench transfer`: KV blocks moved by every transport.

Loads nothing that only a server needs (Ray, msgspec, an HTTP client): it runs on a bare machine with a GPU.
"""

from dataclasses import asdict, replace

from alignedserve.cli.bench.options import TransferOptions
from alignedserve.cli.console import FAILURE, notes, print_json, results
from alignedserve.microbench.device_choice import chosen_device
from alignedserve.microbench.results import TransferReport
from alignedserve.microbench.tables import print_transfers
from alignedserve.microbench.transfer.benchmark import measure_device_transfers, measure_host_transfers
from alignedserve.microbench.transfer.spec import DEVICE_SPEC, TransferBenchmarkSpec


def bench_transfer(options: TransferOptions) -> int:
    """Run the command and return its exit code."""

    def asked_for(spec: TransferBenchmarkSpec) -> TransferBenchmarkSpec:
        shapes = spec.shapes if options.shapes is None else tuple(options.shapes.split(","))
        mebibytes = spec.mebibytes if options.sizes is None else tuple(map(_whole_number, options.sizes.split(",")))
        return replace(spec, shapes=shapes, mebibytes=mebibytes, num_rounds=options.rounds)

    device, report = chosen_device(options.device), TransferReport()
    host, on_device = asked_for(TransferBenchmarkSpec()), asked_for(DEVICE_SPEC)
    with notes().status("moving blocks"):
        measure_device_transfers(on_device, device, report)
        measure_host_transfers(host, report)
    if options.json_output:
        print_json(asdict(report))
    else:
        print_transfers(results(), report)
    return FAILURE if report.failures else 0


def _whole_number(text: str) -> int:
    """Return the number, or 0 for any other text, which no size may be."""
    return int(text) if text.isascii() and text.isdigit() else 0

"""KV blocks moved by every transport of this machine, against a plain copy of the same bytes.

    python -m benchmarks.transfer --name transfer/transfer    # target: shm 80 % of a plain copy

In shared memory, and between processes by gloo. On a GPU also lists of blocks to page-locked memory and back, and
between processes by CUDA IPC. Loads nothing that only a server needs (Ray, an HTTP client): it runs on a bare machine
with a GPU; without msgspec it leaves out what moves between processes.
"""

from dataclasses import asdict, replace

from rich.console import Console

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.device_choice import add_device, chosen_device
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.results import TransferReport
from benchmarks.measuring.tables import print_transfers
from benchmarks.transfer.benchmark import measure_device_transfers, measure_host_transfers
from benchmarks.transfer.spec import DEVICE_SPEC, TransferBenchmarkSpec


def main() -> None:
    """Measure and print; record under a --name. Ends with 1 where a transport failed."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--shapes", help="models whose blocks are moved; pocket,opt-125m, of a GPU pocket,llama-3-8b")
    parser.add_argument("--sizes", help="of one request's blocks in MiB; 4,64, of a GPU 64,512")
    parser.add_argument("--name", help="of the record, as transfer/transfer; none is made without")
    add_device(parser)
    options = parser.parse_args()

    def asked_for(spec: TransferBenchmarkSpec) -> TransferBenchmarkSpec:
        shapes = spec.shapes if options.shapes is None else tuple(options.shapes.split(","))
        mebibytes = spec.mebibytes if options.sizes is None else tuple(map(int, options.sizes.split(",")))
        return replace(spec, shapes=shapes, mebibytes=mebibytes, num_rounds=options.rounds)

    report = TransferReport()
    measure_device_transfers(asked_for(DEVICE_SPEC), chosen_device(options.device), report)
    measure_host_transfers(asked_for(TransferBenchmarkSpec()), report)
    print_transfers(Console(), report)
    if options.name:
        print(write_result(options.name, asdict(report)))
    raise SystemExit(1 if report.failures else 0)


if __name__ == "__main__":
    main()

"""Moving KV blocks, as `alignedserve bench transfer`, recorded.

python -m benchmarks.serving.transfer            # on one host; target: shm 80 % of a plain copy
python -m benchmarks.serving.transfer --streams  # between hosts; target: tcp 80 % of a bare stream of the same kind
"""

import argparse
from dataclasses import asdict

from alignedserve.microbench.transfer.host_transfers import host_rows
from alignedserve.microbench.transfer.spec import TransferBenchmarkSpec
from alignedserve.microbench.transfer.stream_transfers import stream_rows
from benchmarks.support.recording import write_result


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", action="store_true")
    arguments = parser.parse_args()
    spec = TransferBenchmarkSpec(num_rounds=arguments.rounds)
    measured = stream_rows(spec) if arguments.streams else host_rows(spec)
    rows = []
    for one in measured:
        rows.append(asdict(one))
        print(rows[-1], flush=True)
    write_result("transfer_streams" if arguments.streams else "transfer", rows)


if __name__ == "__main__":
    main()

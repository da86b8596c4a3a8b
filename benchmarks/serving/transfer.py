"""Moving KV blocks, as `alignedserve bench transfer`, recorded.

python -m benchmarks.serving.transfer      # targets: shm 80 % of a plain copy, tcp 80 % of a bare stream
"""

import argparse
from dataclasses import asdict

from alignedserve.microbench.transfer.host_transfers import host_rows
from alignedserve.microbench.transfer.spec import TransferBenchmarkSpec
from alignedserve.microbench.transfer.stream_transfers import stream_rows
from benchmarks.support.recording import write_result


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    spec = TransferBenchmarkSpec(num_rounds=parser.parse_args().rounds)
    rows = [asdict(one) for one in (*host_rows(spec), *stream_rows(spec))]
    for row in rows:
        print(row)
    write_result("transfer", rows)


if __name__ == "__main__":
    main()

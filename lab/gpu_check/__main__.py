"""The check without the command line's other packages: `python -m lab.gpu_check [--help]`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from lab.gpu_check.check import CheckSpec, run_check


def main() -> int:
    """Run the check that the command line asks for; return the exit code."""
    check_spec = CheckSpec()
    parser = argparse.ArgumentParser(prog="python -m lab.gpu_check", description=__doc__)
    parser.add_argument("--device", default=check_spec.device)
    parser.add_argument("--seconds", type=float, default=check_spec.seconds, help="for everything together")
    parser.add_argument("--toy", action="store_true", help="sizes that show only whether everything runs")
    parser.add_argument("--output", type=Path, default=check_spec.output)
    arguments = parser.parse_args()
    return run_check(
        CheckSpec(arguments.device, arguments.seconds, arguments.toy, arguments.output), partial(print, flush=True)
    )


if __name__ == "__main__":
    sys.exit(main())

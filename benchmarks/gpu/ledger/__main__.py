"""The ledger of the GPU path: kernels and bytes of single steps, counted without a GPU; then what they should be.

Writes benchmarks/results/gpu/ledger.json.

python -m benchmarks.gpu.ledger
python -m benchmarks.gpu.ledger --only 8B    # models of this name alone, printed kernel by kernel; writes nothing
"""

import argparse

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.estimates import targets_table
from benchmarks.gpu.ledger.counted_steps import count_model
from benchmarks.gpu.ledger.forms import MODELS, STEPS
from benchmarks.gpu.ledger.ledger import PATH, Kernels, LedgerStep, written

_MIB = 1 << 20


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of models")
    options = parser.parse_args()
    ledger = {form.name: count_model(form, STEPS) for form in MODELS if options.only in form.name}
    console = Console(width=120)
    if options.only:
        for model, steps in ledger.items():
            for name, step in steps.items():
                console.print(_table(f"{model}: {name}", step))
        return
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(written(ledger))
    print(targets_table(ledger))


def _table(title: str, step: LedgerStep) -> Table:
    table = Table(title=f"{title}: {step.kernels} kernels, {step.num_bytes / 1e9:.2f} GB", title_justify="left")
    for heading in ("", "kernel", "launches", "MiB read", "MiB written", "10^9 operations"):
        table.add_column(heading)
    for where, part in (("first layer and outside", step.first), ("each other layer", step.layer)):
        for name, one in part.items():
            table.add_row(where, name, *_numbers(one))
    return table


def _numbers(one: Kernels) -> tuple[str, ...]:
    return str(one.launches), f"{one.read / _MIB:.2f}", f"{one.written / _MIB:.2f}", f"{one.operations / 1e9:.1f}"


if __name__ == "__main__":
    main()

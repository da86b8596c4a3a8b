"""Options of `alignedserve gpu-check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class GpuCheckOptions:
    """Options of `alignedserve gpu-check`."""

    device: Annotated[str, typer.Option(help="The GPU that is checked.")] = "cuda:0"
    seconds: Annotated[float, typer.Option(min=10.0, help="For everything together.")] = 300.0
    is_toy: Annotated[
        bool, typer.Option("--toy", help="Sizes that show only whether everything runs; --device cpu then works too.")
    ] = False
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to send back.")] = Path(
        "alignedserve-gpu-check.json"
    )

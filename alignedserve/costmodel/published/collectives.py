"""Times of exchanging bytes among the accelerators of one DGX machine: medians of NCCL's calls (Vidur, MLSys 2024)."""

from functools import cache

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.curve import Curve
from alignedserve.costmodel.published.files import rows_of

_MS = 1e-3


def collective_curve(machine: str, operation: str, num_workers: int) -> Curve:
    """Return the seconds by bytes, for all_reduce among 2, 4 or 8 or send_recv between 2.

    Raises ConfigError listing what is.
    """
    curves = _curves()
    if (machine, operation, num_workers) not in curves:
        known = ", ".join(f"{name} {what} x {degree}" for name, what, degree in curves)
        raise ConfigError(f"there is no published {operation} among {num_workers} of {machine!r}; there is {known}.")
    return curves[machine, operation, num_workers]


@cache
def _curves() -> dict[tuple[str, str, int], Curve]:
    points: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in rows_of("dgx_collectives.csv"):
        key = (row["hardware"], row["operation"], int(row["num_workers"]))
        points.setdefault(key, []).append((float(row["size_bytes"]), float(row["ms"]) * _MS))
    return {key: Curve(found) for key, found in points.items()}

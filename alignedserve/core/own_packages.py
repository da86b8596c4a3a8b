"""Whether the package `kernels` that Python would import is the one installed with AlignedServe.

A distribution of another project has the same import name. Installed beside or over ours it would be imported in its
place, and the first thing to fail would be an import deep inside a worker.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

from alignedserve.core.errors import ResourceError

_NAME = "kernels"
_OWN_FILE = "gpu_dispatch.py"  # of ours


def require_own_kernels() -> None:
    """Raise ResourceError, saying what to do, where `import kernels` would find another project's package."""
    spec = importlib.util.find_spec(_NAME)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / _OWN_FILE).is_file() for folder in folders):
        raise ResourceError(f"the package {_NAME} that Python finds is not AlignedServe's; {_advice()}")
    foreign = _foreign_init()
    if foreign is not None and spec is not None and spec.origin is not None and foreign.samefile(spec.origin):
        raise ResourceError(f"another project's package {_NAME} was installed over AlignedServe's; {_advice()}")


def _foreign_init() -> Path | None:
    try:
        distribution = importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"{_NAME}/__init__.py")))
    return path if path.is_file() else None


def _advice() -> str:
    return f"run pip uninstall {_NAME}, then install alignedserve again"

"""Loads the native kernels, where they were built.

They link GCC's OpenMP by its plain name, libgomp.so.1; PyTorch's copy has the same name. So a process
has one OpenMP, with one set of threads, whichever of the two it loads first. Processes without PyTorch (gateway,
router, pool) take the system's, or PyTorch's where that has none: no wheel needs a third."""

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any

_OPENMP = "libgomp.so.1"
TILES = "amx"  # the level of attention that has them


def load_native(name: str) -> Any:
    """Return the extension module if it is built and has `name`, which older builds may lack; else None."""
    try:
        native = _imported()
    except ImportError:
        return None
    return native if hasattr(native, name) else None


def supported_levels() -> tuple[str, ...]:
    """List the instruction sets of attention that this processor has and that are built, best first."""
    native = load_native("BlockCache")
    return () if native is None else tuple(native.supported_levels())


def vector_levels() -> tuple[str, ...]:
    """List those that all kernels have: tiles (AMX) multiply products and attention alone."""
    return tuple(level for level in supported_levels() if level != TILES)


def built_at() -> int:
    """Return when the kernels were built, in nanoseconds of the file's time; 0: they are not."""
    native = load_native("Cache")
    return 0 if native is None else Path(native.__file__).stat().st_mtime_ns


def _imported() -> Any:
    try:
        return importlib.import_module("kernels._native")
    except ImportError as error:
        if _OPENMP not in str(error) or not _load_openmp_of_torch():
            raise
    return importlib.import_module("kernels._native")


def _load_openmp_of_torch() -> bool:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    library = Path(torch.origin).parent / "lib" / _OPENMP
    if not library.is_file():
        return False
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return True

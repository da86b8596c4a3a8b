"""Triton's interpreter without its repeated work: a third of the time of kernels that call functions.

It replaces the functions of `triton.language` when a kernel begins, and again at every call of a device function, which
finds them replaced. Here once per kernel and module.
"""

import inspect
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def patch_once_per_kernel() -> None:
    """Change the interpreter of this process; once. Nothing happens where it has no such function to change."""
    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    run_kernel = interpreter.GridExecutor.__call__
    if replace is None or hasattr(replace, "seen"):
        return
    seen: set[frozenset[str]] = set()  # modules whose functions the running kernel has replaced
    languages: dict[Any, frozenset[str]] = {}  # of every function

    def replace_once(function: Any) -> Any:
        if function not in languages:
            languages[function] = _languages_of(function)
        if languages[function] in seen:
            return None
        seen.add(languages[function])
        return replace(function)

    def run_anew(executor: Any, *args: Any, **options: Any) -> Any:
        seen.clear()
        try:
            return run_kernel(executor, *args, **options)
        finally:
            seen.clear()  # it has put the functions back

    replace_once.seen = seen  # type: ignore[attr-defined]
    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = run_anew


def _languages_of(function: Any) -> frozenset[str]:
    modules = (value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(name for name in modules if name in ("triton.language", "triton.language.core"))

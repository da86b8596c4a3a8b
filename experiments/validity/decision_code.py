"""The digest of the code that decides in a simulation, which comments, docstrings, types and layout do not change.

It is of the modules that a simulation imports: simulator, policies, router, pool, workers, cost model, workloads and
what they are configured by. Of the scheduling policies only the one that runs is in it, so that its rules stale no row
of another.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path

from alignedserve.scheduling.policies import POLICIES, PolicyEntry

ROOT = Path(__file__).parents[2]
_FIRST = tuple(f"alignedserve.sim.{name}" for name in ("simulation", "policies", "sweep", "cluster_hardware"))
_OF = ("alignedserve.", "router", "kvpool", "prefill_worker", "decode_worker", "kernels.cpu")
_NOT_OF = (  # carry decisions and make none
    "alignedserve.messages",
    "alignedserve.core.errors",
    "alignedserve.config.sections.gateway",
    "alignedserve.config.sections.batches",
    "alignedserve.config.sections.observing",
)
_REGISTRY = "alignedserve.scheduling.policies"
_NUM_DIGITS = 12
_SAID_ONLY = frozenset({"annotation", "returns", "type_comment", "type_params", "lineno", "kind", "ctx"})

Read = Callable[[str], str | None]
"""Returns the text of a file by its path in the repository; None: there is none."""


def _from_disk(path: str) -> str | None:
    file = ROOT / path
    return file.read_text() if file.is_file() else None


class DecisionCode:
    """The decision code of one state of the repository."""

    def __init__(self, read: Read = _from_disk) -> None:
        self._read = read
        self._modules: dict[str, tuple[str, Sequence[str]] | None] = {}  # by name: digest, and what it imports

    def digest(self, policy: str | None = None) -> str:
        """Return the digest of what a policy runs; None: of the code of all policies."""
        entry = None if policy is None else POLICIES[policy]
        own = None if entry is None else {entry.config.__module__, _class_of(entry.make).__module__}
        modules = sorted(self._closure(own))
        found = hashlib.sha256(b"" if entry is None else _settings_of(entry))
        for name in modules:
            module = self._module(name)
            assert module is not None
            if own is None or name != _REGISTRY:
                found.update(f"{name} {module[0]}\n".encode())
        return found.hexdigest()[:_NUM_DIGITS]

    def _closure(self, own: set[str] | None) -> set[str]:
        """Return all modules that are reached; from the registry of policies only those in `own`, unless None."""
        seen: set[str] = set()
        waiting = list(_FIRST)
        while waiting:
            name = waiting.pop()
            module = None if name in seen or name.startswith(_NOT_OF) else self._module(name)
            if module is None:
                continue
            seen.add(name)
            imported = module[1]
            if name == _REGISTRY and own is not None:
                imported = [one for one in imported if not one.startswith(f"{_REGISTRY}.") or one in own]
            waiting += imported
        return seen

    def _module(self, name: str) -> tuple[str, Sequence[str]] | None:
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> tuple[str, Sequence[str]] | None:
        path = name.replace(".", "/")
        text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        if text is None:
            return None
        tree = ast.parse(text)
        return digest_of(tree), [one for one in _imports(tree) if one.startswith(_OF)]


def digest_of(tree: ast.AST) -> str:
    """Return the digest of what code does: without docstrings, comments, types and layout."""
    return hashlib.sha256("\n".join(_written(tree)).encode()).hexdigest()


def _written(node: ast.AST) -> Iterator[str]:
    """Yield a node and those below it; a field that is empty is left out, as versions of Python differ in those."""
    yield type(node).__name__
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _SAID_ONLY or value is None or value == []:
            continue
        yield name
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, ast.AST):
                if not _is_text_alone(one):
                    yield from _written(one)
            else:
                yield repr(one)


def _is_text_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def _settings_of(entry: PolicyEntry) -> bytes:
    """Return what the registry says of a policy but for its summary; its classes are modules of their own."""
    said = {field.name: getattr(entry, field.name) for field in fields(entry)}
    return repr([(name, _plain(value)) for name, value in said.items() if name != "summary"]).encode()


def _class_of(make: Callable[..., object]) -> Callable[..., object]:
    return make.func if isinstance(make, partial) else make


def _plain(value: object) -> object:
    if isinstance(value, partial):
        return [_plain(value.func), *map(str, value.args), *sorted(map(str, value.keywords.items()))]
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return getattr(value, "__qualname__", None) or str(value)


@cache
def digests() -> dict[str, str]:
    """Return today's digest of every policy."""
    code = DecisionCode()
    return {name: code.digest(name) for name in POLICIES}

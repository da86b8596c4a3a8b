"""The digest of the code that decides in a simulation, which comments, docstrings, types and layout do not change.

It is of the modules that a simulation imports: simulator, policies, router, pool, workers, cost model, workloads and
what they are configured by. Of the scheduling policies only the one that runs is in it, so that its rules stale no row
of another. Where a definition lies does not matter: each is taken with what its names stand for, and not with its
module's name, so that files may be moved, renamed, split and joined.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path

from alignedserve.scheduling.policies import PolicyEntry, all_policies, policy_entry

ROOT = Path(__file__).parents[2]
_FIRST = tuple(f"lab.sim.{name}" for name in ("simulation", "policies", "sweep"))
_OF = ("alignedserve.", "lab.", "router", "kvpool", "prefill_worker", "decode_worker", "kernels.cpu")
_NOT_OF = (  # carry decisions and make none
    "alignedserve.messages",
    "alignedserve.core.errors",
    "alignedserve.config.sections.gateway",
    "alignedserve.config.sections.batches",
    "alignedserve.config.sections.cluster",
    "alignedserve.worker_core.request_notes",
)
_REGISTRIES = ("alignedserve.scheduling.policies", "lab.policies")  # the second is found by its entry point
_POLICIES = tuple(f"{registry}." for registry in _REGISTRIES)
_NUM_DIGITS = 12
_SAID_ONLY = frozenset({"annotation", "returns", "type_comment", "type_params", "lineno", "kind", "ctx"})

Read = Callable[[str], str | None]
"""Returns the text of a file by its path in the repository; None: there is none."""

StandsFor = Callable[[str], str | None]
"""Returns what a name stands for where it is used; None: something local, or built in."""


def _from_disk(path: str) -> str | None:
    file = ROOT / path
    return file.read_text() if file.is_file() else None


class _Module:
    """Lists what a module defines and what it imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.statements = [one for one in tree.body if not _imports_only(one)]
        self.defined = {name: digest_of(one) for one in self.statements for name in _names_of(one)}
        self.imported = dict(_imports(tree))  # by the name here: module, and what of it

    def reached(self) -> Iterator[str]:
        """Yield the names of the modules that are imported, some of which may be no modules but what is in one."""
        for module, of_it in self.imported.values():
            yield from (module, f"{module}.{of_it}")


class DecisionCode:
    """The decision code of one state of the repository."""

    def __init__(self, read: Read = _from_disk) -> None:
        self._read = read
        self._modules: dict[str, _Module | None] = {}
        self._statements: dict[str, Sequence[str]] = {}  # by module: their digests

    def digest(self, policy: str | None = None) -> str:
        """Return the digest of what a policy runs; None: of the code of all policies."""
        entry = None if policy is None else policy_entry(policy)
        own = None if entry is None else {entry.config.__module__, _class_of(entry.make).__module__}
        apart = set() if entry is None else set(_REGISTRIES)  # of which a policy has its entry alone
        statements = {one for name in self._closure(own) - apart for one in self._digests_of(name)}
        found = hashlib.sha256(b"" if entry is None else _settings_of(entry))
        found.update("\n".join(sorted(statements)).encode())
        return found.hexdigest()[:_NUM_DIGITS]

    def _closure(self, own: set[str] | None) -> set[str]:
        seen: set[str] = set()
        waiting = [*_FIRST, *_REGISTRIES]
        while waiting:
            name = waiting.pop()
            module = None if name in seen else self._module(name)
            if module is None:
                continue
            seen.add(name)
            imported = module.reached()
            if name in _REGISTRIES and own is not None:
                waiting += [module for module in imported if not module.startswith(_POLICIES) or module in own]
            else:
                waiting += imported
        return seen

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> _Module | None:
        if not name.startswith(_OF) or name.startswith(_NOT_OF):
            return None
        path = name.replace(".", "/")
        text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        return None if text is None else _Module(ast.parse(text))

    def _digests_of(self, name: str) -> Sequence[str]:
        if name not in self._statements:
            module, stands_for = self._module(name), partial(self._stands_for, name)
            assert module is not None
            self._statements[name] = [digest_of(one, stands_for) for one in module.statements]
        return self._statements[name]

    def _stands_for(self, module_name: str, name: str) -> str | None:
        module = self._module(module_name)
        if module is None:
            return None
        if name in module.defined or name not in module.imported:
            return module.defined.get(name)
        where, of_it = module.imported[name]
        if not where.startswith(_OF):
            return f"{where}.{of_it}"
        found = None if where in _REGISTRIES else self._stands_for(where, of_it)
        return found or of_it  # is a module, or of one that decides nothing: wherever it lies


def digest_of(tree: ast.AST, stands_for: StandsFor = lambda _name: None) -> str:
    """Return the digest of what code does: without docstrings, comments, types and layout."""
    return hashlib.sha256("\n".join(_written(tree, stands_for)).encode()).hexdigest()


def _written(node: ast.AST, stands_for: StandsFor) -> Iterator[str]:
    yield type(node).__name__
    if isinstance(node, ast.Name):
        yield stands_for(node.id) or ""
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _SAID_ONLY or value is None or value == []:
            continue
        yield name
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, ast.AST):
                if not _says_nothing(one):
                    yield from _written(one, stands_for)
            else:
                yield repr(one)


def _says_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports_only(statement: ast.stmt) -> bool:
    return all(map(_says_nothing, statement.body if isinstance(statement, ast.If) else (statement,)))


def _names_of(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for one in ast.walk(statement):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id


def _imports(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                module, _, last = one.name.rpartition(".")
                yield one.asname or one.name, (module or last, last)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                yield one.asname or one.name, (node.module, one.name)


def _settings_of(entry: PolicyEntry) -> bytes:
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
    code = DecisionCode()
    return {name: code.digest(name) for name in all_policies()}

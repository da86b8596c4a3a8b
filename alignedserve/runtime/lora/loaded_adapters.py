"""The adapters that were loaded while a deployment serves, and the one that takes its place."""

from pathlib import Path

from alignedserve.core.errors import AdapterError
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.adapter_folders import find_adapter
from alignedserve.runtime.lora.loaded_file import (
    changing_loaded,
    loaded_of,
    read_changes,
    read_loaded,
    with_loaded,
    without_loaded,
    write_changes,
)
from alignedserve.runtime.model.served_model import ServedModel


def carry_over(old: Path, new: Path, served: ServedModel) -> tuple[str, ...]:
    """Let a deployment have what was loaded for another, as far as it fits `served`; return why any is left out.

    Reads every adapter's files.
    """
    try:
        before = read_changes(old)
        known = loaded_of(before)
    except AdapterError as error:
        return (str(error),)
    kept, problems = [], []
    for adapter in known.values():
        problem = _problem_of(adapter, served)
        if problem is None:
            kept.append(adapter)
        else:
            problems.append(f"the adapter {adapter.name} is not carried over: {problem}")
    if kept:
        with changing_loaded(new):
            changes = read_changes(new)
            for adapter in kept:
                changes = with_loaded(changes, adapter, before[adapter.name].owner)
            write_changes(new, changes)
    return tuple(problems)


def settle_carried(old: Path, new: Path) -> tuple[str, ...]:
    """Remove from what was carried over what was unloaded since; return the names of adapters that `new` lacks."""
    try:
        known, carried = read_loaded(old), read_loaded(new)
        gone = [one.name for one in carried.values() if known.get(one.name) != one]
        if gone:
            with changing_loaded(new):
                changes = read_changes(new)
                for name in gone:
                    changes = without_loaded(changes, name)
                write_changes(new, changes)
    except (AdapterError, OSError):
        return ()
    return tuple(name for name, one in known.items() if carried.get(name) != one)


def _problem_of(adapter: LoraAdapter, served: ServedModel) -> str | None:
    if served.encoder is not None or not served.lora.is_enabled:
        return "the new model takes none"
    if any(adapter.name == own.name for own in served.adapters):
        return "the new model has one of this name"
    try:
        found = find_adapter(adapter.name, adapter.path, served.lora, served.decoder)
    except AdapterError as error:
        return str(error)
    return None if found == adapter else "its files have changed"

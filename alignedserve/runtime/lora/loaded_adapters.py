"""The adapters that were loaded while a deployment serves: its node's file, and their way to the next deployment.

The node's gateways and its batch worker share the file. Every node of a cluster has one, and the cluster's driver
passes changes between them: a change has a number above all that its node knew, and the larger number of a name counts,
so that all files become the same in any order.

The folders that adapters may be read from: named by the configuration, or below its allowed folder."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import AdapterError, ConfigError, InvalidRequest
from alignedserve.core.request import MAX_ADAPTER_NAME_LEN, LoraAdapter
from alignedserve.process.addresses import deployed_name
from alignedserve.runtime.lora.adapter_check import AdapterFiles, check_adapter, read_adapter_files
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.served_model import ServedModel


def allowed_path(path: str, config: LoraConfig) -> Path:
    """Return the folder, links followed. Raises AdapterError where the configuration does not allow it."""
    try:
        folder = Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # such as links in a circle
        raise AdapterError("The adapter's path leads nowhere.") from error
    if any(Path(adapter).resolve() == folder for adapter in config.adapters.values()):
        return folder
    if config.allowed_folder is None:
        raise AdapterError("Adapters are loaded only where lora.allowed_folder is set.")
    if not folder.is_relative_to(Path(config.allowed_folder).resolve()):
        raise AdapterError("The adapter's folder is not inside lora.allowed_folder.")
    return folder


def read_adapter(adapter: LoraAdapter, config: LoraConfig) -> AdapterFiles:
    """Read an adapter's folder. Raises AdapterError where it is not allowed, or holds another adapter by now."""
    files = read_adapter_files(allowed_path(adapter.path, config), config.memory_bytes)
    if files.digest != adapter.digest:
        raise AdapterError("The files of the adapter have changed since it was loaded.")
    return files


def with_adapters(served: ServedModel, config: LoraConfig) -> ServedModel:
    """Return the model with the adapters of the configuration. Raises AdapterError naming one, or ConfigError."""
    if config.adapters and served.encoder is not None:
        raise ConfigError("lora.adapters are for decoders, not for an encoder; leave it out")
    if config.allowed_folder == "":
        raise ConfigError("lora.allowed_folder must name a folder; leave it out where none may be loaded")
    if served.name in config.adapters:
        raise ConfigError(f"lora.adapters has one of the model's own name, {served.name!r}")
    adapters = []
    for name, path in config.adapters.items():
        try:
            adapters.append(find_adapter(name, path, config, served.decoder))
        except AdapterError as error:
            raise AdapterError(f"lora.adapters, {name!r}: {error}") from error
    # Workers have other working directories.
    paths = {adapter.name: adapter.path for adapter in adapters}
    allowed = None if config.allowed_folder is None else str(Path(config.allowed_folder).resolve())
    lora = msgspec.structs.replace(config, adapters=paths, allowed_folder=allowed)
    return replace(served, lora=lora, adapters=tuple(adapters))


def find_adapter(name: str, path: str, config: LoraConfig, model: ModelConfig) -> LoraAdapter:
    """Read, check and name an adapter. Raises AdapterError."""
    files = read_adapter_files(allowed_path(path, config), config.memory_bytes)
    check_adapter(files, model, max_rank=config.max_rank)
    return LoraAdapter(name, str(files.folder), files.digest)


_MAX_FILE_BYTES = 16 << 20
_MAX_UNLOADED = 1000  # remembered names, which no other node brings back


class AdapterChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last that was done with an adapter of this name."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_NAME_LEN)]
    path: str
    digest: bytes
    number: int = 1  # of two changes the larger counts
    is_loaded: bool = True  # False: it was unloaded
    owner: str = ""  # of the key that loaded it

    @property
    def adapter(self) -> LoraAdapter:
        """Return the adapter as requests carry it. Raises InvalidRequest."""
        return LoraAdapter(self.name, self.path, self.digest)

    @property
    def rank(self) -> tuple[int, bool, str, bytes, str]:
        """Return what orders changes of one name, in the same way everywhere."""
        return self.number, self.is_loaded, self.path, self.digest, self.owner


Changes = dict[str, AdapterChange]  # by name


def loaded_file(folder: Path, deployment_id: str) -> Path:
    file = folder / deployed_name("adapters", deployment_id)
    return file.with_name(f"{file.name}.json")


def read_changes(file: Path) -> Changes:
    """Return what a file says; nothing where there is no file. Raises AdapterError for a damaged one."""
    try:
        with file.open("rb") as stream:
            entries = msgspec.json.decode(stream.read(_MAX_FILE_BYTES), type=list[AdapterChange])
        return {entry.name: entry for entry in entries}
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterError(f"the list of loaded adapters cannot be read: {type(error).__name__}") from error


def loaded_of(changes: Changes) -> dict[str, LoraAdapter]:
    """Return the adapters that are loaded, by name. Raises AdapterError for one that is none."""
    try:
        return {change.name: change.adapter for change in changes.values() if change.is_loaded}
    except InvalidRequest as error:
        raise AdapterError("an entry in the list of loaded adapters is not an adapter") from error


def read_loaded(file: Path) -> dict[str, LoraAdapter]:
    """Return the adapters that a file says are loaded, by name. Raises AdapterError for a damaged one."""
    return loaded_of(read_changes(file))


def write_changes(file: Path, changes: Changes) -> None:
    """Replace the file, inside `changing_loaded`. Of what was unloaded the latest is kept."""
    unloaded = sorted((change for change in changes.values() if not change.is_loaded), key=lambda entry: -entry.number)
    latest = [change for change in changes.values() if change.is_loaded] + unloaded[:_MAX_UNLOADED]
    written = file.with_suffix(".new")
    written.write_bytes(msgspec.json.encode(latest))
    os.replace(written, file)


def with_loaded(changes: Changes, adapter: LoraAdapter, owner: str = "") -> Changes:
    """Return the changes after one more adapter was loaded, by the key of this owner."""
    change = AdapterChange(adapter.name, adapter.path, adapter.digest, _next_number(changes), owner=owner)
    return {**changes, adapter.name: change}


def without_loaded(changes: Changes, name: str) -> Changes:
    gone = msgspec.structs.replace(changes[name], number=_next_number(changes), is_loaded=False)
    return {**changes, name: gone}


def merged(changes: Changes, others: Iterable[AdapterChange]) -> Changes:
    newest = dict(changes)
    for other in others:
        change = newest.get(other.name)
        if change is None or other.rank > change.rank:
            newest[other.name] = other
    return newest


@contextmanager
def changing_loaded(file: Path) -> Iterator[None]:
    """Keep other processes from changing the file."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def exchange(file: Path, others: Iterable[AdapterChange]) -> tuple[AdapterChange, ...]:
    """Take changes of other nodes into the file, and return all that it has then. Raises AdapterError, OSError."""
    with changing_loaded(file):
        before = read_changes(file)
        after = merged(before, others)
        if after != before:
            write_changes(file, after)
    return tuple(after.values())


def _next_number(changes: Changes) -> int:
    return 1 + max((change.number for change in changes.values()), default=0)


def carry_over(old: Path, new: Path, served: ServedModel) -> tuple[str, ...]:
    """Let a deployment have what was loaded for another, as far as it fits `served`; return why any is left out. Reads
    every adapter's files."""
    try:
        before = read_changes(old)
        known = loaded_of(before)
    except AdapterError as error:
        return (str(error),)
    fitting, problems = [], []
    for adapter in known.values():
        problem = _problem_of(adapter, served)
        if problem is None:
            fitting.append(adapter)
        else:
            problems.append(f"the adapter {adapter.name} is not carried over: {problem}")
    if fitting:
        with changing_loaded(new):
            changes = read_changes(new)
            for adapter in fitting:
                changes = with_loaded(changes, adapter, before[adapter.name].owner)
            write_changes(new, changes)
    return tuple(problems)


def settle_carried(old: Path, new: Path) -> tuple[str, ...]:
    """Remove from what was carried over what was unloaded since; return the names of adapters that `new` lacks."""
    try:
        known, carried = read_loaded(old), read_loaded(new)
        gone = [adapter.name for adapter in carried.values() if known.get(adapter.name) != adapter]
        if gone:
            with changing_loaded(new):
                changes = read_changes(new)
                for name in gone:
                    changes = without_loaded(changes, name)
                write_changes(new, changes)
    except (AdapterError, OSError):
        return ()
    return tuple(name for name, adapter in known.items() if carried.get(name) != adapter)


def _problem_of(adapter: LoraAdapter, served: ServedModel) -> str | None:
    if served.encoder is not None or not served.lora.is_enabled:
        return "the new model takes none"
    if any(adapter.name == configured.name for configured in served.adapters):
        return "the new model has one of this name"
    try:
        current = find_adapter(adapter.name, adapter.path, served.lora, served.decoder)
    except AdapterError as error:
        return str(error)
    return None if current == adapter else "its files have changed"

"""The adapters that requests may name, from the configuration or loaded while serving.

Loaded adapters are in a file of the node (`runtime/lora/loaded_adapters.py`), which its gateways and its batch worker
share: a restarted process knows them again. The meaning of a name is in memory; the file is read after a change."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignedserve.api.errors import Forbidden, NotFound
from alignedserve.core.errors import AdapterError, InvalidRequest
from alignedserve.core.request import LoraAdapter
from alignedserve.disk.durable import LastSeen
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.runtime.lora.loaded_adapters import (
    Changes,
    changing_loaded,
    find_adapter,
    loaded_of,
    read_changes,
    with_loaded,
    without_loaded,
    write_changes,
)
from alignedserve.runtime.model.served_model import ServedModel

logger = logging.getLogger(__name__)

_MAX_LOADED = 1000  # of all keys
_MAX_OF_KEY = 250  # of a key without sight of all adapters


class AdapterDirectory:
    """The adapters of one deployment. `load` and `unload` block: they read and write files."""

    def __init__(self, served: ServedModel, path: Path) -> None:
        """`path`: of the file, which need not exist."""
        self._served = served
        self._path = path
        self._configured = {adapter.name: adapter for adapter in served.adapters}
        self._changes: Changes = {}
        self._loaded: dict[str, LoraAdapter] = {}  # by these
        self._file = LastSeen(path)
        self._lock = threading.RLock()  # of both, which belong together

    @property
    def all(self) -> tuple[LoraAdapter, ...]:
        """Return all adapters, those of the configuration first."""
        self._refresh()
        return (*self._configured.values(), *self._loaded.values())

    def find(self, name: str) -> LoraAdapter | None:
        """Return the adapter of this name."""
        if name in self._configured:
            return self._configured[name]
        self._refresh()
        return self._loaded.get(name)

    def load(self, name: str, path: str, *, replaces: bool = False, key: KeyEntry = ANYONE) -> LoraAdapter:
        """Read and check an adapter, and let requests name it. `replaces`: one of that name may be there.

        `key`: whose it is from then on. Raises InvalidRequest."""
        if not name.isprintable() or name in self._configured or name == self._served.name:
            raise InvalidRequest("lora_name is a name of the configuration, or not printable.", param="lora_name")
        try:
            adapter = find_adapter(name, path, self._served.lora, self._served.decoder)
        except AdapterError as error:
            raise InvalidRequest(str(error), param="lora_path", code="invalid_adapter") from error
        with self._changing():
            self._check_owner(name, key)
            if name in self._loaded and not replaces:
                raise InvalidRequest("An adapter of this name is loaded already; set load_inplace.", param="lora_name")
            check_room(self._changes, name, key)
            self._changes = with_loaded(self._changes, adapter, key.owner)
        logger.info("loaded adapter %r", name)
        return adapter

    def unload(self, name: str, key: KeyEntry = ANYONE) -> None:
        """Let no new request name the adapter; requests that have it go on. Raises NotFound, InvalidRequest."""
        if name in self._configured:
            raise InvalidRequest("An adapter of the configuration is not unloaded.", param="lora_name")
        with self._changing():
            if name not in self._loaded:
                raise NotFound("No adapter of this name is loaded.", param="lora_name", code="adapter_not_found")
            self._check_owner(name, key)
            self._changes = without_loaded(self._changes, name)
        logger.info("unloaded adapter %r", name)

    def _check_owner(self, name: str, key: KeyEntry) -> None:
        if name in self._loaded and not key.may_change(self._changes[name].owner):
            message = "Another key has loaded the adapter of this name."
            raise Forbidden(message, param="lora_name", code="adapter_not_allowed")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with changing_loaded(self._path), self._lock:
            self._refresh()
            yield
            write_changes(self._path, self._changes)
            self._loaded = loaded_of(self._changes)
            self._file.has_changed()  # as this process knows

    def _refresh(self) -> None:
        with self._lock:
            if not self._file.has_changed():
                return
            try:
                self._changes = read_changes(self._path)
                self._loaded = loaded_of(self._changes)
            except AdapterError:
                logger.exception("the adapters in %s cannot be read", self._path)


def check_room(changes: Changes, name: str, key: KeyEntry) -> None:
    """Raise InvalidRequest where the key, or all keys together, may not have one more adapter loaded, of this name."""
    others = [adapter for adapter in changes.values() if adapter.is_loaded and adapter.name != name]
    if len(others) >= _MAX_LOADED:
        raise InvalidRequest(f"At most {_MAX_LOADED} adapters can be loaded.", param="lora_name")
    if not key.sees_all and sum(adapter.owner == key.owner for adapter in others) >= _MAX_OF_KEY:
        message = f"The key {key.name} has {_MAX_OF_KEY} adapters loaded, and may have no more; unload one."
        raise InvalidRequest(message, param="lora_name")

"""The settings of the deployments of a cluster, by which one more is checked before it is planned."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.cluster.deployments.orders import AddModel, ReplaceModel
from alignedserve.config.model_settings import ModelSettings, name_of, require_adapters_apart
from alignedserve.config.sections import ClusterConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.lora.loaded_adapters import carry_over, settle_carried
from alignedserve.runtime.lora.loaded_file import loaded_file, read_loaded
from alignedserve.runtime.model.hub.local_model import with_local_model
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.topology import require_effect


class DeploymentSettings:
    """The settings of the deployments of one cluster, by which one more is checked."""

    def __init__(self, common: ModelSettings, own: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        """`own`: sections of each deployment that serves, by its id. `folder`: private, of the head."""
        self._common = common
        self._own = dict(own)
        self._folder = folder

    def of_order(self, order: AddModel | ReplaceModel, replaced: str | None) -> tuple[Mapping[str, Any], ClusterConfig]:
        """Return the own sections of a deployment that is ordered, and its configuration with a model of this machine.

        Takes as long as its download, if it is on a hub. Raises ConfigError or ModelError.
        """
        like = self._own.get(replaced) if replaced is not None else None
        own = self._common.another(order.path, order.name, order.settings, like)
        (config,) = self._common.with_models([own]).configs
        if config.recording.folder is not None:
            raise ConfigError("recording.folder is for one model from start to end; serve without it to change models")
        require_effect(config)
        return own, msgspec.structs.replace(config, model=with_local_model(config.model))

    def require_apart(self, served: ServedModel, config: ClusterConfig, replaced: str | None) -> None:
        """Refuse names that other models, or adapters of them, have. Raises ConfigError, AdapterError."""
        names = {served.name, *(adapter.name for adapter in served.adapters)}
        for one, settings in tuple(self._own.items()):
            twice = next((name for name in read_loaded(self._loaded(one)) if name in names), None)
            if one != replaced and twice is not None:
                raise ConfigError(f"{twice} is the name of an adapter that was loaded for {name_of(settings)}")
        require_adapters_apart({**self._beside(served.name, replaced), served.name: config})

    def note(self, deployment_id: str, own: Mapping[str, Any], served: ServedModel) -> Mapping[str, Any]:
        """Note a deployment that may be started; return its sections, with the name of its model."""
        self._own[deployment_id] = {**own, "model": {**own["model"], "served_model_name": served.name}}
        return self._own[deployment_id]

    def forget(self, deployment_id: str) -> None:
        """Forget a deployment that has ended. May be repeated."""
        self._own.pop(deployment_id, None)

    def carry_adapters(self, replaced: str, deployment_id: str, served: ServedModel) -> tuple[str, ...]:
        """Let a replacement have the adapters that were loaded; return why any is left out."""
        return carry_over(self._loaded(replaced), self._loaded(deployment_id), served)

    def settle_adapters(self, replaced: str, deployment_id: str) -> tuple[str, ...]:
        """Unload from a replacement what was unloaded since it was prepared; return the adapters that it lacks."""
        return settle_carried(self._loaded(replaced), self._loaded(deployment_id))

    def _loaded(self, deployment_id: str) -> Path:
        return loaded_file(self._folder, deployment_id)

    def _beside(self, name: str, replaced: str | None) -> dict[str, ClusterConfig]:
        """Return the other models that go on, by name; one of this name drains."""
        own = [settings for one, settings in self._own.items() if one != replaced and name_of(settings) != name]
        return {name_of(one): self._common.with_models([one]).configs[0] for one in own}


def in_background(prepare: Callable[[], Any], name: str) -> "Future[Any]":
    """Call this on a thread of that name, which the end of this process does not wait for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(prepare())
        except Exception as error:  # noqa: BLE001  (raised again where the result is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

"""The turns of a worker on a device that several models share: which of its iterations somebody waits for."""

import contextlib
from collections.abc import Iterator

from alignedserve.config.sections import EngineConfig
from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import requests_of
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.device.shared_device import SharedDevice


class DeviceTurns:
    """Knows the sequences of an executor that somebody waits for. For its compute thread, except `on_message`."""

    def __init__(self, device: SharedDevice | None) -> None:
        """`device`: None: every turn is taken at once."""
        self._device = device
        self._real_time: set[RequestId] = set()

    def on_message(self, message: Message) -> None:
        """End a wait when a message brings a request that somebody waits for. From any thread."""
        if self._device is not None and any(request.is_real_time for request in requests_of(message)):
            self._device.on_arrival()

    @contextlib.contextmanager
    def taken_for(self, command: RunIteration) -> Iterator[None]:
        """Take the device for one iteration, once no other model's is more urgent; see SharedDevice."""
        self.note(command)
        with self.taken(is_real_time=any(request_id in self._real_time for request_id, _ in command.slices)):
            yield

    @contextlib.contextmanager
    def taken(self, *, is_real_time: bool) -> Iterator[None]:
        """Take the device for work that somebody waits for, or that nobody does, in the same way."""
        if self._device is None:
            yield
            return
        self._device.begin(is_real_time=is_real_time)
        try:
            yield
        finally:
            self._device.end(is_real_time=is_real_time)

    def note(self, command: RunIteration) -> None:
        """Note which sequences leave and enter with an iteration."""
        self._real_time.difference_update(command.removals)  # first: a later attempt may be added with the same id
        for addition in command.additions:
            if addition.request.is_real_time:
                self._real_time.add(addition.request.request_id)

    def has_real_time(self) -> bool:
        """Return whether somebody waits for a sequence of the executor. From any thread."""
        return bool(self._real_time)

    def is_alone(self) -> bool:
        """Return whether no other model asks for the device: what is launched now may run on behind the turn."""
        return self._device is None or self._device.is_alone()

    def giving_way(self) -> contextlib.AbstractContextManager[None]:
        """Take the device for work that nobody waits for, as before the worker serves."""
        return self.taken(is_real_time=False)

    def close(self) -> None:
        """Leave the board of the device."""
        if self._device is not None:
            self._device.close()


def shared_device_of(spec: ProcessSpec, config: EngineConfig) -> SharedDevice | None:
    """Return what a worker observes on the device that it computes on; None: its model gives way to none."""
    return SharedDevice.of(spec.addresses.folder, config.device, spec.deployment_id, config.best_effort_share)

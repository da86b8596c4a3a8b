"""The turns of a worker on a shared device: its iterations for chats go before iterations for documents."""

import contextlib
from collections.abc import Iterator

from alignedserve.config.sections import EngineConfig
from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import requests_of
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import CPU, device_type
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
        """Take the device for one iteration, once no other worker's is more urgent; see SharedDevice."""
        self.note(command)
        urgent = [num_tokens for request_id, num_tokens in command.slices if request_id in self._real_time]
        with self.taken(is_real_time=bool(urgent), has_prompt=max(urgent, default=0) > 1):
            yield

    @contextlib.contextmanager
    def taken_within(self, command: RunIteration) -> Iterator[None]:
        self.note(command)
        with self._device.taken_within() if self._device is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def taken(self, *, is_real_time: bool, has_prompt: bool = False, may_stop: bool = True) -> Iterator[None]:
        if self._device is None:
            yield
            return
        self._device.begin(is_real_time=is_real_time, has_prompt=has_prompt, may_stop=may_stop)
        try:
            yield
        finally:
            self._device.end(is_real_time=is_real_time)

    def between_layers(self) -> None:
        if self._device is not None:
            self._device.between_layers()

    def take_stopped_s(self) -> float:
        return self._device.take_stopped_s() if self._device is not None else 0.0

    def note(self, command: RunIteration) -> None:
        self._real_time.difference_update(command.removals)  # first: a later attempt may be added with the same id
        for addition in command.additions:
            if addition.request.is_real_time:
                self._real_time.add(addition.request.request_id)

    def has_real_time(self) -> bool:
        """Return whether somebody waits for a sequence of the executor. From any thread."""
        return bool(self._real_time)

    def is_alone(self) -> bool:
        """Return whether no other worker asks for the device: what is launched now may run on behind the turn."""
        return self._device is None or self._device.is_alone()

    def giving_way(self) -> contextlib.AbstractContextManager[None]:
        """Take the device for work that is timed before the worker serves, and for which nobody waits."""
        return self.taken(is_real_time=False, may_stop=False)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()


def shared_device_of(spec: ProcessSpec, config: EngineConfig) -> SharedDevice | None:
    """Return the rules of a worker on its device; None: it gives way to no other worker."""
    num_threads = (config.threads_per_worker or num_cores()) if device_type(config.device) == CPU else 0
    folder, share = spec.addresses.folder, config.best_effort_share
    return SharedDevice.of(folder, config.device, spec.deployment_id, share, num_threads)

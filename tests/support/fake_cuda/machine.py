"""The machine of the fake CUDA: streams that do their work later, in any order that their events allow.

A step reads memory by address when it runs, and holds no tensor. Which step of which stream runs next, and when, is
drawn from a seed.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from typing_extensions import override

Call = Callable[[], object]


class Meets:
    """A step that is done together with those of other streams, whose hosts may not have come so far."""

    def is_ready(self) -> bool:
        """Return whether all of them have come to it."""
        raise NotImplementedError

    def __call__(self) -> object:
        """Do it."""
        raise NotImplementedError


_PAUSE_S = 1e-4  # while nothing can be done

_NUM_POOLED = 32  # streams that PyTorch has for each device, given out in turn


class Mark:
    """A moment of a stream."""

    __slots__ = ("graph", "is_done")

    def __init__(self, graph: "Recording | None" = None) -> None:
        self.is_done = False
        self.graph = graph  # the recording that it is in


@dataclass
class Counts:
    """What a program has done since these were made or cleared."""

    kernels: int = 0  # on a device, replayed ones included
    launches: int = 0  # by the host: a graph is one
    copies: int = 0  # between host and device
    read_bytes: int = 0  # by kernels, of whole tensors that are their arguments
    written_bytes: int = 0
    copied_bytes: int = 0
    pageable_copies: int = 0
    synchronisations: int = 0  # waits of the host, for whatever reason
    captures: int = 0
    replays: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def note(self, name: str, read: int, written: int, *, is_copy: bool) -> None:
        self.names[name] += 1
        if is_copy:
            self.copies += 1
            self.copied_bytes += written
        else:
            self.kernels += 1
            self.read_bytes += read
            self.written_bytes += written

    def add(self, other: "Counts") -> None:
        self.names.update(other.names)
        self.kernels += other.kernels
        self.copies += other.copies
        self.read_bytes += other.read_bytes
        self.written_bytes += other.written_bytes
        self.copied_bytes += other.copied_bytes

    def clear(self) -> None:
        """Count from nothing again."""
        self.__dict__.update(vars(Counts()))


@dataclass(slots=True)
class Recording:
    """The steps of a graph, while it is captured and afterwards."""

    pool: tuple[int, int]
    queue: "Queue"
    steps: list[Call] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    is_broken: bool = False


class CaptureRefused(torch.AcceleratorError):
    """What CUDA does not permit within a capture."""


class Queue:
    """One stream of one device."""

    def __init__(self, machine: "Machine", device: int, number: int) -> None:
        self.device = device
        self.number = number  # 0: the default stream
        self._machine = machine
        self._steps: deque[Call | Mark | tuple[Mark]] = deque()

    @override
    def __repr__(self) -> str:
        return f"cuda:{self.device} stream {self.number}"

    def __len__(self) -> int:
        return len(self._steps)

    def __bool__(self) -> bool:
        return True

    def add(self, call: Call) -> None:
        if self.device in self._machine.dead:
            return
        if not self._steps:
            self._machine.busy[self] = None
        self._steps.append(call)

    def mark(self) -> Mark:
        """Return the moment behind all work so far."""
        mark = Mark()
        if self._steps:
            self._steps.append(mark)
        else:
            mark.is_done = True
        return mark

    def wait(self, mark: Mark) -> None:
        if not mark.is_done and self.device not in self._machine.dead:
            if not self._steps:
                self._machine.busy[self] = None
            self._steps.append((mark,))

    @property
    def is_idle(self) -> bool:
        return not self._steps

    def is_ready(self) -> bool:
        steps = self._steps
        while steps:
            step = steps[0]
            if isinstance(step, tuple):
                if not step[0].is_done:
                    return False
            elif isinstance(step, Mark):
                step.is_done = True
            else:
                return not isinstance(step, Meets) or step.is_ready()
            steps.popleft()
        self._machine.busy.pop(self, None)
        return False

    @property
    def awaits_another_host(self) -> bool:
        """Return whether the next step waits for what other threads have yet to enqueue."""
        return bool(self._steps) and isinstance(self._steps[0], Meets)

    def forget(self) -> None:
        """Drop what is left to do, as the end of a process does."""
        self._machine.busy.pop(self, None)
        dropped, self._steps = self._steps, deque()  # what it held may be given back to this stream now
        for step in dropped:
            if isinstance(step, Mark):
                step.is_done = True

    def step(self) -> None:
        call = self._steps.popleft()
        assert callable(call), "a step that is ready"
        call()
        self.is_ready()  # marks behind it are reached


class _Thread(threading.local):
    """What CUDA keeps for each thread of the host."""

    device: int = 0
    recording: Recording | None = None

    def __init__(self) -> None:
        self.current: dict[int, Queue] = {}


class Machine:
    """Devices and their streams. `pace`: how eager they are: 0 does nothing before a wait, 1 everything at once."""

    def __init__(self, seed: int = 0, *, num_devices: int = 1, pace: float = 0.3) -> None:
        self.random = random.Random(seed)
        self.pace = pace
        self.num_devices = num_devices
        self.counts = Counts()
        self.lock = threading.RLock()
        self.thread = _Thread()
        self.failure: BaseException | None = None  # of a step: every later call fails
        self.defaults = [Queue(self, device, 0) for device in range(num_devices)]
        self._pooled: list[list[Queue]] = [[] for _ in range(num_devices)]
        self._num_given = [0] * num_devices
        self.queues = list(self.defaults)
        self.dead = set[int]()  # devices whose process was killed and is not started again
        self.busy: dict[Queue, None] = {}  # those with work, in the order in which they got it
        self.num_pools = 0

    # --- streams

    def pooled(self, device: int) -> Queue:
        """Return the next of a device's streams, which PyTorch hands out in turn."""
        with self.lock:
            number = self._num_given[device] % _NUM_POOLED
            self._num_given[device] += 1
            if number == len(self._pooled[device]):
                self._pooled[device].append(Queue(self, device, number + 1))
                self.queues.append(self._pooled[device][number])
            return self._pooled[device][number]

    def current(self, device: int | None = None) -> Queue:
        index = self.thread.device if device is None else device
        return self.thread.current.get(index, self.defaults[index])

    # --- time passes

    def step(self) -> bool:
        """Do one step of a random stream; False: none can."""
        with self.lock:
            ready = self._ready()
            if not ready:
                return False
            try:
                with torch.no_grad():
                    ready[int(self.random.random() * len(ready))].step()
            except BaseException as error:  # noqa: BLE001  (as of an illegal address: the process cannot go on)
                self.failure = self.failure or error
            return True

    def _ready(self) -> list[Queue]:
        """Return the streams that can go on, marks in front of them reached."""
        while True:
            left = sum(map(len, list(self.busy)))
            ready = [queue for queue in list(self.busy) if queue.is_ready()]
            if ready or sum(map(len, list(self.busy))) == left:
                return ready

    def breathe(self) -> None:
        """Let some time pass, or none."""
        while self.random.random() < self.pace and self.step():
            pass

    def run_until(self, mark: Mark) -> None:
        while not mark.is_done:
            if not self.step() and not mark.is_done:
                with self.lock:  # another thread may have been within a step
                    can_go_on = self._ready() or any(queue.awaits_another_host for queue in self.busy)
                    assert can_go_on or mark.is_done, "streams wait in a circle"
                time.sleep(_PAUSE_S)
        self.check()

    def drain(self) -> None:
        """Do everything that is left."""
        while self.step():
            pass
        self.check()

    @contextmanager
    def killed(self, device: int) -> Iterator[None]:
        """End the process that has a device: what it has enqueued is not done, nor what it enqueues within.

        The threads of its host, which a kill would end at once, are to be stopped within.
        """
        with self.lock:
            self.dead.add(device)
            for queue in self.queues:
                if queue.device == device:
                    queue.forget()
        try:
            yield
        finally:
            self.dead.remove(device)

    def check(self) -> None:
        """Raise what a step has failed of."""
        if self.failure is not None:
            raise torch.AcceleratorError(f"CUDA error: {self.failure!r}") from self.failure

    # --- what the host asks for

    def refuse_in_capture(self, what: str) -> None:
        """Raise, and break the capture of this thread, if there is one."""
        recording = self.thread.recording
        if recording is not None:
            recording.is_broken = True
            raise CaptureRefused(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def synchronise(self, queue: Queue, what: str) -> None:
        """Have the host wait for a stream."""
        self.refuse_in_capture(what)
        self.counts.synchronisations += 1
        self.run_until(queue.mark())

    def enqueue(self, name: str, calls: list[Call], *, read: int = 0, written: int = 0, is_copy: bool = False) -> None:
        """Add steps of one operation to the current stream, or to the graph that is captured."""
        thread, counts = self.thread, self.counts
        self.check()
        with self.lock:
            counts.launches += 1
            queue, recording = self.current(), thread.recording
            is_captured = recording is not None and recording.queue is queue
            noted = recording.counts if is_captured and recording is not None else counts
            noted.note(name, read, written, is_copy=is_copy)
            self.add_steps(queue, calls)
        self.breathe()

    def add_steps(self, queue: Queue, calls: list[Call]) -> None:
        """Add steps that nobody counts."""
        recording = self.thread.recording
        if recording is not None and recording.queue is queue:
            recording.steps += calls
            return
        for call in calls:
            queue.add(call)

    def replay(self, recording: Recording) -> None:
        self.check()
        with self.lock:
            self.counts.launches += 1
            self.counts.replays += 1
            self.counts.add(recording.counts)
            self.add_steps(self.current(), recording.steps)
        self.breathe()

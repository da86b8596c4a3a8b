"""`alignedserve serve` one of whose workers has a device that fails for good after some steps.

python -m tests.cluster.falling_gpu FILE serve ...

FILE: made by the worker whose device fails: that of the first to make so many steps.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import ray
import torch

from alignedserve.cli.main import main
from alignedserve.cluster import actor_factory
from alignedserve.runtime.engine.engine import Engine

NUM_STEPS = 40
_MODULE: Any = actor_factory


def failing_after(num_steps: int, fallen: Path) -> None:
    """Let the device of this process fail in a step, unless another's has."""
    execute, done, falls = Engine.execute, 0, not fallen.exists()

    def failing(engine: Engine, *args: Any, **named: Any) -> Any:
        nonlocal done, falls
        done += 1
        if done == num_steps and falls:
            with contextlib.suppress(FileExistsError):
                fallen.open("x").close()
                raise torch.AcceleratorError("CUDA error: GPU has fallen off the bus", 0)
            falls = False  # another's did meanwhile
        if done > num_steps and falls:
            raise torch.AcceleratorError("CUDA error: GPU has fallen off the bus", 0)
        return execute(engine, *args, **named)

    Engine.execute = failing  # type: ignore[assignment,method-assign]


def on_falling_device(actor: Any, fallen: Path) -> Any:
    """Return the actor class, whose device fails."""
    plain: Any = actor.__ray_metadata__.modified_class

    class Falling(plain):  # type: ignore[misc]
        """The worker."""

        def __init__(self, *args: Any, **named: Any) -> None:
            failing_after(NUM_STEPS, fallen)
            super().__init__(*args, **named)

    Falling.__name__ = Falling.__qualname__ = plain.__name__
    return ray.remote(Falling)


if __name__ == "__main__":
    fallen = Path(sys.argv.pop(1))
    _MODULE.ColocatedWorkerActor = on_falling_device(actor_factory.ColocatedWorkerActor, fallen)  # type: ignore[attr-defined]
    main()

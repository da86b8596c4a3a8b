"""The benchmarks of what is between forward passes see every pass that a worker's engine runs."""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import torch

from alignedserve.runtime.engine.steps import step_passes
from benchmarks.engine.iteration_gap import _stamp_forward_passes
from kernels.cpu.decode_pass import HighestLogits


def test_every_pass_is_noted() -> None:
    rows, chosen = torch.zeros(3, 5), HighestLogits(torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    passes: dict[str, Any] = {
        "forward": lambda batch, storage: rows,
        "logits": lambda hidden: hidden,
        "decode": lambda batch, storage: rows,
        "decode_highest": lambda batch, storage, allowed: chosen,
    }
    source = "".join(map(inspect.getsource, (step_passes.DecodeGraphs, step_passes.StepPasses)))
    assert set(re.findall(r"self\._model\.(\w+)\(", source)) == passes.keys()
    model: Any = SimpleNamespace(**passes)
    executor: Any = SimpleNamespace(_engine=SimpleNamespace(model=model))
    stamps = _stamp_forward_passes(executor)
    model.logits(model.forward(None, None))
    model.decode(None, None)
    assert model.decode_highest(None, None, None) is chosen
    assert [num_tokens for _, _, num_tokens in stamps] == [3, 3, 3]

"""What the ledger counts is what runs in Triton's interpreter: the same kernels in the same order, and their bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from alignedserve.core.block_layout import FP8
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.weight_files import load_weights
from kernels import gpu_dispatch
from tests.support.models.tiny_engines import TinyEngine, capture_nothing, random_tokens

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from benchmarks.gpu.ledger.counted_steps import count_steps
from benchmarks.gpu.ledger.forms import TOY_MODEL, StepForm
from benchmarks.gpu.ledger.kernel_bytes import noted_launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]

PROMPT, MIXED, DECODE = (
    StepForm("prompt", 0, 0, prompt_len=11),
    StepForm("mixed", 2, 13, prompt_len=6),
    StepForm("decode", 3, 14),
)


class Run(NamedTuple):
    """A kernel that ran: the bytes that the ledger counts, and those that it touched."""

    name: str
    counted: tuple[int, int]
    touched: tuple[int, int]


class Watch:
    """Notes what runs in the interpreter, and which bytes it loads and stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Run] = []
        self._sets: tuple[set[int], set[int]] = (set(), set())
        run = InterpretedFunction.run

        def watched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            names = kernel.arg_names
            own = dict(zip(names, args, strict=False)) | {key: value for key, value in options.items() if key in names}
            launch = noted_launch(kernel, grid, own)
            self._sets = (set(), set())
            result = run(kernel, *args, grid=grid, warmup=warmup, **options)
            self.runs.append(Run(launch.name, (launch.read, launch.written), tuple(map(len, self._sets))))  # type: ignore[arg-type]
            return result

        monkeypatch.setattr(InterpretedFunction, "run", watched)
        for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):
            monkeypatch.setattr(InterpreterBuilder, name, self._noting(getattr(InterpreterBuilder, name), place))

    def _noting(self, access: Callable[..., Any], place: int) -> Callable[..., Any]:
        def noted(builder: Any, pointers: Any, *rest: Any) -> Any:
            mask, width = rest[place], pointers.get_element_ty().primitive_bitwidth // 8
            addresses = np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
            self._sets[place].update((addresses[:, None] + np.arange(width, dtype=addresses.dtype)).ravel().tolist())
            return access(builder, pointers, *rest)

        return noted

    def take(self) -> list[Run]:
        runs, self.runs = self.runs, []
        return runs


def steps_that_ran(tiny: TinyEngine, watch: Watch) -> dict[str, list[Run]]:
    """Run the steps above on sequences of the same lengths."""
    tiny.add("a", random_tokens(1, PROMPT.prompt_len, 96))
    tiny.step(a=2)  # tries which kernels can be launched
    tiny.step(a=9)
    tiny.engine.remove_sequence("a")  # type: ignore[arg-type]
    watch.take()
    tiny.add("a", random_tokens(1, PROMPT.prompt_len, 96))
    tiny.step(a=PROMPT.prompt_len)
    ran = {PROMPT.name: watch.take()}
    tiny.add("b", random_tokens(2, PROMPT.prompt_len, 96))
    tiny.step(b=PROMPT.prompt_len)
    tiny.step(a=1, b=1)
    watch.take()
    tiny.add("c", random_tokens(3, MIXED.prompt_len, 96))
    tiny.step(a=1, b=1, c=MIXED.prompt_len)
    ran[MIXED.name] = watch.take()
    tiny.step(a=1, b=1, c=1)
    watch.take()
    tiny.step(a=1, b=1, c=1)
    ran[DECODE.name] = watch.take()
    return ran


@pytest.mark.parametrize("cache", [None, FP8])
def test_a_counted_step_is_the_one_that_runs(cache: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    form = replace(TOY_MODEL, cache=cache)
    counted = count_steps(form, (PROMPT, MIXED, DECODE))
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    watch = Watch(monkeypatch)
    decoder = Decoder(form.config, load_weights(None, form.config, torch.float32))
    tiny = TinyEngine(decoder, attention=TRITON, capture=capture_nothing, cache_dtype=cache)
    for name, runs in steps_that_ran(tiny, watch).items():
        ours = {run.name for run in runs}
        assert [run.name for run in runs] == [one.name for one in counted[name].launches if one.name in ours]
        assert [run.counted for run in runs] == [run.touched for run in runs], runs

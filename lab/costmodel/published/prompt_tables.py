"""Llama-2-70B and BLOOM-176B on A100-80GB and H100: times of whole prompts and of tokens (Splitwise, ISCA 2024)."""

from functools import cache
from itertools import groupby

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import hardware, pcie_link
from alignedserve.costmodel.linear import Sample, fit_linear
from alignedserve.costmodel.model import AttentionKernel, CostModel
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.published.files import rows_of

_MS = 1e-3
_Key = tuple[str, str, int]  # model, hardware, degree of tensor parallelism


@cache
def prompt_table_model(model: str, machine: str, tensor_parallel: int, kernel: AttentionKernel) -> CostModel:
    """Return the linear model nearest to the table. Raises ConfigError listing what was measured.

    All contexts of a row are equal, so that it holds for either kernel.
    """
    shape = model_shape(model)
    samples = table_samples(model, machine, tensor_parallel)
    swap_token_s = shape.kv_token_bytes / tensor_parallel / pcie_link(hardware(machine)).bytes_per_s
    fit = fit_linear(samples, swap_token_s)
    return fit if kernel is AttentionKernel.LOAD_BALANCED else _ChargedByKernel(fit, kernel)


class _ChargedByKernel:
    def __init__(self, balanced: CostModel, kernel: AttentionKernel) -> None:
        self._balanced, self._kernel = balanced, kernel
        self.swap_s = balanced.swap_s

    def iteration_s(self, work: IterationWork) -> float:
        charged = work.copy()
        charged.decode_context_len = self._kernel.num_charged_keys(work)
        return self._balanced.iteration_s(charged)


def table_samples(model: str, machine: str, tensor_parallel: int) -> list[Sample]:
    """Return a prefill and a decode iteration of every row. Raises ConfigError listing what was measured."""
    samples = _samples()
    if (model, machine, tensor_parallel) not in samples:
        known = ", ".join(f"{name} on {where} x {degree}" for name, where, degree in samples)
        raise ConfigError(f"published splitwise has no {model!r} on {machine} x {tensor_parallel}; it has {known}.")
    return samples[model, machine, tensor_parallel]


@cache
def _samples() -> dict[_Key, list[Sample]]:
    table = sorted(rows_of("splitwise_perf.csv"), key=_key)
    return {key: _samples_of(list(rows)) for key, rows in groupby(table, _key)}


def _key(row: dict[str, str]) -> _Key:
    return row["model"], row["hardware"], int(row["tensor_parallel"])


def _samples_of(rows: list[dict[str, str]]) -> list[Sample]:
    prompt_ms = {(row["prompt_size"], int(row["batch_size"])): float(row["prompt_time_ms"]) for row in rows}
    samples = []
    for row in rows:
        size, batch = row["prompt_size"], int(row["batch_size"])
        if float(row["prompt_time_ms"]) < prompt_ms.get((size, batch // 2), 0.0):
            continue
        samples.append(Sample(_prefill(int(size), batch), float(row["prompt_time_ms"]) * _MS))
        middle = int(size) + int(row["token_size"]) // 2  # the table has the mean time of a token
        samples.append(Sample(_decode(middle, batch), float(row["token_time_ms"]) * _MS))
    return samples


def _prefill(prompt_len: int, batch_size: int) -> IterationWork:
    work = IterationWork()
    for _ in range(batch_size):
        work.add_chunk(prompt_len, 0, is_last=True)
    return work


def _decode(context_len: int, batch_size: int) -> IterationWork:
    work = IterationWork()
    work.add_decodes(batch_size, batch_size * context_len, 0)  # no maximum: the sum alone is to be fitted
    return work

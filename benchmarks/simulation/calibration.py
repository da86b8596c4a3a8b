"""Fits a roofline's calibration to what others have measured of small matrices and of chunks, and says how near it is.

    python -m benchmarks.simulation.calibration

Nothing runs on an accelerator: layers and attention are Vidur's tables, whole prompts in chunks Sarathi-Serve's
(lab/costmodel/published). The fit is of Llama-2-7B's and 13B's layers on an A100 and an H100, and of attention
on an A100; Llama-2-70B's layers and the whole prompts, of Yi-34B on two A100, are held out.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.model_shapes import ModelShape, model_shape
from alignedserve.costmodel.roofline import CALIBRATIONS, PLAIN, Calibration, RooflineModel
from alignedserve.costmodel.work import IterationWork
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from lab.costmodel.published.files import rows_of

_MS = 1e-3
_FITTED = ("llama-2-7b", "llama-2-13b")
_PEAK = hardware("a100-80g").peak_flops("float16")
_PAIR_FLOPS = 4 * 32 * 128  # of a layer with 32 heads of 128, as attention was measured
# config.json of 01-ai/Yi-34B
YI_34B = ModelShape("yi-34b", 60, 7168, 56, 8, 128, 20480, 64000, is_gated=True, ties_embeddings=False)


class Error(NamedTuple):
    """Distance of a model from measured times: of |model / measured - 1| median and p90, and the median with sign."""

    num: int
    median: float
    p90: float
    bias: float


def error_of(ratios: Iterable[float]) -> Error:
    apart = np.array(list(ratios)) - 1.0
    sizes = np.abs(apart)
    return Error(len(apart), *(round(float(one), 3) for one in (median(sizes), np.quantile(sizes, 0.9), median(apart))))


# --- layers


class Layer(NamedTuple):
    """A layer that was measured, without attention."""

    model: str
    machine: str
    num_tokens: int
    seconds: float


def layers() -> list[Layer]:
    alone = [{**row, "model": "llama-2-7b"} for row in rows_of("llama_2_7b_layer.csv") if row["tensor_parallel"] == "1"]
    rows = [row for row in (*alone, *rows_of("layers_by_tokens.csv")) if int(row["num_tokens"]) <= 2048]
    return [Layer(row["model"], row["hardware"], int(row["num_tokens"]), float(row["layer_ms"]) * _MS) for row in rows]


def layer_ratios(found: Iterable[Layer], calibration: Calibration) -> list[float]:
    """Return the model's seconds of layers by the measured ones."""
    ratios = []
    for layer in found:
        shape = model_shape(layer.model)
        costs = RooflineModel(shape, hardware(layer.machine), calibration=calibration)
        ratios.append(costs.layers_s(layer.num_tokens) / shape.num_layers / layer.seconds)
    return ratios


def fitted_corner(found: Sequence[Layer]) -> float:
    of_fit = [layer for layer in found if layer.model in _FITTED]

    def badness(corner: float) -> float:
        return float(np.square(np.array(layer_ratios(of_fit, Calibration(corner=corner))) - 1.0).mean())

    return min((number / 10 for number in range(11, 60)), key=badness)


# --- attention of chunks


def chunks() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the tokens, cached tokens and seconds of every chunk [chunks, 3]."""
    rows = rows_of("chunk_attention.csv")
    return np.array([[float(row["num_tokens"]), float(row["num_cached"]), float(row["ms"]) * _MS] for row in rows])


def chunk_ratios(calibration: Calibration) -> list[float]:
    """Return the model's seconds of attention of chunks by the measured ones."""
    share = calibration.chunk_flops or 0.5
    ratios = []
    for num_tokens, num_cached, seconds in chunks().tolist():
        work = IterationWork()
        work.add_chunk(int(num_tokens), int(num_cached), is_last=False)
        ratios.append(_PAIR_FLOPS * calibration.charged_pairs(work) / (_PEAK * share) / seconds)
    return ratios


def fitted_chunks() -> tuple[float, float, float]:
    num_tokens, num_cached, seconds = chunks().T
    keys = num_tokens + num_cached

    def scaled(more: tuple[int, int]) -> tuple[float, float]:
        """Return the best seconds for each pair, and the error."""
        relative = (num_tokens + more[0]) * (keys + more[1]) / seconds
        pair_s = float(relative.sum() / np.square(relative).sum())
        return pair_s, float(np.square(pair_s * relative - 1.0).mean())

    best = min(product(range(0, 400, 4), range(0, 1600, 20)), key=lambda more: scaled(more)[1])
    return _PAIR_FLOPS / scaled(best)[0] / _PEAK, float(best[0]), float(best[1])


# --- whole prompts in chunks


def prompt_s(costs: RooflineModel, num_tokens: int, chunk: int) -> float:
    """Return the seconds of a prompt in chunks of so many tokens."""
    seconds = 0.0
    for num_cached in range(0, num_tokens, chunk):
        work, length = IterationWork(), min(chunk, num_tokens - num_cached)
        work.add_chunk(length, num_cached, is_last=num_cached + length == num_tokens)
        seconds += costs.iteration_s(work)
    return seconds


def overheads(calibration: Calibration) -> list[dict[str, float]]:
    costs = RooflineModel(YI_34B, hardware("a100-80g"), tensor_parallel=2, calibration=calibration)
    measured = {(int(row["num_tokens"]), int(row["chunk"])): float(row["ms"]) for row in rows_of("chunked_prefill.csv")}
    found = []
    for (num_tokens, chunk), milliseconds in measured.items():
        if chunk < 2048:
            by_model = prompt_s(costs, num_tokens, chunk) / prompt_s(costs, num_tokens, 2048)
            found.append(
                {
                    "num_tokens": num_tokens,
                    "chunk": chunk,
                    "measured": round(milliseconds / measured[num_tokens, 2048] - 1.0, 3),
                    "by_model": round(by_model - 1.0, 3),
                    "seconds_by_measured": round(1e3 * prompt_s(costs, num_tokens, chunk) / milliseconds, 3),
                }
            )
    return found


def main() -> None:
    """Fit, compare, print and record."""
    options = parser_of(__doc__, name="simulation/calibration").parse_args()
    found, models = layers(), {"plain": PLAIN, "calibrated": CALIBRATIONS["calibrated"]}
    share, queries, keys = fitted_chunks()
    figures: dict[str, Any] = {
        "fitted": {
            "corner": fitted_corner(found),
            "chunk_flops": round(share, 3),
            "more_queries": queries,
            "more_keys": keys,
        }
    }
    for name, calibration in models.items():
        by_model = {
            model: error_of(layer_ratios([one for one in found if one.model == model], calibration))._asdict()
            for model in dict.fromkeys(one.model for one in found)
        }
        small = [one for one in found if 96 <= one.num_tokens <= 256]
        figures[name] = {
            "layers": by_model,
            "layers_of_96_to_256": error_of(layer_ratios(small, calibration))._asdict(),
            "chunk_attention": error_of(chunk_ratios(calibration))._asdict(),
            "prompts_in_chunks": overheads(calibration),
        }
    for name, value in figures.items():
        print(name, value)
    print(write_result(options.name, figures))


if __name__ == "__main__":
    main()

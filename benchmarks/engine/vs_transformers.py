"""Engine against transformers `generate`: OPT 125M shape, random weights, float32, 64 x (32 prompt + 64 output).

Both run the same weights, greedily, on the same threads; the rounds alternate in one process. transformers gets a
static batch of 64 with its default (dynamic) cache and with its static cache; its better median counts.

    python -m benchmarks.engine.vs_transformers [--rounds 5]  # target: a ratio of at least 1.0
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.throughput import WorkloadRun, make_engine
from benchmarks.engine.workloads import RequestGroup
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.turns import seconds_by_turns
from lab.profiling.model_loading import load_decoder

BATCH, PROMPT_LEN, OUTPUT_LEN = 64, 32, 64


def main() -> None:
    """Run the comparison, print it and write it."""
    parser = parser_of(__doc__, rounds=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        reference: Any = OPTForCausalLM(OPTConfig(activation_function="relu"))
        reference.eval()
        reference.save_pretrained(folder)
        contenders = make_contenders(reference, folder)
    seconds = seconds_by_turns(arguments.rounds, *contenders.values())
    report = make_report(dict(zip(contenders, seconds, strict=True)))
    print(json.dumps(report, indent=2))
    write_result("engine/engine_vs_transformers", report)


def make_contenders(reference: Any, folder: str) -> dict[str, Callable[[], None]]:
    spec = EngineBenchmarkSpec(model=folder, groups=(RequestGroup(BATCH, PROMPT_LEN, OUTPUT_LEN),))
    engine = make_engine(load_decoder(folder, "float32"), spec)
    prompts = torch.randint(4, reference.config.vocab_size, (BATCH, PROMPT_LEN))

    def generate(**options: str) -> None:
        generated = reference.generate(
            prompts, max_new_tokens=OUTPUT_LEN, min_new_tokens=OUTPUT_LEN, do_sample=False, eos_token_id=None, **options
        )
        assert generated.shape == (BATCH, PROMPT_LEN + OUTPUT_LEN), "transformers stopped early"

    return {
        "alignedserve": lambda: WorkloadRun(engine, spec, spec.groups).run(),
        "transformers_dynamic_cache": generate,
        "transformers_static_cache": lambda: generate(cache_implementation="static"),
    }


def make_report(seconds: dict[str, list[float]]) -> dict[str, object]:
    tokens_per_s = {name: BATCH * OUTPUT_LEN / statistics.median(values) for name, values in seconds.items()}
    best = max(value for name, value in tokens_per_s.items() if name != "alignedserve")
    return {
        "workload": f"opt-125m shape, float32, {BATCH}x{PROMPT_LEN}:{OUTPUT_LEN}, greedy",
        "output_tokens_per_s": tokens_per_s,
        "ratio_to_best_transformers": tokens_per_s["alignedserve"] / best,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()

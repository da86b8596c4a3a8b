"""OpenVINO GenAI's side of `benchmarks.compare`. Runs in an environment of its own, without AlignedServe.

    python openvino_contender.py FOLDER SHAPE DTYPE WORKLOAD [exact]

Exports the shape with random weights into FOLDER where it is not there yet, then plays the workload (JSON: a list of
[prompt_len, output_len]) once for every line on stdin, and answers each with a line of JSON. `exact`: keys and values
are kept in DTYPE; by default OpenVINO rounds them to 8 bits.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
CACHE_TOKENS_ROOM = 1.1


def main() -> None:
    """Export, load, then one run per line."""
    folder, shape, dtype, workload, *kind = sys.argv[1:]
    exported = Path(folder) / shape.replace("/", "_")
    if not (exported / "openvino_model.xml").exists():
        export(json.loads(shape_file(folder, shape).read_text()), exported)
    lengths = json.loads(workload)
    pipeline = make_pipeline(exported, dtype, lengths, is_exact=kind == ["exact"])
    play(pipeline, [(8, 2)])
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        play(pipeline, lengths)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


def shape_file(folder: str, shape: str) -> Path:
    """Return the path of the shape's config.json, written by `benchmarks.compare`."""
    return Path(folder) / f"{shape}.json"


def export(config: dict[str, Any], target: Path) -> None:
    """Export random weights of this config.json, converted in float32; OpenVINO chooses its precision when it loads."""
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = target.with_name(f"{target.name}_transformers")
    chosen: Any = AutoModelForCausalLM
    model = chosen.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(plain)
    OVModelForCausalLM.from_pretrained(
        plain, export=True, compile=False, load_in_8bit=False, local_files_only=True
    ).save_pretrained(target)


def make_pipeline(folder: Path, dtype: str, lengths: list[tuple[int, int]], *, is_exact: bool) -> Any:
    """Make a pipeline of continuous batching with capacity for everything at once; all else as OpenVINO has it."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 256
    scheduler.enable_prefix_caching = False
    scheduler.num_kv_blocks = int(CACHE_TOKENS_ROOM * sum(prompt + output + 32 for prompt, output in lengths) / 32) + 16
    properties = {"INFERENCE_PRECISION_HINT": PRECISIONS[dtype]}
    if is_exact:
        properties["KV_CACHE_PRECISION"] = PRECISIONS[dtype]
    return openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)


def play(pipeline: Any, lengths: list[tuple[int, int]]) -> None:
    """Generate all requests at once, greedily, each to its full length."""
    import numpy as np
    import openvino
    import openvino_genai

    generator = np.random.default_rng(0)
    prompts, configs = [], []
    for prompt_len, output_len in lengths:
        prompts.append(openvino.Tensor(generator.integers(4, 30000, (1, prompt_len))))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos, config.do_sample = True, False
        configs.append(config)
    results = pipeline.generate(prompts, configs)
    counts = [len(result.m_generation_ids[0]) for result in results]
    assert sorted(counts) == sorted(output_len for _, output_len in lengths), "OpenVINO stopped early"


if __name__ == "__main__":
    main()

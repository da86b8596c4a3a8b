"""Engine against transformers `generate` for kinds of layers: shapes of some 100M parameters, random weights.

Sinks and experts (gpt-oss), latents and experts (DeepSeek V3), caps and windows (Gemma 2), chunks and experts (Llama
4), squares (Nemotron), streams and embeddings of layers (Gemma 3n), shared keys and heads of two sizes (Gemma 4). Both
run the same weights, greedily, on the same threads, in turns; transformers a static batch. The best round of each
counts, with one thread by seconds of the process. Layers with a state: `engine.states`.

    python -m benchmarks.engine.kinds_vs_transformers [--dtype bfloat16] # targets: 1.4 times at 1 stream, 4 times at 16
    python -m benchmarks.engine.kinds_vs_transformers --kinds gemma4      # those of other kinds are kept
"""

import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import transformers

from alignedserve.runtime.device.dtypes import torch_dtype
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.throughput import WorkloadRun, make_engine
from benchmarks.engine.workloads import RequestGroup
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.turns import seconds_by_turns
from lab.profiling.model_loading import load_decoder

PROMPT_LEN, OUTPUT_LEN = 64, 32
STREAMS = (1, 16)
_SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_EXPERTS = {"intermediate_size": 448, "num_experts_per_tok": 2, "num_local_experts": 8}
_SHORT = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 32000, "sliding_window": 64}
_TYPES = [*["sliding_attention"] * 3, "full_attention"] * 2
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOssConfig", {**_SIZES, **_EXPERTS, "head_dim": 64, "sliding_window": 64}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SIZES,
            "num_key_value_heads": 10,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 448,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma2": ("Gemma2Config", {**_SIZES, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64}),
    "llama4_text": (
        "Llama4TextConfig",
        {**_SIZES, **_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 1792, "head_dim": 64}
        | {"attention_chunk_size": 64},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {**_SIZES, **_SHORT, "head_dim": 64, "laurel_rank": 32, "num_kv_shared_layers": 4, "layer_types": _TYPES}
        | {"activation_sparsity_pattern": [0.95, 0.95, *[0.0] * 6]},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_SIZES, **_SHORT, "head_dim": 64, "global_head_dim": 128, "num_kv_shared_layers": 4, "layer_types": _TYPES},
    ),
    "nemotron": ("NemotronConfig", {**_SIZES, "intermediate_size": 2560}),
}


def main() -> None:
    """Run the comparisons, print them and write them."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = f"engine/kinds_vs_transformers_{arguments.dtype}_{arguments.threads}"
    kept = (read_figures(record) or {}).get("kinds", {})
    load = psutil.getloadavg()[0]
    figures: dict[str, Any] = {
        "workload": f"{PROMPT_LEN}:{OUTPUT_LEN}, {arguments.dtype}, greedy",
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "load_before": load,
        "kinds": kept | {name: compared(name, arguments.rounds, arguments.dtype) for name in arguments.kinds},
    }
    print(json.dumps(figures, indent=2))
    write_result(record, figures)


def compared(name: str, num_rounds: int, dtype: str) -> dict[str, Any]:
    """Return a kind's tokens per second, and how many times as fast the engine is, by streams."""
    class_name, sizes = KINDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**sizes)
    auto: Any = transformers.AutoModelForCausalLM
    reference = auto.from_config(config, dtype=torch_dtype(dtype)).eval()
    report: dict[str, Any] = {"parameters": sum(one.numel() for one in reference.parameters())}
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        decoder = load_decoder(folder, dtype)
    for streams in STREAMS:
        groups = (RequestGroup(streams, PROMPT_LEN, OUTPUT_LEN),)
        spec = EngineBenchmarkSpec(model=name, groups=groups, dtype=dtype)
        engine = make_engine(decoder, spec)
        ours = _engine_run(engine, spec)
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        seconds = seconds_by_turns(num_rounds, ours, _reference_run(reference, streams), clock=clock)
        own, theirs = (streams * OUTPUT_LEN / min(each) for each in seconds)
        report[f"{streams}"] = {"alignedserve": own, "transformers": theirs, "times": own / theirs}
    return report


def _engine_run(engine: Any, spec: EngineBenchmarkSpec) -> Callable[[], None]:
    return lambda: WorkloadRun(engine, spec, spec.groups).run()


def _reference_run(reference: Any, streams: int) -> Callable[[], None]:
    prompts = torch.randint(4, reference.config.vocab_size, (streams, PROMPT_LEN))
    options = {"max_new_tokens": OUTPUT_LEN, "min_new_tokens": OUTPUT_LEN, "do_sample": False, "eos_token_id": None}
    return lambda: reference.generate(prompts, attention_mask=torch.ones_like(prompts), **options)


if __name__ == "__main__":
    main()

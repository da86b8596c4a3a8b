"""Greedy answers to 200 mixed requests, by vLLM with or without our scheduler: FOLDER SCHEDULER SEED -> JSON lines.

Memory is short, so that requests are preempted; a third begin alike; a step has 256 tokens at most.
"""

import json
import random
import sys

NUM_REQUESTS = 200


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    folder, scheduler, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    own = {} if scheduler == "vllm" else {"scheduler_cls": scheduler}
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=1024, scheduling_policy="priority",
        max_num_batched_tokens=256, max_num_seqs=48, num_gpu_blocks_override=160, **own,
    )  # fmt: skip
    rng = random.Random(7)
    shared = [rng.randrange(4, 512) for _ in range(96)]
    requests = []
    for number in range(NUM_REQUESTS):
        is_document = number % 2 == 1
        prompt = [rng.randrange(4, 512) for _ in range(rng.randint(200, 600) if is_document else rng.randint(5, 200))]
        prompt = shared + prompt if number % 3 == 0 else prompt
        terms = {"service_class": "document"} if is_document else {"slo_ttft_ms": 500, "slo_tpot_ms": 50}
        params = SamplingParams(
            max_tokens=rng.randint(4, 48), temperature=0.0, ignore_eos=True, extra_args=terms if own else None
        )
        requests.append((number, TokensPrompt(prompt_token_ids=prompt), params))
    random.Random(seed).shuffle(requests)
    outputs = engine.generate(
        [prompt for _, prompt, _ in requests], [params for *_, params in requests], use_tqdm=False
    )
    answers = {
        number: list(output.outputs[0].token_ids) for (number, *_), output in zip(requests, outputs, strict=True)
    }
    sys.__stdout__.write("ANSWERS " + json.dumps([answers[number] for number in range(NUM_REQUESTS)]) + "\n")


if __name__ == "__main__":
    main()

"""A hybrid model's answers move between two workers before they have ended: python -m benchmarks.cluster.hybrid_move.

A small model of random weights with layers of attention and layers with a state, served by elastic workers in this
process, over real sockets and shared memory. One worker answers; a second comes, and answers that are too slow for
their objective move there with their caches and states. Each must be what one engine says that moves nothing.

    python -m benchmarks.cluster.hybrid_move --kind delta # the gated delta rule, as Qwen3-Next has; mamba2: Granite 4 H
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from msgspec.structs import replace

from alignedserve.config.sections import Topology
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.runtime.model.hf_config import read_model_config
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.models.tiny_hybrids import DELTA, MAMBA2
from tests.support.models.tiny_llama import TINY_LLAMA

_SIZES = {**TINY_LLAMA, "num_hidden_layers": 3}
KINDS = {"mamba2": MAMBA2, "delta": DELTA}
_BLOCK_SIZE = 64
_PROMPTS = [[3 + (7 * number + place) % 120 for place in range(30 + 9 * number)] for number in range(6)]


async def watch(answer: Answer) -> list[tuple[str, int]]:
    """Return the workers that an answer's tokens came from, and how many each had given when the next took over."""
    seen: list[tuple[str, int]] = []
    while not answer.done.is_set():
        if answer.last_worker is not None:
            if not seen or seen[-1][0] != answer.last_worker:
                seen.append((answer.last_worker, 0))
            seen[-1] = (answer.last_worker, len(answer.token_ids))
        await asyncio.sleep(0.0005)
    return [*seen[:-1], (seen[-1][0], len(answer.token_ids))]


async def move(cluster: RoomCluster, num_tokens: int) -> int:
    """Print where each answer was; return how many moved and are what one engine says."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    answers = [cluster.gateway.submit(prompt, sampling, Slo(tpot_s=1e-6)) for prompt in _PROMPTS]
    watched = [asyncio.ensure_future(watch(answer)) for answer in answers]
    await answers[0].first_token.wait()
    await cluster.start_decode("decode-1")
    places = await asyncio.gather(*watched)
    layout, num_moved = cluster.engines["decode-0"].layout, 0
    print(f"states: {layout.context_bytes / 1024:.0f} KiB of each answer, in {layout.state_blocks} blocks of its own")
    for prompt, answer, seen in zip(_PROMPTS, answers, places, strict=True):
        is_same = answer.token_ids == cluster.reference(prompt, sampling)
        way = ", ".join(f"at {worker} up to token {count}" for worker, count in seen)
        print(f"prompt of {len(prompt)} tokens: {way}; the tokens of an answer that stayed: {is_same}")
        num_moved += is_same and len(seen) > 1 and answer.num_repeats == 0
    status = await cluster.gateway.idle()
    print(f"{num_moved} answers moved; {status.num_handoffs_verified} handoffs, each block verified")
    return num_moved


async def serve(kind: str, num_tokens: int) -> int:
    """Serve the model and move its answers."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        config = small_config(model, topology=Topology.ELASTIC)
        (model / "config.json").write_text(json.dumps(_SIZES | KINDS[kind]))
        block = read_model_config(model).block_layout(_BLOCK_SIZE, "float32").block_bytes
        config = replace(
            config,
            engine=replace(config.engine, block_size=_BLOCK_SIZE),
            prefill=replace(config.prefill, candidate_buffer_bytes=128 * block),
            decode=replace(config.decode, kv_cache_bytes=256 * block),
        )
        async with running(config, Path(folder)) as cluster:
            return await move(cluster, num_tokens)


def main() -> None:
    """Run it; fails where none has moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="mamba2", choices=list(KINDS))
    parser.add_argument("--tokens", type=int, default=250, help="of each answer")
    arguments = parser.parse_args()
    if not asyncio.run(serve(arguments.kind, arguments.tokens)):
        raise SystemExit("no answer has moved")


if __name__ == "__main__":
    main()

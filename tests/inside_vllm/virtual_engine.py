"""vLLM's real scheduler, driven by a virtual clock: steps take what a formula says, and every token is 7.

Its queues, its allocation and its asynchronous scheduling are vLLM's own; no model runs. So a minute of load takes
seconds, and gives the same figures on a busy machine.

    python -m tests.inside_vllm.virtual_engine FOLDER CLASS --rate 2.5 --documents 64 --seconds 200

prints what chats hold beside documents. CLASS: alignedserve_vllm.AlignedScheduler, or vLLM's own,
vllm.v1.core.sched.async_scheduler.AsyncScheduler. FOLDER: of a model, by tests/inside_vllm/tiny_model.py.
"""

import argparse
import heapq
import importlib
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.torch_utils import torch as _torch
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
HANDOFF_S = 0.004  # from the end of a step to the start of one that was not planned before
WALL_S = 1e9  # the wall clock when the virtual one begins


def step_s(output: Any, requests: dict[str, Any]) -> float:
    """Return the seconds of a step: 125M OPT on two cores, about."""
    context = sum(requests[request_id].num_computed_tokens for request_id in output.num_scheduled_tokens)
    return 0.015 + 0.0009 * output.total_num_scheduled_tokens + 5e-7 * context


def make_scheduler(scheduler_class: Any, folder: str, *, num_blocks: int = 1400, **settings: Any) -> Any:
    """Build a scheduler of this class as vLLM does, for the model in the folder."""
    model = ModelConfig(model=folder, tokenizer=folder, dtype="float32", max_model_len=2048)
    scheduler = SchedulerConfig(
        **{
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048,
            "max_model_len": 2048,
            "is_encoder_decoder": False,
            "policy": "priority",
            "async_scheduling": True,
            "enable_chunked_prefill": True,
            **settings,
        }
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=0.9, enable_prefix_caching=True)
    config = VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=12, head_size=64, dtype=_torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
    )
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


@dataclass
class Sent:
    """A request with the times of its tokens."""

    request: Request
    sent_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(len(self.token_s) - 1, 1)


class VirtualEngine:
    """Schedules a step ahead of the one that runs, as vLLM's engine does."""

    def __init__(self, scheduler: Any, duration_of: Callable[[Any, dict[str, Any]], float] = step_s) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.sent: dict[str, Sent] = {}
        self.then: dict[str, Callable[[], None]] = {}
        self.num_steps = 0
        self.schedule_s: list[float] = []  # real seconds
        self._duration_of = duration_of
        self._flight: deque[tuple[Any, float]] = deque()
        self._arrivals: list[tuple[float, int, Any]] = []
        self._count = itertools.count()
        self._free_s = 0.0
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    def send(self, at_s: float, request_id: str, prompt: list[int], num_tokens: int, **fields: Any) -> None:
        """Let a request come. `fields`: priority, xargs, then: called when it has ended."""
        heapq.heappush(self._arrivals, (at_s, next(self._count), (request_id, prompt, num_tokens, fields)))

    def run(self, until_s: float) -> None:
        """Go on until that time, or until nothing is left to do."""
        with self._clock():
            while self.now < until_s and self._advance():
                pass

    def _advance(self) -> bool:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            self._add(*heapq.heappop(self._arrivals)[2])
        if len(self._flight) < 2 and self.scheduler.has_requests():
            began_s = time.perf_counter()
            output = self.scheduler.schedule()
            self.schedule_s.append(time.perf_counter() - began_s)
            if output.total_num_scheduled_tokens:
                self.num_steps += 1
                self._free_s = max(self._free_s, self.now + HANDOFF_S) + self._duration_of(
                    output, self.scheduler.requests
                )
                self._flight.append((output, self._free_s))
                return True
        if self._flight and not (
            self._arrivals and len(self._flight) < 2 and self._arrivals[0][0] < self._flight[0][1]
        ):
            output, self.now = self._flight.popleft()
            self._complete(output)
            return True
        if self._arrivals:
            self.now = max(self.now, self._arrivals[0][0])
            return True
        return False

    def _add(self, request_id: str, prompt: list[int], num_tokens: int, fields: dict[str, Any]) -> None:
        xargs = fields.get("xargs")
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, extra_args=xargs)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=WALL_S + self.now,
            priority=fields.get("priority", 0),
            block_hasher=self._hasher,
        )
        self.sent[request_id] = Sent(request, self.now)
        if fields.get("then"):
            self.then[request_id] = fields["then"]
        self.scheduler.add_request(request)

    def _complete(self, output: Any) -> None:
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        generates = [self._samples(output, request_id, requests) for request_id in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
            sampled_token_ids=[[7] if samples else [] for samples in generates],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.sent[each.request_id].token_s += [self.now] * len(each.new_token_ids)
                if each.finish_reason is not None and each.request_id in self.then:
                    self.then.pop(each.request_id)()

    def _samples(self, output: Any, request_id: str, requests: dict[str, Any]) -> bool:
        request = requests.get(request_id)
        if request is None:
            return False
        for new in output.scheduled_new_reqs:
            if new.req_id == request_id:
                return bool(
                    new.num_computed_tokens + output.num_scheduled_tokens[request_id] >= request.num_prompt_tokens
                )
        cached = output.scheduled_cached_reqs
        computed = cached.num_computed_tokens[cached.req_ids.index(request_id)]
        return bool(computed + output.num_scheduled_tokens[request_id] >= request.num_tokens)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        monotonic = mock.patch("time.monotonic", side_effect=lambda: self.now)
        with monotonic, mock.patch("time.time", side_effect=lambda: WALL_S + self.now):
            yield


def hybrid_load(
    engine: VirtualEngine,
    *,
    rate: float,
    num_documents: int,
    seconds: float,
    xargs: dict[str, Any] | None,
    ttft_s: float = 1.0,
    tpot_s: float = 0.3,
    warm_s: float = 30.0,
    seed: int = 1,
) -> dict[str, float]:
    """Chats at a rate beside so many documents outstanding; return what chats hold and documents get."""
    rng, documents, counts = random.Random(seed), random.Random(seed + 1000), itertools.count()

    def next_document() -> None:
        number = next(counts)
        prompt = [documents.randrange(10, 50000) for _ in range(documents.randint(512, 1024))]
        engine.send(engine.now, f"d{number}", prompt, documents.randint(32, 128), priority=10, then=next_document)

    for _ in range(num_documents):
        next_document()
    at_s, number = warm_s, 0
    while at_s < warm_s + seconds:
        num_in, num_out = (
            min(1000, max(8, int(rng.lognormvariate(4.6, 0.9)))),
            min(256, max(8, int(rng.lognormvariate(4.1, 0.7)))),
        )
        engine.send(at_s, f"c{number}", [rng.randrange(10, 50000) for _ in range(num_in)], num_out, xargs=xargs)
        at_s, number = at_s + rng.expovariate(rate), number + 1
    engine.run(warm_s + seconds + 30.0)
    chats = [sent for name, sent in engine.sent.items() if name.startswith("c") and sent.request.is_finished()]
    ended = [sent for name, sent in engine.sent.items() if name.startswith("d") and sent.request.is_finished()]
    in_time = [sent for sent in ended if warm_s <= sent.token_s[-1] <= warm_s + seconds]
    return {
        "chats": number,
        "held": sum(sent.ttft_s <= ttft_s and sent.tpot_s <= tpot_s for sent in chats) / max(number, 1),
        "ttft_p50": statistics.median(sent.ttft_s for sent in chats) if chats else 0.0,
        "ttft_max": max((sent.ttft_s for sent in chats), default=0.0),
        "tpot_p50": statistics.median(sent.tpot_s for sent in chats) if chats else 0.0,
        "tpot_max": max((sent.tpot_s for sent in chats), default=0.0),
        "documents_s": len(in_time) / seconds,
        "steps": engine.num_steps,
        "schedule_ms": 1e3 * statistics.median(engine.schedule_s),
    }


def main() -> None:
    """Run one load and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("scheduler")
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.3)
    arguments = parser.parse_args()
    module, _, name = arguments.scheduler.rpartition(".")
    engine = VirtualEngine(make_scheduler(getattr(importlib.import_module(module), name), arguments.folder))
    figures = hybrid_load(
        engine,
        rate=arguments.rate,
        num_documents=arguments.documents,
        seconds=arguments.seconds,
        xargs={"slo_ttft_ms": 1000 * arguments.ttft, "slo_tpot_ms": 1000 * arguments.tpot},
        ttft_s=arguments.ttft,
        tpot_s=arguments.tpot,
    )
    print(arguments.scheduler, {name: round(value, 3) for name, value in figures.items()})


if __name__ == "__main__":
    main()

"""Chat beside a deep backlog of documents on one GPU, live: one elastic worker of an 8B shape, its router, no Ray.

Three phases on the same worker: chat alone, documents alone, and chat beside the documents that go on. Chat comes at
random (Poisson), the same requests in both phases; of documents more wait than run at any time. The first seconds of a
phase do not count: until a worker's memory is full of documents it computes more prompts than it does later. Of
further policies the last phase alone is run, on workers of their own.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from alignedserve.core.errors import AlignedServeError
from alignedserve.core.request import Slo
from alignedserve.messages.gateways import ClusterStatus
from benchmarks.gpu.part_list import DEFAULT_POLICIES
from benchmarks.gpu.served_worker import Serving, WorkerState, plan_worker, serving, write_model
from benchmarks.gpu.timed_gateway import SentRequest, TimedGateway
from lab.profiling.shapes import SHAPES

OnMeasured = Callable[[dict[str, Any]], None]
CHAT, DOCUMENTS, BOTH = "chat alone", "documents alone", "chat beside documents"

_SMALLER_CACHE = 40 << 30  # for a second try, where a worker ended with what `serve` chooses
_LOOK_S = 0.02  # between looks at which documents have ended
_IDLE_S = 60.0
_RESERVE_S = 12.0  # of the time limit, for stopping and writing


@dataclass(frozen=True, slots=True)
class Load:
    """The model and what is sent to it. Lengths are in tokens, drawn evenly between two bounds."""

    shape: str = "llama-3-8b"
    dtype: str = "bfloat16"
    max_context_len: int = 16_384
    chats_per_s: float = 10.0
    chat_prompts: tuple[int, int] = (200, 1500)
    chat_answers: tuple[int, int] = (100, 200)
    ttft_s: float = 1.0
    tpot_s: float = 0.05
    num_documents: int = 500  # that are open at any time
    document_prompts: tuple[int, int] = (1000, 4000)
    document_answers: tuple[int, int] = (200, 400)
    lead_s: float = 5.0  # of chat, at the start of a phase, which does not count
    fill_s: float = 12.0  # of documents, likewise
    tail_s: float = 10.0  # at most, for chats of the phase to end; documents go on
    chat_alone_s: float = 22.0
    documents_alone_s: float = 30.0
    both_s: float = 40.0

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s)

    def within(self, seconds: float) -> "Load":
        """Return the load with phases that take no longer in all."""
        leads_s = 2 * self.lead_s + self.fill_s
        counted_s = self.chat_alone_s + self.documents_alone_s + self.both_s - leads_s
        share = min(1.0, max((seconds - leads_s - 2 * self.tail_s) / counted_s, 0.1))
        return replace(
            self,
            chat_alone_s=self.lead_s + share * (self.chat_alone_s - self.lead_s),
            documents_alone_s=self.fill_s + share * (self.documents_alone_s - self.fill_s),
            both_s=self.lead_s + share * (self.both_s - self.lead_s),
        )


TOY = Load(
    shape="toy",
    dtype="float32",
    max_context_len=512,
    chats_per_s=4.0,
    chat_prompts=(8, 40),
    chat_answers=(6, 10),
    num_documents=80,
    document_prompts=(30, 90),
    document_answers=(10, 20),
    lead_s=0.5,
    fill_s=0.5,
    tail_s=2.0,
    chat_alone_s=2.0,
    documents_alone_s=2.0,
    both_s=3.0,
)


class Traffic:
    """Sends the requests of one worker's phases."""

    def __init__(self, load: Load, gateway: TimedGateway, require_alive: Callable[[], None]) -> None:
        self.chats: list[SentRequest] = []  # of the last phase
        self.documents: list[SentRequest] = []  # of all
        self.most_late_s = 0.0  # that a chat was sent
        self._load = load
        self._gateway = gateway
        self._require_alive = require_alive
        self._open: list[SentRequest] = []  # documents
        self._document_lengths = random.Random(1)
        vocab_size = SHAPES[load.shape].vocab_size
        self._tokens: list[int] = np.random.default_rng(0).integers(3, vocab_size, 1 << 17).tolist()

    async def run(self, seconds: float, *, has_chat: bool, has_documents: bool) -> tuple[float, float]:
        """Send for so long, and until the chats have ended; return when it began, and when sending chat ended.

        Documents that are open go on.
        """
        self.chats, began_s = [], time.monotonic()
        ends_s = began_s + seconds
        chats = asyncio.create_task(self._send_chats(began_s, ends_s)) if has_chat else None
        while time.monotonic() < ends_s or not self._chats_ended(ends_s):
            self._require_alive()
            if has_documents:
                self._top_up()
            await asyncio.sleep(_LOOK_S)
        if chats is not None:
            await chats
        return began_s, ends_s

    async def warm_up(self, num_chats: int, num_documents: int) -> float:
        """Send some of both at once and wait for them: kernels are compiled at their first use. Return the seconds."""
        began_s, lengths = time.monotonic(), random.Random(0)
        self._open = [self._send_document(lengths) for _ in range(num_documents)]
        for _ in range(num_chats):
            await asyncio.sleep(_LOOK_S)
            self._send_chat(lengths, time.monotonic())
        while not all(one.is_done for one in (*self.chats, *self._open)):
            self._require_alive()
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began_s

    async def stop(self) -> ClusterStatus:
        """Abort what is open, and wait until nothing is held anywhere. Raises TimeoutError."""
        for one in (*self.chats, *self.documents):
            if not one.is_done:
                self._gateway.abort(one.answer)
        return await self._gateway.idle(_IDLE_S)

    def _chats_ended(self, ends_s: float) -> bool:
        is_over = time.monotonic() > ends_s + self._load.tail_s
        return is_over or all(one.is_done for one in self.chats)

    async def _send_chats(self, began_s: float, ends_s: float) -> None:
        lengths, due_s = random.Random(2), began_s
        while (due_s := due_s + lengths.expovariate(self._load.chats_per_s)) < ends_s:
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            self.most_late_s = max(self.most_late_s, time.monotonic() - due_s)
            self._send_chat(lengths, due_s)

    def _send_chat(self, lengths: random.Random, due_s: float) -> None:
        prompt = self._prompt(lengths, self._load.chat_prompts)
        answer_len = lengths.randint(*self._load.chat_answers)
        self.chats.append(self._gateway.send(prompt, answer_len, due_s=due_s, slo=self._load.slo))

    def _top_up(self) -> None:
        self._open = [one for one in self._open if not one.is_done]
        while len(self._open) < self._load.num_documents:
            self._open.append(self._send_document(self._document_lengths))
            self.documents.append(self._open[-1])

    def _send_document(self, lengths: random.Random) -> SentRequest:
        prompt = self._prompt(lengths, self._load.document_prompts)
        answer_len = lengths.randint(*self._load.document_answers)
        return self._gateway.send(prompt, answer_len, due_s=time.monotonic(), slo=None)

    def _prompt(self, lengths: random.Random, bounds: tuple[int, int]) -> list[int]:
        first = lengths.randrange(len(self._tokens) // 2)
        return self._tokens[first : first + lengths.randint(*bounds)]


def measure_promise(
    device: torch.device,
    *,
    is_toy: bool,
    on_measured: OnMeasured,
    limit_s: float = 540.0,
    policies: Sequence[str] = DEFAULT_POLICIES,
) -> dict[str, Any]:
    """Return what chat and documents get, alone and beside each other; told after every phase."""
    measuring = _Measuring(device, TOY if is_toy else Load(), on_measured, time.monotonic() + limit_s - _RESERVE_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measuring.run(policies))


class _Measuring:
    """Runs phases and keeps their figures."""

    def __init__(self, device: torch.device, load: Load, on_measured: OnMeasured, deadline_s: float) -> None:
        self._device = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self._load = load
        self._on_measured = on_measured
        self._deadline_s = deadline_s
        self._figures: dict[str, Any] = {"load": asdict(load), "policies": {}, "failures": [], "left_out": []}

    async def run(self, policies: Sequence[str]) -> dict[str, Any]:
        """Run all phases of the first policy, and the last phase of every other."""
        with tempfile.TemporaryDirectory(prefix="promise-") as name:
            folder = Path(name)
            write_model(SHAPES[self._load.shape], folder / "model")
            for index, policy in enumerate(policies):
                await self._try(policy, folder, is_first=index == 0)
        return self._figures

    async def _try(self, policy: str, folder: Path, *, is_first: bool) -> None:
        for cache_bytes in (None, _SMALLER_CACHE):
            try:
                await self._run_policy(policy, folder, cache_bytes, is_first=is_first)
            except (AlignedServeError, TimeoutError) as error:
                where = "as chosen" if cache_bytes is None else f"{cache_bytes >> 30} GiB"
                self._figures["failures"].append(f"{policy}, cache {where}: {type(error).__name__}: {error}")
                self._tell(self._figures["failures"][-1])
                continue
            return

    async def _run_policy(self, policy: str, folder: Path, cache_bytes: int | None, *, is_first: bool) -> None:
        load = self._load
        plan = plan_worker(
            folder / "model",
            self._device,
            policy,
            max_context_len=load.max_context_len,
            dtype=load.dtype,
            cache_bytes=cache_bytes,
        )
        decode = plan.config.decode
        found: dict[str, Any] = {
            "sizes": plan.line,
            "warnings": plan.warnings,
            "cache_tokens": decode.kv_cache_bytes
            // plan.served.block_layout(plan.config.engine.block_size).token_bytes,
            "max_running_requests": decode.max_running_requests,
            "max_num_batched_tokens": decode.max_num_batched_tokens,
            "phases": {},
        }
        name = policy if cache_bytes is None else f"{policy}, a smaller cache"
        self._figures["policies"][name] = found
        self._tell(f"{policy}: {plan.line}")
        async with serving(plan, folder / f"{policy}-{'chosen' if cache_bytes is None else 'smaller'}") as served:
            found["start_s"] = await served.start()
            self._tell(f"{policy}: the worker is up after {found['start_s']:.1f} s")
            traffic = Traffic(load, served.gateway, served.require_alive)
            found["warm_up_s"] = await traffic.warm_up(8, 24)
            self._tell(f"{policy}: warmed up in {found['warm_up_s']:.1f} s")
            if is_first:
                self._load = load = load.within(self._deadline_s - time.monotonic())
                await self._phase(CHAT, load.chat_alone_s, load.lead_s, traffic, served, found)
                await self._phase(DOCUMENTS, load.documents_alone_s, load.fill_s, traffic, served, found)
            lead_s = load.lead_s if is_first else load.fill_s
            await self._phase(BOTH, load.both_s, lead_s, traffic, served, found)
            status = await traffic.stop()
            found["blocks_used_at_the_end"] = status.num_worker_blocks_used
            self._tell(f"{policy}: nothing is held any more")

    async def _phase(
        self, name: str, seconds: float, lead_s: float, traffic: Traffic, served: Serving, found: dict[str, Any]
    ) -> None:
        began_s, ends_s = await traffic.run(seconds, has_chat=name != DOCUMENTS, has_documents=name != CHAT)
        window = (began_s + lead_s, ends_s)
        figures: dict[str, Any] = {"seconds": seconds, "counted_s": window[1] - window[0]}
        if name != DOCUMENTS:
            figures["chat"] = chat_figures(traffic.chats, window, self._load)
            figures["chat"]["most_late_s"] = traffic.most_late_s
        if name != CHAT:
            figures["documents"] = document_figures(traffic.documents, window)
        found["phases"][name] = figures
        wrong = sum(one.is_wrong for one in (*traffic.chats, *traffic.documents))
        if wrong:
            self._figures["failures"].append(f"{name}: {wrong} requests failed, or lost or gained tokens")
        self._tell(f"{name}: {figures}")
        state = await served.state()
        figures["iterations"] = iteration_figures(state, window)
        figures["coefficients"] = asdict(state.coefficients)
        if name == BOTH:
            self._compare(found)
        self._tell(f"{name}: {figures['iterations']} {found.get('documents_keep', '')}")

    def _compare(self, found: dict[str, Any]) -> None:
        """Say what documents keep beside chat, and how many tokens are computed in all, as multiples of documents
        alone."""
        first = next(iter(self._figures["policies"].values()))
        alone, beside = (one["phases"].get(name) for one, name in ((first, DOCUMENTS), (found, BOTH)))
        if alone is None:
            return
        names = ("prompt_tokens_per_s", "output_tokens_per_s")
        kept = {name: beside["documents"][name] / max(alone["documents"][name], 1e-9) for name in names}
        computed = sum(beside[who][name] for who in ("documents", "chat") for name in names)
        kept["tokens_of_both"] = computed / max(sum(alone["documents"][name] for name in names), 1e-9)
        found["documents_keep"] = kept

    def _tell(self, line: str) -> None:
        print(line, flush=True)
        self._on_measured(self._figures)


def chat_figures(chats: Sequence[SentRequest], window: tuple[float, float], load: Load) -> dict[str, Any]:
    counted = [one for one in chats if window[0] <= one.due_s < window[1]]
    ttfts, tpots = [one.ttft_s for one in counted], [one.tpot_s for one in counted]
    in_time = [ttft <= load.ttft_s for ttft in ttfts]
    at_pace = [tpot <= load.tpot_s for tpot in tpots]
    held = list(map(all, zip(in_time, at_pace, strict=True)))
    return {
        "num": len(counted),
        "num_unfinished": sum(not one.is_done for one in counted),
        "held": float(np.mean(held)) if held else None,
        "ttft_held": float(np.mean(in_time)) if held else None,
        "tpot_held": float(np.mean(at_pace)) if held else None,
        "ttft_s": _spread(ttfts),
        "tpot_s": _spread(tpots),
        "longest_gap_s": _spread([one.longest_gap_s for one in counted]),
        "prompt_tokens_per_s": sum(one.prompt_len for one in counted) / (window[1] - window[0]),
        "output_tokens_per_s": sum(one.answer_len for one in counted) / (window[1] - window[0]),
    }


def document_figures(documents: Sequence[SentRequest], window: tuple[float, float]) -> dict[str, Any]:
    """Return what was computed of documents within the window. A prompt counts where its first token came."""
    seconds = window[1] - window[0]
    prompts = [one.prompt_len for one in documents if one.stamps and window[0] <= one.stamps[0][0] < window[1]]
    outputs = [num for one in documents for when, num in one.stamps if window[0] <= when < window[1]]
    begun = [one for one in documents if one.stamps and one.stamps[0][0] < window[1]]
    return {
        "output_tokens_per_s": sum(outputs) / seconds,
        "prompt_tokens_per_s": sum(prompts) / seconds,
        "num_finished": sum(one.is_done and window[0] <= one.stamps[-1][0] < window[1] for one in begun),
        "num_waiting_at_the_end": sum(one.due_s < window[1] for one in documents) - len(begun),
        "num_running_at_the_end": sum(not one.is_done or one.stamps[-1][0] >= window[1] for one in begun),
    }


def iteration_figures(state: WorkerState, window: tuple[float, float]) -> dict[str, Any]:
    records = [one for one in state.iterations if window[0] <= one.started_s < window[1]]
    seconds = window[1] - window[0]
    if not records:
        return {"per_s": 0.0}
    waited = sum(one.nothing_to_do_s + one.waiting_for_prefill_s + one.prefetch_not_ready_s for one in records)
    return {
        "per_s": len(records) / seconds,
        "ms": _spread([one.wall_s for one in records], 1e-3),
        "mean_batch": float(np.mean([one.batch_size for one in records])),
        "mean_context": float(np.mean([one.mean for one in records])),
        "share_ahead": float(np.mean([one.is_ahead for one in records])),
        "share_waiting": waited / seconds,
        "share_turnaround": sum(one.turnaround_s for one in records) / seconds,
        "share_prepare": sum(one.prepare_s for one in records) / seconds,
        "share_forward": sum(one.forward_s for one in records) / seconds,
        "share_sampling": sum(one.sampling_s for one in records) / seconds,
    }


def _spread(values: Sequence[float], unit: float = 1.0) -> dict[str, float | None]:
    if not values:
        return {}
    wanted = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = {name: float(np.percentile(values, at, method="inverted_cdf")) / unit for name, at in wanted.items()}
    return {name: value if np.isfinite(value) else None for name, value in found.items()}

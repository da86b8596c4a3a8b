"""Chat beside documents, in alternation: on a real vLLM by arrival, by priority, with the prototype of a scheduler
inside, with ours inside, by priority with our gateway before it; and on our engine, elastic and with separate workers.

    make build/vllm/.installed
    build/vllm/bin/python tests/inside_vllm/tiny_model.py build/opt-125m     # 125M OPT's shape, random weights
    python -m benchmarks.vllm.chat_beside_documents build/opt-125m --vllm build/vllm/bin/vllm

The prototype's row needs --prototype with the folder of its module. Each run starts a server and sends the chats
alone, then the same chats beside documents. Chat is an open loop: moments by Poisson, lengths like ShareGPT's.
Documents: 512 to 1 024 tokens, answers of 32 to 128, not streamed, so many outstanding. Prompts are token ids, answers
have fixed lengths. Times are the client's. Behind the gateway documents say so by their tier.
"""

import asyncio
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served

ROOT = Path(__file__).parents[2]
BY_PRIORITY = ("--scheduling-policy", "priority")
CASES = {
    "by arrival": (),
    "by priority": BY_PRIORITY,
    "prototype inside": (*BY_PRIORITY, "--scheduler-cls", "vllm_prototype.Proto"),
    "ours inside": (*BY_PRIORITY, "--scheduler-cls", "alignedserve_vllm.AlignedScheduler"),
    "gateway before priority": BY_PRIORITY,
}
OURS = {
    "our engine, elastic": ("topology=elastic",),
    "our engine, separate 1 + 1": ("topology=disaggregated",),
    "our engine, separate 2 + 2": ("topology=disaggregated", "prefill.count=2", "decode.count=2"),
}
VOCABULARY = range(10, 50_000)
_NUM_WARM = 24  # documents before anything is measured
START_S, SHOWN = 600.0, ("held", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "documents_per_s")


@dataclass(frozen=True, slots=True)
class Answer:
    """The times of one answer, in seconds of the client's clock."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and where."""

    url: str
    arguments: Namespace
    chat_fields: dict[str, Any]
    document_fields: dict[str, Any] = field(default_factory=lambda: {"priority": 10, "stream": False})

    async def answer(
        self, session: aiohttp.ClientSession, rng: random.Random, num_in: int, num_out: int, **fields: Any
    ) -> Answer:
        prompt = [rng.choice(VOCABULARY) for _ in range(num_in)]
        body = {"model": "model", "prompt": prompt, "max_tokens": num_out, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, **fields}
        sent_s, times = time.perf_counter(), list[float]()
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                has_token = not body["stream"] or (line.startswith(b"data:") and b"[DONE]" not in line)
                times += [time.perf_counter()] * has_token
        return Answer(sent_s, times[0], times[-1], num_out)

    async def warm(self) -> None:
        """Let the server touch its memory and compile what it compiles: what is measured first would pay for it."""
        rng = random.Random(self.arguments.seed + 2000)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            answers = (self.answer(session, rng, 1024, 32, **self.document_fields) for _ in range(_NUM_WARM))
            await asyncio.gather(*answers)

    async def phase(self, num_documents: int) -> dict[str, float]:
        """Send chats beside so many documents; return what chats held and how many documents ended meanwhile."""
        arguments, ended = self.arguments, list[Answer]()
        chats, documents = random.Random(arguments.seed), random.Random(arguments.seed + 1000)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def one_after_the_other() -> None:
                while True:
                    lengths = documents.randint(512, 1024), documents.randint(32, 128)
                    ended.append(await self.answer(session, documents, *lengths, **self.document_fields))

            loops = [asyncio.create_task(one_after_the_other()) for _ in range(num_documents)]
            await asyncio.sleep(arguments.warm if num_documents else 0.0)
            began_s, tasks = time.perf_counter(), []
            while time.perf_counter() - began_s < arguments.seconds:
                num_in = min(1000, max(8, int(chats.lognormvariate(4.6, 0.9))))
                num_out = min(256, max(8, int(chats.lognormvariate(4.1, 0.7))))
                lengths_rng = random.Random(chats.random())
                tasks.append(
                    asyncio.create_task(self.answer(session, lengths_rng, num_in, num_out, **self.chat_fields))
                )
                await asyncio.sleep(chats.expovariate(arguments.rate))
            until_s = time.perf_counter()
            answers = await asyncio.gather(*tasks)
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        num_ended = sum(began_s <= answer.last_s <= until_s for answer in ended)
        return {**self._of_chats(answers), "documents_per_s": num_ended / (until_s - began_s)}

    def _of_chats(self, answers: list[Answer]) -> dict[str, float]:
        ttft_s, tpot_s = (sorted(getattr(answer, name) for answer in answers) for name in ("ttft_s", "tpot_s"))
        limits = self.arguments.ttft, self.arguments.tpot
        held = [answer.ttft_s <= limits[0] and answer.tpot_s <= limits[1] for answer in answers]
        last = int(0.99 * (len(answers) - 1))
        return {
            "num_chats": len(answers),
            "held": sum(held) / len(held),
            "ttft_p50_s": statistics.median(ttft_s),
            "ttft_p99_s": ttft_s[last],
            "tpot_p50_s": statistics.median(tpot_s),
            "tpot_p99_s": tpot_s[last],
        }


@contextmanager
def running(command: Sequence[str], url: str, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """Run a server until the end of the block; the block begins when it answers."""
    with log.open("wb") as file:
        server = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT)
    try:
        until_s = time.monotonic() + START_S
        while not asyncio.run(_answers(url)):
            if time.monotonic() > until_s or server.poll() is not None:
                raise SystemExit(f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(1.0)
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def measure(arguments: Namespace, case: str) -> dict[str, Any]:
    """Measure one server: chats alone, then beside documents."""
    if case in OURS:
        return measure_ours(arguments, case)
    ttft_ms, tpot_ms = 1000 * arguments.ttft, 1000 * arguments.tpot
    engine, gateway = f"http://localhost:{arguments.port}", f"http://localhost:{arguments.port + 1}"
    command = [
        *(arguments.vllm, "serve", str(arguments.model), "--served-model-name", "model", "--port", str(arguments.port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", *CASES[case]),
    ]
    path = os.pathsep.join(map(str, filter(None, (ROOT, arguments.prototype))))
    for_cpus = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    log = Path(arguments.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as servers:
        servers.enter_context(running(command, f"{engine}/health", {**for_cpus, "PYTHONPATH": path}, log))
        load = Load(engine, arguments, {})
        if case == "by arrival":
            load = Load(engine, arguments, {}, {"stream": False})
        elif "inside" in case:
            load = Load(engine, arguments, {"vllm_xargs": {"slo_ttft_ms": ttft_ms, "slo_tpot_ms": tpot_ms}})
        elif case.startswith("gateway"):
            door = [
                *(sys.executable, "-m", "alignedserve", "serve", "--upstream", engine),
                *("--port", str(arguments.port + 1)),
                *("--set", f"gateway.default_ttft_s={arguments.ttft}"),
                *("--set", f"gateway.default_tpot_s={arguments.tpot}", "--set", "batches.enabled=false"),
            ]
            beside = log.with_suffix(".gateway.log")
            servers.enter_context(running(door, f"{gateway}/ready", {"PYTHONPATH": str(ROOT)}, beside))
            load = Load(gateway, arguments, {}, {"service_tier": "flex", "stream": False})
        return phases(load, case)


def measure_ours(arguments: Namespace, case: str) -> dict[str, Any]:
    """The same of our engine, in float32 and with caches of the same size."""
    settings = [
        *("model.dtype=float32", "batches.enabled=false", "decode.kv_cache_bytes=2GiB", *OURS[case]),
        *(f"gateway.default_ttft_s={arguments.ttft}", f"gateway.default_tpot_s={arguments.tpot}"),
    ]
    with served(arguments.model, settings) as port:
        named = {"model": arguments.model.name}
        documents = {**named, "service_tier": "flex", "stream": False}
        return phases(Load(f"http://127.0.0.1:{port}", arguments, named, documents), case)


def phases(load: Load, case: str) -> dict[str, Any]:
    asyncio.run(load.warm())
    alone = asyncio.run(load.phase(0))
    return {"case": case, "alone": alone, "beside": asyncio.run(load.phase(load.arguments.documents))}


def main() -> None:
    """Measure all cases in turn, as often as wanted; print each run and write the record."""
    parser = parser_of(__doc__, rounds=2, name="vllm/chat_beside_documents")
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", default="vllm", help="the command")
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *OURS], default=[*CASES, *OURS])
    parser.add_argument("--prototype", type=Path, help="folder of vllm_prototype.py; without it its row is left out")
    parser.add_argument("--rate", type=float, default=0.8, help="chats a second")
    parser.add_argument("--documents", type=int, default=64, help="outstanding")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=float, default=30.0, help="seconds of documents before chats")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=8177)
    parser.add_argument("--log", default="build/vllm-server.log")
    arguments = parser.parse_args()
    rows = []
    cases = [case for case in arguments.cases if arguments.prototype or not case.startswith("prototype")]
    for number, case in itertools.product(range(arguments.rounds), cases):
        row = {"round": number, **measure(arguments, case)}
        rows.append(row)
        for phase in ("alone", "beside"):
            figures = " ".join(f"{name} {row[phase][name]:.3f}" for name in SHOWN)
            print(f"{row['case']:24} {phase:7} {figures}", flush=True)
    settings = ("rate", "documents", "ttft", "tpot", "seconds", "warm", "seed")
    write_result(arguments.name, {**{name: getattr(arguments, name) for name in settings}, "rows": rows})


if __name__ == "__main__":
    main()

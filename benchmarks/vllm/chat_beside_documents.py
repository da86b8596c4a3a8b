"""Chat beside documents on a real vLLM: as it is by priority, with our scheduler, with any other; in alternation.

    make build/vllm/.installed
    build/vllm/bin/python tests/inside_vllm/tiny_model.py build/opt-125m     # 125M OPT's shape, random weights
    python -m benchmarks.vllm.chat_beside_documents build/opt-125m --vllm build/vllm/bin/vllm

Each run starts a server and sends the chats alone, then the same chats beside documents. Chat is an open loop: moments
by Poisson, lengths like ShareGPT's. Documents: 512 to 1 024 tokens, answers of 32 to 128, so many outstanding. Prompts
are token ids, answers have fixed lengths. Times are the client's.
"""

import asyncio
import itertools
import os
import random
import signal
import statistics
import subprocess
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result

ROOT = Path(__file__).parents[2]
OURS = "alignedserve_vllm.AlignedScheduler"
VOCABULARY = range(10, 50_000)
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
    document_fields: dict[str, Any] = field(default_factory=lambda: {"priority": 10})

    async def answer(
        self, session: aiohttp.ClientSession, rng: random.Random, num_in: int, num_out: int, **fields: Any
    ) -> Answer:
        prompt = [rng.choice(VOCABULARY) for _ in range(num_in)]
        body = {"model": "model", "prompt": prompt, "max_tokens": num_out, "temperature": 0, "ignore_eos": True}
        sent_s, times = time.perf_counter(), list[float]()
        async with session.post(f"{self.url}/v1/completions", json={**body, "stream": True, **fields}) as response:
            response.raise_for_status()
            async for line in response.content:
                has_token = line.startswith(b"data:") and b"[DONE]" not in line
                times += [time.perf_counter()] * has_token
        return Answer(sent_s, times[0], times[-1], num_out)

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


def serve(arguments: Namespace, scheduler: str, log: Path) -> subprocess.Popen[bytes]:
    """Start vLLM with this scheduler, "": its own, and wait until it answers."""
    command = [
        *(arguments.vllm, "serve", str(arguments.model), "--served-model-name", "model", "--port", str(arguments.port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--scheduling-policy", "priority"),
        *(("--scheduler-cls", scheduler) if scheduler else ()),
    ]
    for_cpus = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join([str(ROOT), *arguments.path])
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env={**for_cpus, **os.environ, "PYTHONPATH": path}, stdout=file, stderr=subprocess.STDOUT
        )
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and server.poll() is None:
        if asyncio.run(_answers(arguments.port)):
            return server
        time.sleep(1.0)
    server.kill()
    raise SystemExit(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")


async def _answers(port: int) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://localhost:{port}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def measure(arguments: Namespace, scheduler: str) -> dict[str, Any]:
    """Measure one server: chats alone, then beside documents."""
    objectives = {"slo_ttft_ms": 1000 * arguments.ttft, "slo_tpot_ms": 1000 * arguments.tpot}
    log = Path(arguments.log)
    server = serve(arguments, scheduler, log)
    try:
        load = Load(f"http://localhost:{arguments.port}", arguments, {"vllm_xargs": objectives})
        return {
            "scheduler": scheduler or "vLLM's own, by priority",
            "alone": asyncio.run(load.phase(0)),
            "beside": asyncio.run(load.phase(arguments.documents)),
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main() -> None:
    """Measure all schedulers in turn, as often as wanted; print each run and write the record."""
    parser = parser_of(__doc__, rounds=2, name="vllm/chat_beside_documents")
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", default="vllm", help="the command")
    parser.add_argument("--schedulers", nargs="*", default=["", OURS], help='classes to compare; "": vLLM\'s own')
    parser.add_argument("--path", nargs="*", default=[], help="folders in which these classes lie")
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
    for number, scheduler in itertools.product(range(arguments.rounds), arguments.schedulers):
        row = {"round": number, **measure(arguments, scheduler)}
        rows.append(row)
        for phase in ("alone", "beside"):
            figures = " ".join(f"{name} {row[phase][name]:.3f}" for name in SHOWN)
            print(f"{row['scheduler']:40} {phase:7} {figures}", flush=True)
    settings = ("rate", "documents", "ttft", "tpot", "seconds", "warm", "seed")
    write_result(arguments.name, {**{name: getattr(arguments, name) for name in settings}, "rows": rows})


if __name__ == "__main__":
    main()

"""What a picture costs, and what a chat sees beside ten of them a second, live, on this machine.

    python -m benchmarks.promise.pictures_beside_chat  # about eight minutes, on a quiet machine
    python -m benchmarks.promise.pictures_beside_chat --topology elastic --duration 20
    python -m benchmarks.promise.pictures_beside_chat --certify  # three minutes; the other figures are kept

A small model in the form of Qwen3-VL with random weights in float32 (28M of text, 35M of the encoder).

One picture: of 1 megapixel (1 024 tokens), alone on the server: its first token, against the encoder alone in this
process and a prompt of as many tokens alone on the server. Target: at most 1.1 times both together.

Chat: Poisson, 1 request/s, prompts of 60 to 200 tokens, answers of 60; TTFT 1 s, TPOT 0.15 s, which are the default
objectives. Pictures: ten requests a second, each with a picture of its own of 96 x 96 pixels (9 tokens) and an answer
of 4 tokens. Documents: 16 `flex` streams outstanding. Chat alone, beside pictures, beside documents, and beside both;
each on a new server, after ten seconds that do not count. Target: chat keeps its objectives beside pictures.

Certificate: `alignedserve certify` on such a server, 12.5 chats a second in bursts, four in five with a picture:
ten pictures a second. Target: every bound holds.
"""

import asyncio
import base64
import io
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from PIL import Image

from alignedserve.runtime.device.cores import num_cores
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_seeing
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import ALIGNEDSERVE, TOPOLOGIES, served, traffic_report
from benchmarks.promise.certificates import row_of
from plugins.vision.decoder import Decoded, DecodingTask
from plugins.vision.decoding import decode
from plugins.vision.encoding_queue import EncodingRun
from plugins.vision.families import read_vision
from plugins.vision.tower import VisionTower
from plugins.vision.vision_config import VisionConfig
from plugins.vision.vision_weights import load_vision_weights

CHAT = "chat: prompt=uniform(60,200), output=60, rate=1, ttft=1, tpot=0.15"
DOCUMENTS = "documents: prompt=uniform(512,1024), output=uniform(100,300), outstanding=16, tier=flex"
LARGE, SMALL = 1024, 96  # edges of pictures
_PICTURES_PER_S = 10.0
_WARM_UP_S = 10.0
_REPEATS = 5
_MODEL = "seeing"
_CERTIFY = (
    *("--small", "--ttft", "1", "--tpot", "0.15", "--rate", "12.5", "--chat-pictures", "80"),
    *("--chat-prompt", "32", "--chat-output", "8", "--picture-edge", str(SMALL)),
)
_SETTINGS = ("model.random_weights=true", "model.dtype=float32", "decode.kv_cache_bytes=512MiB")
_OF_SEPARATE_WORKERS = ("prefill.kv_cache_bytes=256MiB", "pool.memory_bytes=512MiB")


def picture(edge: int, seed: int) -> bytes:
    """Return the file of a picture that no other seed has."""
    colours = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((edge, edge)).save(file, "PNG")
    return file.getvalue()


def encoder_s(folder: Path, file: bytes) -> float:
    """Return the seconds of the encoder alone, with as many threads as a server has."""
    config = read_vision(folder, "qwen3_vl")
    assert isinstance(config, VisionConfig), "a model that does not see"
    torch.set_num_threads(num_cores())
    tower = VisionTower(config, load_vision_weights(None, config, torch.float32, torch.device("cpu")), *_FLOAT32)
    decoded = decode(file, DecodingTask(1 << 22, config.form))
    assert isinstance(decoded, Decoded), "a picture that is not read"
    (shape,) = decoded.shapes
    pixels = np.frombuffer(decoded.pixels, np.uint8).reshape(3, *shape)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        EncodingRun([tower.steps(pixels)]).turn(float("inf"))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


_FLOAT32 = (torch.float32, torch.device("cpu"))


async def ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> float:
    """Return the seconds to a whole answer. Raises RuntimeError."""
    began = time.perf_counter()
    async with session.post(path, json=body) as response:
        answer = await response.text()
        if response.status != 200:
            raise RuntimeError(answer)
        return time.perf_counter() - began


def shown(edge: int, seed: int, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request with a picture."""
    url = f"data:image/png;base64,{base64.b64encode(picture(edge, seed)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": _MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


def one_picture(folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Measure a large picture alone, and its parts."""
    num_tokens = (LARGE // 32) ** 2 + 12

    async def measure(port: int) -> tuple[list[float], list[float]]:
        pictures, prompts = [], []
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for seed in range(_REPEATS + 1):
                pictures.append(await ask(session, "/v1/chat/completions", shown(LARGE, seed, 1)))
                ids = np.random.default_rng(seed).integers(10, 400, num_tokens).tolist()
                prompts.append(await ask(session, "/v1/completions", {"model": _MODEL, "prompt": ids, "max_tokens": 1}))
        return pictures[1:], prompts[1:]

    with served(folder, settings) as port:
        pictures, prompts = asyncio.run(measure(port))
    encoder = encoder_s(folder, picture(LARGE, 0))
    first_token_s, prompt_s = statistics.median(pictures), statistics.median(prompts)
    return {
        "num_tokens": num_tokens,
        "first_token_s": first_token_s,
        "encoder_s": encoder,
        "prompt_s": prompt_s,
        "ratio": first_token_s / (encoder + prompt_s),
        "first_tokens_s": pictures,
        "prompts_s": prompts,
    }


class Pictures:
    """Sends a picture every tenth of a second, whatever becomes of those before it."""

    def __init__(self, port: int) -> None:
        self.latencies_s: list[float] = []
        self.num_sent = 0
        self._url = f"http://127.0.0.1:{port}"
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Send them meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._ends.set()
            self._thread.join()

    async def _run(self) -> None:
        began, asked = time.monotonic(), []
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as session:
            while not self._ends.is_set():
                body = shown(SMALL, 1000 + self.num_sent, 4)
                asked.append(asyncio.create_task(ask(session, "/v1/chat/completions", body)))
                self.num_sent += 1
                await asyncio.sleep(max(0.0, began + self.num_sent / _PICTURES_PER_S - time.monotonic()))
            for one in asked:
                if not one.done():
                    one.cancel()
            ended = await asyncio.gather(*asked, return_exceptions=True)
        self.latencies_s = sorted(one for one in ended if isinstance(one, float))


def chat_beside(
    folder: Path, settings: Sequence[str], duration_s: float, *, others: bool, seen: bool
) -> dict[str, Any]:
    """Return what chat got beside documents (`others`), and pictures (`seen`)."""
    traffic = [CHAT, DOCUMENTS] if others else [CHAT]
    with served(folder, settings) as port:
        sender = Pictures(port)
        if seen:
            with sender.sent():
                report = traffic_report(port, folder, traffic, duration_s, _WARM_UP_S)
        else:
            report = traffic_report(port, folder, traffic, duration_s, _WARM_UP_S)
    row: dict[str, Any] = {
        "beside": [name for name, is_there in (("pictures", seen), ("documents", others)) if is_there]
    }
    row |= {one["name"]: one for one in report["classes"]}
    if sender.latencies_s:
        row["pictures_per_s"] = len(sender.latencies_s) / (duration_s + _WARM_UP_S)
        row["num_pictures"] = {"sent": sender.num_sent, "answered": len(sender.latencies_s)}
        row["picture_p50_s"] = statistics.median(sender.latencies_s)
        row["picture_p99_s"] = sender.latencies_s[int(0.99 * (len(sender.latencies_s) - 1))]
    return row


def certified(folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return the certificate of a server whose chats bring ten pictures a second."""
    with served(folder, settings) as port, tempfile.TemporaryDirectory() as output:
        command = [ALIGNEDSERVE, "certify", f"http://127.0.0.1:{port}", *_CERTIFY, "--output", output]
        subprocess.run(command, check=False)  # 1: a bound does not hold, which is a result
        certificate = json.loads(Path(output, "certificate.json").read_text())
    return row_of(certificate) | {name: certificate["figures"][name] for name in ("pictured", "plain")}


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__, name="serving/pictures_beside_chat")
    parser.add_argument("--topology", nargs="+", default=("elastic",), choices=TOPOLOGIES)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--certify", action="store_true", help="measure a certificate alone")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"duration_s": arguments.duration, "topologies": {}}
    if arguments.certify:
        figures = dict(read_figures(arguments.name) or figures)
    with tempfile.TemporaryDirectory() as name:
        folder = make_seeing(Path(name) / _MODEL)
        for topology in arguments.topology:
            separate = _OF_SEPARATE_WORKERS if topology == "disaggregated" else ()
            settings = [*_SETTINGS, *separate, f"topology={topology}"]
            if arguments.certify:
                figures.setdefault("certificates", {})[topology] = certified(folder, settings)
                continue
            one, rows = one_picture(folder, settings), []
            print(f"{topology}: a megapixel {one['first_token_s']:.2f} s, {one['ratio']:.2f} of its parts", flush=True)
            for others, seen in ((False, False), (False, True), (True, False), (True, True)):
                row = chat_beside(folder, settings, arguments.duration, others=others, seen=seen)
                rows.append(row)
                print(line_of(row), flush=True)
            figures["topologies"][topology] = {"one_picture": one, "rows": rows}
    print(f"written to {write_result(arguments.name, figures)}")


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of a table."""
    chat = row["chat"]
    documents = row["documents"]["output_tokens_per_s"] if "documents" in row else 0.0
    return (
        f"| {' and '.join(row['beside']) or 'nothing'} | {chat['ttft_s']['p50']:.3f} | {chat['ttft_s']['p99']:.3f} | "
        f"{chat['tpot_s']['p50']:.4f} | {chat['tpot_s']['p99']:.4f} | {chat.get('slo_attainment')} | "
        f"{documents:.0f} | {row.get('pictures_per_s', 0.0):.1f} | {row.get('picture_p50_s', 0.0):.3f} | "
        f"{row.get('picture_p99_s', 0.0):.3f} |"
    )


if __name__ == "__main__":
    main()

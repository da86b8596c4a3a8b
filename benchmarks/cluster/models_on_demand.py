"""Models on demand on one host: how long the first answer of one that sleeps takes, and what a chat notices meanwhile.

`beside`: a model that sleeps is asked while a chat goes on with one that is always there; asked again once it is awake.
`in turn`: two models that do not fit at once; asking for one has the other leave first. Run:
python -m benchmarks.cluster.models_on_demand [--rounds 3]
"""

import contextlib
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from typing_extensions import override

from alignedserve.cluster.deployments.admin_api import ask, find_cluster, show
from alignedserve.config.sections import MIB
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served

CHAT, SLEEPING = "chat", ("pocket", "smollm2")
QUIET_S = 10.0  # of the chat alone, before each model is asked
PATIENCE_S = 300.0
BESIDE = """\
models:
- model: {path: pocket, served_model_name: chat}
- model: {path: pocket, served_model_name: pocket, keep_alive: 1h}
- model: {path: smollm2, served_model_name: smollm2, keep_alive: 1h}
"""
IN_TURN = """\
models:
- model: {path: pocket, served_model_name: pocket, keep_alive: 1h}
- model: {path: smollm2, served_model_name: smollm2, keep_alive: 1h}
"""


def token_times(port: int, model: str, max_tokens: int, **fields: Any) -> Iterator[float]:
    """Yield the moment at which each event of a streamed answer comes."""
    message = {"role": "user", "content": "count from 1 to 40"}
    body = {"model": model, "messages": [message], "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body | fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield time.monotonic()


def first_token_s(port: int, model: str, **fields: Any) -> float:
    """Return the seconds to the first token of a short answer, which is read to its end."""
    began_s = time.monotonic()
    return next(iter(list(token_times(port, model, 4, **fields)))) - began_s


class Chat(threading.Thread):
    """Talks to the model that is always there, one answer after the other."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._is_over = threading.Event()
        self._answers: list[tuple[float, list[float]]] = []  # when each was asked for, and its events

    @override
    def run(self) -> None:
        while not self._is_over.is_set():
            asked_s = time.monotonic()
            self._answers.append((asked_s, list(token_times(self._port, CHAT, 100))))

    def end(self) -> None:
        """Stop after the answer that runs."""
        self._is_over.set()
        self.join()

    def noticed(self, since_s: float, until_s: float) -> dict[str, float]:
        """Return its gaps and times to the first token in an interval, in milliseconds."""
        first, gaps = [], []
        for asked_s, times in self._answers:
            if since_s <= asked_s < until_s:
                first.append(times[0] - asked_s)
            gaps += [later - one for one, later in itertools.pairwise(times[1:]) if since_s <= one < until_s]
        return {
            "tokens": len(gaps),
            "gap_ms_p50": _ms(gaps, 50),
            "gap_ms_p99": _ms(gaps, 99),
            "gap_ms_max": round(max(gaps) * 1e3, 1),
            "ttft_ms_max": round(max(first, default=0.0) * 1e3, 1),
        }


def _ms(values: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100)[percent - 1] * 1e3, 2)


def beside(port: int) -> dict[str, Any]:
    """Ask each model that sleeps, and again, beside a chat; then let it leave."""
    found: dict[str, Any] = {}
    for model in SLEEPING:
        chat = Chat(port)
        chat.start()
        began_s = time.monotonic()
        time.sleep(QUIET_S)
        asked_s = time.monotonic()
        asleep_s = first_token_s(port, model)
        answered_s = time.monotonic()
        awake_s = first_token_s(port, model, keep_alive=0)  # and it leaves
        chat.end()
        wait_asleep(model)
        found[model] = {
            "first_token_s_asleep": round(asleep_s, 2),
            "first_token_s_awake": round(awake_s, 3),
            "chat_before": chat.noticed(began_s, asked_s),
            "chat_meanwhile": chat.noticed(asked_s, answered_s),
        }
    return found


def in_turn(port: int) -> dict[str, Any]:
    """Ask for the model that sleeps, for whose room the other one leaves; then the other way round."""
    first_token_s(port, SLEEPING[0])
    return {
        f"{model}_first_token_s_after_another_left": round(first_token_s(port, model), 2)
        for model in (SLEEPING[1], SLEEPING[0])
    }


def wait_asleep(model: str) -> None:
    """Wait until a model that leaves has left."""
    ends_s = time.monotonic() + PATIENCE_S
    asking = partial(ask, find_cluster(None))
    while any(one.name == model and one.phase != "asleep" for one in show(asking).deployments):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{model} did not leave")
        time.sleep(0.2)


@contextlib.contextmanager
def cluster(models: str, *settings: str) -> Iterator[int]:
    """Serve these models for as long as the context lasts, in a folder of its own; return the port."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "models.yaml"
        config.write_text(models)
        os.environ["ALIGNEDSERVE_RUN_DIR"] = folder  # where the server makes its door, and `find_cluster` looks
        os.environ["ALIGNEDSERVE_STATE_DIR"] = f"{folder}/state"
        with served(None, settings, "--config", str(config)) as port:
            yield port


def main() -> None:
    """Measure, print, keep."""
    arguments = parser_of(__doc__, rounds=3, name="serving/models_on_demand").parse_args()
    # Untouched pages of a cache take no memory, but count as held.
    large = f"decode.kv_cache_bytes={psutil.virtual_memory().available * 6 // 10 // MIB}MiB"
    with cluster(BESIDE) as port:
        figures: dict[str, Any] = {"beside": [beside(port) for _ in range(arguments.rounds)]}
    with cluster(IN_TURN, large) as port:
        figures["in_turn"] = [in_turn(port) for _ in range(arguments.rounds)]
    print(json.dumps(figures, indent=2))
    write_result(arguments.name, figures)


if __name__ == "__main__":
    main()

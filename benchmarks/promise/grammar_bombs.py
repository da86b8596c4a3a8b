"""Chats beside grammars whose work grows without end: the time to their first tokens, with and without.

    python -m benchmarks.promise.grammar_bombs  # about four minutes

The pocket model on this machine, a chat every 0.3 s. By turns of 20 s three clients ask beside them, in real time and
again as soon as they are answered, for answers of 1 500 tokens under an ambiguous grammar, one of chains, and a pattern
of many states; and by turns for answers of that length without a grammar. Target: p99 of chats' TTFT within 1.5 times
of that without clients beside them. Answers of bombs end with an error that names the field.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served

BOMBS: list[dict[str, Any]] = [
    {"guided_grammar": 'root ::= s\ns ::= s s | "a"'},
    {"guided_grammar": 'root ::= r\nr ::= "a" q | "b"\nq ::= ' + " | ".join(["r"] * 90)},
    {"guided_json": {"type": "string", "pattern": "^((a{1000}){50})$"}},
]
_CHAT_EVERY_S = 0.3
_TIMEOUT_S = 120.0


def _posted(port: int, body: dict[str, Any]) -> urllib.request.Request:
    whole = {"model": "pocket", "messages": [{"role": "user", "content": "Say hello."}], **body}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return urllib.request.Request(url, json.dumps(whole).encode(), {"content-type": "application/json"})


def first_token_s(port: int) -> float:
    began = time.monotonic()
    body = {"stream": True, "max_tokens": 12, "temperature": 0}
    with urllib.request.urlopen(_posted(port, body), timeout=_TIMEOUT_S) as answer:
        first = next(time.monotonic() for line in answer if b'"content":"' in line and b'"content":""' not in line)
        answer.read()
    return first - began


def bomb(port: int, fields: dict[str, Any], until: threading.Event, ends: Counter[str]) -> None:
    while not until.is_set():
        body = {"max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, **fields}
        try:
            with urllib.request.urlopen(_posted(port, body), timeout=_TIMEOUT_S) as answer:
                end = json.load(answer)["choices"][0]["finish_reason"]
        except urllib.error.HTTPError as error:
            end = json.load(error)["error"]["message"]
        ends[end] += 1


def chats(port: int, seconds: float) -> list[float]:
    with ThreadPoolExecutor(64) as threads:
        begun = []
        for _ in range(round(seconds / _CHAT_EVERY_S)):
            begun.append(threads.submit(first_token_s, port))
            time.sleep(_CHAT_EVERY_S)
        return [chat.result() for chat in begun]


def measure(turns: int, seconds: float) -> dict[str, Any]:
    clients: dict[str, list[dict[str, Any]]] = {"alone": [], "beside plain answers": [{}] * len(BOMBS), "beside": BOMBS}
    ttfts_s: dict[str, list[float]] = {name: [] for name in clients}
    ends: Counter[str] = Counter()
    with served("pocket") as port:
        chats(port, seconds / 2)
        for _ in range(turns):
            for name, wanted in clients.items():
                until, of_clients = threading.Event(), ends if wanted is BOMBS else Counter[str]()
                with ThreadPoolExecutor(len(BOMBS)) as threads:
                    for fields in wanted:
                        threads.submit(bomb, port, fields, until, of_clients)
                    ttfts_s[name] += chats(port, seconds)
                    until.set()
    ttft_s = {name: _quantiles(values) for name, values in ttfts_s.items()}
    ratios = {name: round(ttft_s[name]["p99"] / ttft_s["alone"]["p99"], 2) for name in list(clients)[1:]}
    return {"chats": len(ttfts_s["beside"]), "ttft_s": ttft_s, "p99_ratio": ratios, "ends_of_bombs": dict(ends)}


def _quantiles(seconds: list[float]) -> dict[str, float]:
    values = np.quantile(seconds, (0.5, 0.9, 0.99, 1.0)).round(4).tolist()
    return dict(zip(("p50", "p90", "p99", "max"), values, strict=True))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    write_result("serving/grammar_bombs", measure(options.turns, options.seconds))


if __name__ == "__main__":
    main()

"""Texts per second of an encoder through the whole system, real time and best effort, beside transformers.

    python -m benchmarks.serving.embeddings [--model FOLDER] [--rounds 3]

Without a folder: a model of MiniLM-L6's shape with random weights. A round is transformers on all cores, in padded
batches of 32 texts sorted by length as sentence-transformers makes them, then a fresh server of the same dtype, asked
by several clients in calls of 64 texts. Clients, gateway and router have the same cores as the worker. Medians count.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.scheduling.live_policies import served
from benchmarks.support.recording import write_result
from tests.support.tiny_encoders import VOCABULARY, make_tiny_encoder

NAME = "embeddings"
_NUM_TEXTS = 1024
_MOST_WORDS = 100
_PADDED_BATCH = 32
_CALL_TEXTS = 64
_CLIENTS = 4
_TIERS = ("default", "flex")
_DTYPE = "bfloat16"
_MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}

_library: Any = transformers


def made_texts() -> list[str]:
    """Return texts of 1 to 100 words of one letter, most of them short: a token each with either model."""
    draw = random.Random(1)
    letters = [piece for piece in VOCABULARY if len(piece) == 1]
    lengths = [min(int(draw.expovariate(1 / 30)) + 1, _MOST_WORDS) for _ in range(_NUM_TEXTS)]
    return [" ".join(draw.choices(letters, k=length)) for length in lengths]


class Padded:
    """The model in transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = _library.AutoModel.from_pretrained(folder, dtype=getattr(torch, _DTYPE)).eval()
        self._tokenizer = _library.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]" if _has_bert_tokens(folder) else "<pad>"
        )

    def texts_per_s(self, texts: Sequence[str]) -> float:
        """Compute the means of all texts' tokens."""
        began_s = time.perf_counter()
        ordered = sorted(texts, key=len)
        for first in range(0, len(ordered), _PADDED_BATCH):
            self._embed(ordered[first : first + _PADDED_BATCH])
        return len(texts) / (time.perf_counter() - began_s)

    def _embed(self, texts: Sequence[str]) -> Any:
        inputs = self._tokenizer(list(texts), padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            hidden = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][:, :, None]
        return torch.nn.functional.normalize((hidden * mask).sum(1).float() / mask.sum(1), dim=1)


def _has_bert_tokens(folder: Path) -> bool:
    return "[PAD]" in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]


def served_texts_per_s(port: int, model: str, texts: Sequence[str], tier: str) -> float:
    """Return the rate from the first call to the last answer, as clients see it."""
    calls = [texts[first : first + _CALL_TEXTS] for first in range(0, len(texts), _CALL_TEXTS)]

    def ask(call: Sequence[str]) -> int:
        body = {"model": model, "input": call, "service_tier": tier, "encoding_format": "base64"}
        url = f"http://127.0.0.1:{port}/v1/embeddings"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return len(json.load(answer)["data"])

    began_s = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as clients:
        assert sum(clients.map(ask, calls)) == len(texts), "a text without a vector"
    return len(texts) / (time.perf_counter() - began_s)


def measure(folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Return the rates of every round."""
    rates: dict[str, list[float]] = {}
    texts = made_texts()
    for _ in range(num_rounds):
        padded = Padded(folder)
        padded.texts_per_s(texts[:_CALL_TEXTS])  # what is first is slow
        rates.setdefault("transformers", []).append(padded.texts_per_s(texts))
        with served(folder, "aligned_slo", "elastic", more_settings=[f"model.dtype={_DTYPE}"]) as port:
            served_texts_per_s(port, folder.name, texts, "default")
            for tier in _TIERS:
                rates.setdefault(f"served, {tier}", []).append(served_texts_per_s(port, folder.name, texts, tier))
        print(rates, flush=True)
    return rates


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of an encoder whose vectors are means")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.model
        if folder is None:
            folder = Path(name) / "minilm"
            folder.mkdir()
            make_tiny_encoder(folder, "bert", **_MINILM)
        rates = measure(folder, arguments.rounds)
    medians = {system: statistics.median(values) for system, values in rates.items()}
    ratios = {system: rate / medians["transformers"] for system, rate in medians.items() if system != "transformers"}
    print(ratios)
    figures = {"model": folder.name, "dtype": _DTYPE, "texts": _NUM_TEXTS, "texts_per_s": rates}
    print(write_result(NAME, figures | {"to_transformers": ratios}))


if __name__ == "__main__":
    main()

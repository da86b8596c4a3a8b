"""How likely a model finds a text: by which a quantised model is compared with what it was made of."""

import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.device.cores import has_native_bfloat16
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.worker_engine import load_decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.served_model import load_tokenizer, resolve_model

_PIECE_LEN = 512  # tokens of one pass
_FEWEST = 2
_SCORED = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=1)


class TextScores(NamedTuple):
    """A model's logarithms of the probability of each token of a text, and the token that it found likeliest there."""

    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]
    weight_bytes: int  # in a worker

    @property
    def perplexity(self) -> float:
        """Return e to the mean surprise of a token: of so many equally likely ones the model would seem to choose."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: "TextScores") -> float:
        """Return the share of places at which both find the same token likeliest."""
        same = [ours == theirs for ours, theirs in zip(self.likeliest, other.likeliest, strict=True)]
        return sum(same) / len(same)


def shipped_text() -> str:
    return files("alignedserve.offline").joinpath("prose.txt").read_text()


def score_text(folder: Path, text: str, note: Callable[[int, int], None]) -> TextScores:
    """Compute the model in `folder` on the CPU, as it would be served. Raises ModelError, ConfigError."""
    served = resolve_model(ModelSectionConfig(path=str(folder)), has_bfloat16=has_native_bfloat16())
    tokens = load_tokenizer(served).encode_text(text)
    length = min(_PIECE_LEN, served.max_context_len - 1)
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    pieces = [piece for piece in pieces if len(piece) >= _FEWEST]
    if not pieces:
        raise ConfigError("the text has fewer than two tokens")
    decoder = load_decoder(served, torch.device("cpu"), None)
    layout = served.block_layout(served.default_block_size)
    blocks = tuple(map(BlockId, range(blocks_for(length + 1, layout.block_size))))
    engine = Engine(
        model=decoder,
        storage=BlockStorage(layout, len(blocks)),
        options=EngineOptions(max_sequences=1, max_context_len=length + 1),
    )
    scored = []
    for number, piece in enumerate(pieces):
        note(number, len(pieces))
        request_id = RequestId(str(number))
        engine.add_sequence(NewSequence(request_id, tuple(piece), len(piece), 0, blocks, _SCORED))
        output = engine.execute([StepSlice(request_id, len(piece))])
        scored += [entry for part in output.prompt_logprobs for entry in part.entries]
        engine.remove_sequence(request_id)
    note(len(pieces), len(pieces))
    logprobs = tuple(entry.logprob for entry in scored)
    return TextScores(logprobs, tuple(entry.top[0][0] for entry in scored), served.weight_bytes)

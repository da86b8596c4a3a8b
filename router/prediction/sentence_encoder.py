"""An optional sentence encoder: a BERT-like network (as ALISE uses), run in numpy from its safetensors.

The folder holds `config.json`, `model.safetensors` and `tokenizer.json`, as MiniLM and similar models are published.
Nothing in it is executed or unpickled. On one core a forward pass takes tens of milliseconds, so predictions come late.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.text.tokenizer import Tokenizer
from router.prediction.encoders import KEY_LEN, PromptCode, normalised, random_projection, window_of
from router.prediction.tensors import FloatTensors

_MAX_CONFIG_BYTES = 1 << 20
_MAX_WIDTH = 1 << 14

Rows = npt.NDArray[np.float32]


class SentenceEncoder:
    """Mean of the last hidden states of the prompt's text. `decode` turns served token ids into text.

    Raises ModelError if a file is missing or malformed, UnsupportedModel if it is not a BERT.
    """

    least_similarity = 0.8

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str], *, seed: int = 0) -> None:
        self._decode = decode
        self._network = BertNetwork(folder)
        self._tokenizer = Tokenizer.load(folder)
        self.num_features = self._network.width
        self._to_key = random_projection(self.num_features, KEY_LEN, seed)

    def encode(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        """See PromptEncoder. A text longer than the network takes is cut off."""
        ids = self._tokenizer.encode(self._decode(window_of(prompt_token_ids)))
        pooled = normalised(self._network.hidden_states(ids[: self._network.max_len]).mean(axis=0))
        return PromptCode(pooled, normalised(pooled @ self._to_key))


class BertNetwork:
    """Weights and forward pass of a BERT encoder without its pooling head."""

    def __init__(self, folder: Path) -> None:
        path = folder / "config.json"
        fields = JsonFields(read_json_object(path, _MAX_CONFIG_BYTES), str(path))
        kind, activation = fields.text("model_type"), fields.text("hidden_act", "gelu")
        if (kind, activation) != ("bert", "gelu"):
            raise UnsupportedModel(
                f"{path}: a sentence encoder must be a bert with gelu, not a {kind} with {activation}."
            )
        self.width = fields.integer("hidden_size", 1, _MAX_WIDTH)
        self.max_len = fields.integer("max_position_embeddings", 1, _MAX_WIDTH)
        self._num_heads = fields.integer("num_attention_heads", 1, self.width)
        if self.width % self._num_heads:
            raise UnsupportedModel(f"{path}: hidden_size must be a multiple of num_attention_heads.")
        self._epsilon = np.float32(fields.number("layer_norm_eps", 0.0, 1.0, 1e-12))
        tensors = FloatTensors(folder)
        self._prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
        self._layers = range(fields.integer("num_hidden_layers", 1, 128))
        self._weights: dict[str, Rows] = {}
        self._load(tensors)
        try:
            self.hidden_states([0])
        except (ValueError, IndexError) as error:
            raise ModelError(f"{folder}: its tensors do not have the sizes that {path.name} says.") from error

    def hidden_states(self, token_ids: Sequence[int]) -> Rows:
        """Compute the last hidden states [len(token_ids), width] of at most `max_len` tokens."""
        words, positions = self._of("embeddings.word_embeddings"), self._of("embeddings.position_embeddings")
        ids = np.minimum(np.array(token_ids, dtype=np.int64), len(words) - 1)
        types = self._of("embeddings.token_type_embeddings")
        hidden = self._norm(words[ids] + positions[: len(ids)] + types[0], "embeddings.LayerNorm")
        for number in self._layers:
            layer = f"encoder.layer.{number}"
            attended = self._linear(
                self._attended(hidden, f"{layer}.attention.self"), f"{layer}.attention.output.dense"
            )
            hidden = self._norm(hidden + attended, f"{layer}.attention.output.LayerNorm")
            inner = _gelu(self._linear(hidden, f"{layer}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return hidden

    def _load(self, tensors: FloatTensors) -> None:
        embeddings = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        dense = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
        dense += ["intermediate.dense", "output.dense"]
        norms = ["embeddings.LayerNorm"]
        matrices = [f"embeddings.{name}" for name in embeddings]
        for number in self._layers:
            matrices += [f"encoder.layer.{number}.{name}" for name in dense]
            norms += [f"encoder.layer.{number}.{name}.LayerNorm" for name in ("attention.output", "output")]
        for name in matrices:
            self._weights[f"{name}.weight"] = tensors.read(f"{self._prefix}{name}.weight", num_dimensions=2)
        for name in norms:
            self._weights[f"{name}.weight"] = tensors.read(f"{self._prefix}{name}.weight", num_dimensions=1)
        for name in (*matrices[len(embeddings) :], *norms):
            self._weights[f"{name}.bias"] = tensors.read(f"{self._prefix}{name}.bias", num_dimensions=1)

    def _of(self, name: str) -> Rows:
        return self._weights[f"{name}.weight"]

    def _linear(self, rows: Rows, name: str) -> Rows:
        moved: Rows = rows @ self._of(name).T + self._weights[f"{name}.bias"]
        return moved

    def _norm(self, rows: Rows, name: str) -> Rows:
        centred = rows - rows.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + self._epsilon)
        scaled: Rows = centred / deviation * self._of(name) + self._weights[f"{name}.bias"]
        return scaled

    def _attended(self, hidden: Rows, name: str) -> Rows:
        head_len = self.width // self._num_heads
        query, key, value = (
            self._linear(hidden, f"{name}.{part}").reshape(-1, self._num_heads, head_len).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / np.float32(head_len**0.5)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.ascontiguousarray((weights @ value).swapaxes(0, 1)).reshape(len(hidden), self.width)


def _gelu(rows: Rows) -> Rows:
    """Compute GELU with erf by approximation 7.1.26 of Abramowitz and Stegun (error below 1.5e-7)."""
    scaled = np.abs(rows) / np.float32(2**0.5)
    t = 1.0 / (1.0 + np.float32(0.3275911) * scaled)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = (series * np.exp(-scaled * scaled)).astype(np.float32)
    return rows * np.where(rows >= 0, 1 - tail / 2, tail / 2)

"""The served model's own token embeddings, mean-pooled: needs no other model and runs none."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import is_gguf
from alignedserve.runtime.model.model_config import Family
from alignedserve.runtime.model.weight_names import PARAMETER_NAMES
from router.prediction.encoders import KEY_LEN, PromptCode, normalised, random_projection, window_of
from router.prediction.tensors import FloatTensors, gguf_embedding

_MAX_FEATURES = 256


class TokenEmbeddings:
    """Mean of the embedding rows of a prompt's tokens, less the mean of all rows.

    The mean is most of a trained embedding and does not tell prompts apart, so it is subtracted. Rows longer than 256
    are reduced to 256 by a seeded random projection, and keys to KEY_LEN by another.
    """

    least_similarity = 0.9

    def __init__(self, rows: npt.NDArray[np.float32], *, seed: int = 0) -> None:
        rows = rows - rows.mean(axis=0)
        if rows.shape[1] > _MAX_FEATURES:
            rows = rows @ random_projection(rows.shape[1], _MAX_FEATURES, seed)
        self._rows = rows
        self.num_features = rows.shape[1]
        self._to_key = random_projection(self.num_features, KEY_LEN, seed + 1)

    @classmethod
    def of_model(cls, folder: Path, family: Family, *, seed: int = 0) -> "TokenEmbeddings":
        """Load the embeddings of the model in this folder or GGUF file. Raises ModelError if its files hold none."""
        if is_gguf(folder):
            return cls(gguf_embedding(folder), seed=seed)
        names = PARAMETER_NAMES[family]
        tensors = FloatTensors(folder)
        for prefix in names.prefixes:
            name = f"{prefix}{names.embedding}.weight"
            if name in tensors:
                return cls(tensors.read(name, num_dimensions=2), seed=seed)
        raise ModelError(f"{folder} holds no token embedding ({names.embedding}.weight).")

    def encode(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        """See PromptEncoder. Ids beyond the vocabulary, which no tokenizer emits, count as the last one."""
        ids = np.minimum(np.array(window_of(prompt_token_ids), dtype=np.int64), len(self._rows) - 1)
        pooled = normalised(self._rows[ids].mean(axis=0))
        return PromptCode(pooled, normalised(pooled @ self._to_key))

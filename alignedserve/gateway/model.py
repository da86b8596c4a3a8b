"""What the gateway knows of the model it serves."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under the name that clients use."""

    name: str
    folder: Path  # holds tokenizer.json
    max_context_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...] = ()
    created: int = 0  # Unix time, for /v1/models

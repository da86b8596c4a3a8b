"""The served model as clients see it."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model under the name that clients use."""

    name: str
    folder: Path  # holds tokenizer.json
    max_context_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, for /v1/models
    vocab_size: int | None = None  # rows of the embedding; None: as many as the tokenizer has tokens
    tool_format: str | None = None  # how the model writes tool calls; None: as its chat template tells
    reasoning_format: str | None = None  # how it marks a thought; None: as its chat template tells
    chat_template: str | None = None  # instead of the model's own

    def load_tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer. Raises ModelError."""
        return Tokenizer.load(self.folder, self.vocab_size, self.chat_template)

    @classmethod
    def of(cls, served: ServedModel) -> "ModelCard":
        """Return the card of a resolved model."""
        config = served.config
        return cls(
            served.name,
            served.folder,
            served.max_context_len,
            config.eos_token_ids,
            vocab_size=config.vocab_size,
            tool_format=served.tool_format,
            reasoning_format=served.reasoning_format,
            chat_template=served.chat_template,
        )

"""The process that reads long bodies. Reads two frames for each, an Order and the body; writes one, the Outcome."""

import asyncio
import logging
import os
import sys
from pathlib import Path

from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ModelError
from alignedserve.gateway.long_bodies.messages import NotRead, Order, Outcome, decode_order, encode
from alignedserve.gateway.long_bodies.reading import BodyReading, LoadedModel
from alignedserve.process.frames import read_frame, write_frame
from alignedserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NICENESS = 5  # streams go first where cores are few
_MAX_TOKENIZERS = 8


def main() -> None:
    """Read bodies until the input ends."""
    os.nice(_NICENESS)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    models = _Models()
    with asyncio.Runner() as runner:
        while (described := read_frame(source)) is not None and (raw := read_frame(source)) is not None:
            write_frame(target, encode(runner.run(_outcome(decode_order(described), raw, models))))


async def _outcome(order: Order, raw: bytes, models: "_Models") -> Outcome:
    def find(name: str | None) -> LoadedModel | None:
        place = (0 if order.cards else None) if name is None else order.names.get(name)
        return None if place is None else models.get(order.cards[place], order.config)

    try:
        return await BodyReading(order.path, order.config, find).read(raw)
    except Exception:
        logger.exception("a long body could not be read")
        return NotRead()


class _Models:
    """The tokenizers that were used last."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[Path, int | None, str | None], Tokenizer] = {}
        self._lanes = WorkLanes()

    def get(self, card: ModelCard, config: GatewayConfig) -> LoadedModel | None:
        """Return the model of a card; None: its tokenizer cannot be loaded."""
        key = (card.folder, card.vocab_size, card.chat_template)
        tokenizer = self._tokenizers.pop(key, None)
        try:
            tokenizer = tokenizer or card.load_tokenizer()
        except ModelError:
            return None
        self._tokenizers[key] = tokenizer
        while len(self._tokenizers) > _MAX_TOKENIZERS:
            del self._tokenizers[next(iter(self._tokenizers))]
        return LoadedModel(card, tokenizer, config, self._lanes)

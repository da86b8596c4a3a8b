"""Checks grammars before requests are taken: the workers will compile the same text, under the same limits."""

import asyncio
from collections.abc import Sequence
from functools import partial
from threading import Lock

from alignedserve.api.errors import Unavailable
from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.compiler import GrammarError
from alignedserve.runtime.grammar.trials import GrammarTrials
from alignedserve.runtime.grammar.vocabulary import token_table
from alignedserve.text.tokenizer import Tokenizer

_CLOSED = "The model is served no more."


class GrammarChecker:
    """Starts its process when the first grammar comes, and remembers the grammars that were used last."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._load = partial(token_table, tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos_token_ids)
        self._trials: GrammarTrials | None = None
        self._is_closed = False
        self._lock = Lock()

    async def check(self, grammar: str, tenant: str = "") -> None:
        """Return once the grammar of a tenant, which takes turns with others, has been compiled, in another process.

        Raises InvalidRequest if it cannot be, or not within seconds; Unavailable after `close`.
        """
        trial = self._started().start(grammar, tenant)
        try:
            await asyncio.shield(asyncio.wrap_future(trial))
        except GrammarError as error:
            raise InvalidRequest(str(error), code="invalid_grammar") from error
        except asyncio.CancelledError:
            if trial.cancelled():
                raise Unavailable(_CLOSED) from None
            raise

    def close(self) -> None:
        """End the process. May be repeated."""
        with self._lock:
            self._is_closed = True
            if self._trials is not None:
                self._trials.close()

    def _started(self) -> GrammarTrials:
        with self._lock:
            if self._is_closed:
                raise Unavailable(_CLOSED)
            if self._trials is None:
                self._trials = GrammarTrials(self._load)
            return self._trials

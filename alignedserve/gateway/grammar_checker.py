"""Checks grammars before requests are taken: the workers will compile the same text, under the same limits."""

import asyncio
from collections.abc import Sequence
from functools import partial
from threading import Lock

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.compiler import GrammarCompiler, GrammarError
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.runtime.model.tokenizer import Tokenizer


class GrammarChecker:
    """Loads the vocabulary when the first grammar comes, and remembers the grammars that were used last."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._load = partial(
            grammar_vocabulary, tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos_token_ids
        )
        self._compiler: GrammarCompiler | None = None
        self._lock = Lock()

    async def check(self, grammar: str) -> None:
        """Return once the grammar has been compiled, in a thread. Raises InvalidRequest if it cannot be."""
        try:
            await asyncio.wrap_future(self._started().compile(grammar))
        except GrammarError as error:
            raise InvalidRequest(str(error), code="invalid_grammar") from error

    def _started(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._load)
            return self._compiler

"""Grammars are not checked any more once their model is gone."""

from pathlib import Path

import pytest

from alignedserve.api.errors import Unavailable
from alignedserve.api.models.model_services import GrammarChecker
from alignedserve.text.tokenizer import Tokenizer
from tests.support.grammars import PERSON, regex_grammar


async def test_a_closed_checker_has_no_process_and_checks_nothing() -> None:
    checker = GrammarChecker(Tokenizer.load(Path("alignedserve/pocket/model")), eos_token_ids=(0,))
    await checker.check(PERSON)
    assert checker._trials is not None
    process = checker._trials._others.process._process
    assert process is not None
    checker.close()
    assert process.poll() is not None
    for grammar in (PERSON, regex_grammar("yes")):
        with pytest.raises(Unavailable):
            await checker.check(grammar)
    checker.close()

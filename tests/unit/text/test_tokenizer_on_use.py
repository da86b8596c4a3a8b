"""A tokenizer that is read when it is first used: once, with what reading raises."""

from collections.abc import Callable

import pytest

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_on_use import TokenizerOnUse


def counted(reads: list[str]) -> Callable[[], Tokenizer]:
    def read() -> Tokenizer:
        reads.append("read")
        return Tokenizer.load(pocket_folder())

    return read


def test_it_is_read_once_by_the_first_use() -> None:
    reads: list[str] = []
    tokenizer = TokenizerOnUse(counted(reads))
    assert reads == []
    assert tokenizer.decode(tokenizer.encode("spell otter")) == "spell otter"
    assert (tokenizer.vocab_size > 0, tokenizer.chat_template is not None) == (True, True)
    tokenizer.read()
    assert reads == ["read"]
    assert not hasattr(tokenizer, "no_such_attribute")


def test_what_reading_raises_comes_again_with_each_try() -> None:
    def fail() -> Tokenizer:
        raise ModelError("tokenizer.json is missing")

    tokenizer = TokenizerOnUse(fail)
    for _ in range(2):
        with pytest.raises(ModelError, match="is missing"):
            tokenizer.read()

"""`alignedserve quantize`, on the pocket model: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from alignedserve.cli.commands.quantize import quantize
from alignedserve.cli.options import QuantizeOptions
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.named_models import POCKET, model_path

pytestmark = pytest.mark.slow

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3


def test_perplexities_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT)
    options = QuantizeOptions(model_path(POCKET), "q4_k", output, text, json_output=True)
    assert quantize(options) == 0
    document = json.loads(capsys.readouterr().out)
    before, after = document["models"]
    assert document["tokens"] > 50
    assert before["same_likeliest"] == 1.0
    assert before["perplexity"] == pytest.approx(after["perplexity"], rel=0.3)
    assert before["perplexity"] != after["perplexity"]
    assert after["file_bytes"] < before["file_bytes"]
    assert (output / "tokenizer.json").exists()


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        quantize(QuantizeOptions(model_path(POCKET), "q4_k", tmp_path / "out", text))

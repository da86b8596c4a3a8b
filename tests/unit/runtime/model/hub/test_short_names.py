"""Short names stand for repositories and files on the hub; what is on this machine goes before them."""

from pathlib import Path

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.runtime.model import named_models as built_in
from alignedserve.runtime.model.hub.file_choice import parse_hub_name
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.named_models import SHORT_NAMES, full_name


class _Hub:
    """Fetches nothing, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def fetch(self, name: object, report: object, *, has_weights: bool) -> Path:
        self.asked.append(str(name))
        return Path("/cache/model.gguf")


def test_every_short_name_is_one_of_a_hub() -> None:
    assert [str(parse_hub_name(full)) for full in SHORT_NAMES.values()] == list(SHORT_NAMES.values())


def test_a_short_name_is_fetched_and_is_what_clients_call_the_model() -> None:
    hub = _Hub()
    local = with_local_model(ModelSectionConfig(path="qwen3"), hub=hub)  # type: ignore[arg-type]
    assert (local.path, local.served_model_name) == ("/cache/model.gguf", "qwen3")
    named = with_local_model(ModelSectionConfig(path="qwen3", served_model_name="chat"), hub=hub)  # type: ignore[arg-type]
    assert named.served_model_name == "chat"
    assert hub.asked == ["Qwen/Qwen3-0.6B-GGUF:Q8_0"] * 2


def test_what_is_here_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert full_name("qwen3") == "qwen3"
    assert full_name("a/b") == "a/b"
    monkeypatch.setattr(built_in, "_PACKAGE", "no_such_package_of_a_test")
    assert full_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr("alignedserve.runtime.model.named_models.smollm2_file", lambda: tmp_path)
    assert full_name("smollm2") == "smollm2"

"""Names on a hub, and what is none."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.hub.file_choice import HubName, names_hub_model, parse_hub_name
from tests.support.marks import each


@each(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b@main", HubName("a/b", "main")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b:Q4_K_M", HubName("a/b", None, "Q4_K_M")),
        ("a/b:Q4_K_M@v1.0", HubName("a/b", "v1.0", "Q4_K_M")),
        ("a/b@v1.0:model-Q8_0.gguf", HubName("a/b", "v1.0", "model-Q8_0.gguf")),
    ],
)
def test_parts_of_a_name(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@each(
    "text",
    [
        "pocket",
        "",
        "/a/b",
        "../b",
        "a/b/c",
        "a/b@",
        "a/b@../../x",
        "a/b c",
        "a/..b",
        "a/" + "b" * 100,
        "a/b\0",
        "https://huggingface.co/a/b",
    ],
)
def test_what_is_no_name_on_a_hub(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ORG/NAME\[:QUANTISATION\]\[@REVISION\]"):
        parse_hub_name(text)
    assert not names_hub_model(text)


def test_what_is_here_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_hub_model("models/tiny")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert not names_hub_model("models/tiny")
    assert not names_hub_model("models/absent.gguf")
    assert names_hub_model("models/absent:file.gguf")


@given(st.text("ab/:@.-_ \n", max_size=12))
def test_any_text_is_a_name_that_prints_as_itself_or_refused(text: str) -> None:
    try:
        name = parse_hub_name(text)
    except ConfigError:
        return
    assert parse_hub_name(str(name)) == name

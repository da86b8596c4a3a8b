"""The contents of the cache of downloads, and their removal."""

import shutil
from pathlib import Path

import pytest

from alignedserve.core.errors import ModelNotFound
from alignedserve.runtime.model.hub.file_choice import parse_hub_name
from alignedserve.runtime.model.hub.model_cache import list_models, remove_model
from alignedserve.runtime.model.hub.repository import Hub
from tests.support.servers.hub_samples import REPO, WEIGHTS, model_files
from tests.support.servers.hub_server import HubServer

pytestmark = pytest.mark.slow

TINY = parse_hub_name(REPO)


def summary(cache: Path) -> list[tuple[str, tuple[str, ...], str]]:
    return [(model.repo_id, model.revisions, model.weights) for model in list_models(cache)]


def test_nothing_was_ever_downloaded(cache: Path) -> None:
    assert list_models(cache) == []
    with pytest.raises(ModelNotFound, match="org/tiny is not in"):
        remove_model(TINY, cache)


def test_whole_and_half_models(hub: Hub, server: HubServer, cache: Path) -> None:
    server.add("org/gguf", {"m.Q4_K_M.gguf": b"GGUF" * 100})
    server.add("org/other", model_files())
    server.add("org/texts", model_files())
    hub.fetch(TINY)
    hub.fetch(parse_hub_name("org/gguf"))
    server.damages = True
    (cache / "models--org--other" / "blobs").mkdir(parents=True)
    (cache / "models--org--other" / "blobs" / "abc.incomplete").write_bytes(b"x" * 1000)
    hub.fetch(parse_hub_name("org/texts"), has_weights=False)
    assert summary(cache) == [
        ("org/gguf", ("main",), "m.Q4_K_M.gguf"),
        ("org/other", (), "incomplete"),
        ("org/texts", ("main",), "incomplete"),
        (REPO, ("main",), "safetensors"),
    ]
    sizes = {model.repo_id: model.num_bytes for model in list_models(cache)}
    assert sizes["org/other"] == 1000
    assert len(WEIGHTS) < sizes[REPO] < len(WEIGHTS) + 10_000


def test_split_models(hub: Hub, server: HubServer, cache: Path) -> None:
    server.add("org/gguf", {f"m-Q8_0-{number:05}-of-00003.gguf": bytes([number]) * 100 for number in (1, 2, 3)})
    first = hub.fetch(parse_hub_name("org/gguf"))
    assert summary(cache) == [("org/gguf", ("main",), "m-Q8_0-00001-of-00003.gguf and 2 more")]
    first.with_name("m-Q8_0-00002-of-00003.gguf").unlink()
    assert summary(cache) == [("org/gguf", ("main",), "m-Q8_0-00001-of-00003.gguf incomplete")]


def test_what_other_programs_left(hub: Hub, cache: Path) -> None:
    folder = hub.fetch(TINY)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert summary(cache) == [(REPO, ("main",), "pickle, not served")]
    (folder / "model.safetensors.index.json").write_text("{}")
    assert summary(cache) == [(REPO, ("main",), "damaged")]
    (cache / "datasets--org--tiny").mkdir()
    (cache / "models--org--empty").mkdir()
    shutil.rmtree(folder)
    assert {model.weights for model in list_models(cache)} == {"incomplete"}


def test_removal_of_one_model_leaves_its_copy(hub: Hub, server: HubServer, cache: Path) -> None:
    server.add("copy/tiny", model_files())
    hub.fetch(TINY)
    copy = hub.fetch(parse_hub_name("copy/tiny"))
    assert remove_model(TINY, cache) > len(WEIGHTS)
    assert summary(cache) == [("copy/tiny", ("main",), "safetensors")]
    assert (copy / "model.safetensors").read_bytes() == WEIGHTS
    assert not (cache / "models--org--tiny").exists()


def test_removal_of_one_revision_leaves_what_others_share(hub: Hub, server: HubServer, cache: Path) -> None:
    server.repositories[REPO].commit(model_files(**{"tokenizer.json": b'{"v": 2}'}), "v2")
    first, second = hub.fetch(TINY), hub.fetch(parse_hub_name(f"{REPO}@v2"))
    assert remove_model(parse_hub_name(f"{REPO}@main"), cache) < 1000
    assert not first.exists()
    assert (second / "model.safetensors").read_bytes() == WEIGHTS
    assert remove_model(parse_hub_name(f"{REPO}@{second.name}"), cache) > len(WEIGHTS)
    assert list_models(cache) == []


def test_removal_of_a_half(cache: Path, hub: Hub) -> None:
    half = cache / "models--org--tiny" / "blobs" / "abc.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 500)
    with pytest.raises(ModelNotFound):
        remove_model(parse_hub_name(f"{REPO}@main"), cache)
    assert remove_model(TINY, cache) == 500
    assert list_models(cache) == []

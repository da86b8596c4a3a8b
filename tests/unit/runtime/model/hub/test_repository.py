"""Models fetched from a hub: what comes, what is found again, and what is said when it does not come."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ModelError, ModelNotFound, StorageFull, UnsafeWeights, UnsupportedModel
from alignedserve.runtime.model.hub.file_choice import parse_hub_name
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.hub.repository import Hub
from tests.support.servers.hub_samples import REPO, WEIGHTS, model_files
from tests.support.servers.hub_server import HubServer

pytestmark = pytest.mark.slow

TINY = parse_hub_name(REPO)
Blobs = Callable[[], dict[str, int]]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to be offline from then on, as HF_HUB_OFFLINE=1 makes a process."""
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_only_the_files_that_serving_needs(hub: Hub, server: HubServer) -> None:
    seen: list[tuple[int, int]] = []
    folder = hub.fetch(TINY, lambda done, total: seen.append((done, total)))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert seen[-1] == (len(WEIGHTS), len(WEIGHTS))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_is_here_is_not_downloaded_again(hub: Hub, server: HubServer) -> None:
    folder = hub.fetch(TINY)
    server.requests.clear()
    assert hub.fetch(TINY) == folder
    assert [seen.path for seen in server.requests] == [f"/api/models/{REPO}"]
    server.requests.clear()
    assert hub.fetch(parse_hub_name(f"{REPO}@{folder.name}")) == folder
    assert server.requests == []


def test_revisions(hub: Hub, server: HubServer) -> None:
    first = hub.fetch(TINY)
    second = server.repositories[REPO].commit(model_files(**{"model.safetensors": b"other"}), "v2")
    assert hub.fetch(TINY) == first
    assert (hub.fetch(parse_hub_name(f"{REPO}@v2")) / "model.safetensors").read_bytes() == b"other"
    assert hub.fetch(parse_hub_name(f"{REPO}@{second}")).name == second
    server.repositories[REPO].refs["main"] = second
    assert hub.fetch(TINY).name == second
    for revision in ("v3", "0" * 40):
        with pytest.raises(ModelNotFound, match=rf"has no revision '{revision}' on {server.url}"):
            hub.fetch(parse_hub_name(f"{REPO}@{revision}"))


def test_shards_are_those_of_the_index(hub: Hub, server: HubServer) -> None:
    shards = {f"model-{number}.safetensors": WEIGHTS[number:] for number in (1, 2, 3)}
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    files = {**model_files(), **shards, "model.safetensors.index.json": index}
    del files["model.safetensors"]
    server.add("org/shards", files)
    folder = hub.fetch(parse_hub_name("org/shards"))
    assert {path.name for path in folder.glob("*.safetensors")} == {"model-1.safetensors", "model-2.safetensors"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "model-9.safetensors"}}).encode()
    server.add("org/broken", files)
    with pytest.raises(ModelNotFound, match=r"has no model-9\.safetensors, which its model\.safetensors\.index\.json"):
        hub.fetch(parse_hub_name("org/broken"))
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    server.add("org/hostile", files)
    with pytest.raises(ModelError, match="is not the name of a safetensors file"):
        hub.fetch(parse_hub_name("org/hostile"))


def test_one_gguf_file_and_nothing_else(hub: Hub, server: HubServer) -> None:
    gguf = {"m-Q4_K_M.gguf": b"GGUF4" * 1000, "m-Q8_0.gguf": b"GGUF8"}
    server.add("org/gguf", {"README.md": b"", "config.json": b"{}", **gguf})
    file = hub.fetch(parse_hub_name("org/gguf:q4_k_m"))
    assert (file.name, file.read_bytes()) == ("m-Q4_K_M.gguf", gguf["m-Q4_K_M.gguf"])
    assert [path.name for path in file.parent.iterdir()] == ["m-Q4_K_M.gguf"]


def test_what_the_engine_does_not_have_is_refused_before_its_weights_come(hub: Hub, server: HubServer) -> None:
    server.add("org/mamba", model_files(**{"config.json": b'{"model_type": "mamba"}'}))
    with pytest.raises(UnsupportedModel, match="mamba"):
        hub.fetch(parse_hub_name("org/mamba"))
    assert server.downloads() == []


def test_pickle_is_refused_and_nothing_of_it_downloaded(hub: Hub, server: HubServer, blobs: Blobs) -> None:
    files = model_files()
    del files["model.safetensors"]
    server.add("org/pickle", files)
    with pytest.raises(UnsafeWeights, match=r"org/pickle has weights only as pytorch_model\.bin"):
        hub.fetch(parse_hub_name("org/pickle"))
    assert (server.downloads(), blobs()) == ([], {})


def test_a_repository_that_does_not_exist(hub: Hub, server: HubServer) -> None:
    with pytest.raises(ModelNotFound, match=rf"neither a folder here nor a model on {server.url}.*HF_TOKEN"):
        hub.fetch(parse_hub_name("org/absent"))


def test_a_gated_model_needs_the_token_of_who_accepted(server: HubServer, cache: Path) -> None:
    server.repositories[REPO].is_gated = True
    for token in (None, "hf_other"):
        with pytest.raises(ModelError, match=rf"gated: accept its licence on {server.url}/{REPO} and set HF_TOKEN"):
            Hub(endpoint=server.url, cache=cache, token=token).fetch(TINY)
    Hub(endpoint=server.url, cache=cache, token=server.token).fetch(TINY)


def test_the_token_goes_to_the_hub_and_not_to_the_storage(server: HubServer, cache: Path) -> None:
    server.repositories[REPO].is_private = True
    with pytest.raises(ModelNotFound, match="HF_TOKEN"):
        Hub(endpoint=server.url, cache=cache, token="hf_other").fetch(TINY)
    Hub(endpoint=server.url, cache=cache, token=server.token).fetch(TINY)
    stored = server.downloads()
    assert len(stored) == 1
    assert "authorization" not in stored[0].headers


def test_offline_serves_what_is_here(hub: Hub, server: HubServer, offline: Callable[[], None]) -> None:
    folder = hub.fetch(TINY)
    server.requests.clear()
    offline()
    assert hub.fetch(TINY) == folder
    assert server.requests == []
    for name in ("org/other", f"{REPO}@v2", f"{REPO}@{'1' * 40}"):
        with pytest.raises(ModelNotFound, match=r"is not downloaded, or not completely, and HF_HUB_OFFLINE is set"):
            hub.fetch(parse_hub_name(name))


def test_offline_with_half_a_download(
    hub: Hub, server: HubServer, offline: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(1 << 20, server)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(TINY, interrupt_at(1 << 20))
    with monkeypatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelNotFound, match=r"half downloaded, without model\.safetensors, and HF_HUB_OFFLINE"):
            hub.fetch(TINY)
    folder = hub.fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "range" in server.downloads()[-1].headers


def stop_after(num_bytes: int, server: HubServer) -> None:
    """Slow the server down, so that a client that stops has not got everything."""
    server.bytes_per_s = 32 * num_bytes


def interrupt_at(num_bytes: int) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if done >= num_bytes:
            raise KeyboardInterrupt

    return report


def test_a_hub_that_cannot_be_reached(cache: Path, server: HubServer, hub: Hub) -> None:
    folder = hub.fetch(TINY)
    nowhere = Hub(endpoint="http://127.0.0.1:9", cache=cache)
    assert nowhere.fetch(TINY) == folder
    with pytest.raises(ModelNotFound, match=r"http://127\.0\.0\.1:9 cannot be reached \(ConnectError"):
        nowhere.fetch(parse_hub_name("org/other"))


def test_an_address_that_is_no_hub(server: HubServer, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"org/tiny"):
        Hub(endpoint=f"{server.url}/elsewhere", cache=cache).fetch(TINY)


def test_too_little_space_is_said_before_the_download(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1_000_000))
    with pytest.raises(StorageFull, match=r"org/tiny needs 4 MB more, and .* has 1 MB left; HF_HOME"):
        hub.fetch(TINY)
    assert server.downloads() == []


def test_the_section_of_a_configuration(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = with_local_model(ModelSectionConfig(path=f"{REPO}@main"), hub=hub)
    assert (Path(section.path) / "model.safetensors").exists()
    assert section.served_model_name == REPO
    named = ModelSectionConfig(path=REPO, served_model_name="mine")
    assert with_local_model(named, hub=hub).served_model_name == "mine"
    for path in ("pocket", str(tmp_path), "absent", "./org/tiny", str(tmp_path / "absent")):
        assert with_local_model(ModelSectionConfig(path=path), hub=hub) == ModelSectionConfig(path=path)

"""Models pulled from a hub of the tests' own and served under their names there: a checkpoint that transformers wrote,
and a GGUF model in two files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from alignedserve.core.request import SamplingParams
from alignedserve.offline.llm import LLM
from tests.cluster.serving import FLOAT32, serving
from tests.support.models.converted_gguf import split_in_parts
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_models import make_tiny_model
from tests.support.servers.hub_server import HubServer

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

REPO = "org/tiny-llama"
GGUF_REPO = "org/tiny-GGUF"
PROMPT = (5, 6, 7, 8, 9)
NUM_TOKENS = 12


def write_checkpoint(folder: Path) -> Any:
    """Write config and random weights of transformers, and a tokenizer of letters of the private use area."""
    model = make_tiny_model(folder, "llama")
    vocabulary = {chr(0xE000 + number): number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0xE000)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def expected_text(model: Any) -> str:
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return "".join(chr(0xE000 + token) for token in tokens[0, len(PROMPT) :].tolist())


def test_pulled_and_served_with_the_answers_of_transformers(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    with HubServer() as server:
        repository = server.add(REPO, {**files, "pytorch_model.bin": b"never"})
        repository.is_gated = True
        environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": server.token}
        with serving(tmp_path / "run", f"{REPO}@main", *FLOAT32, environment=environment) as cluster:
            cluster.wait_ready()
            status, answer = cluster.complete(PROMPT, NUM_TOKENS, model=REPO, ignore_eos=True)
            assert (status, answer["choices"][0]["text"]) == (200, expected_text(model)), answer
            code, _, err = cluster.stop()
            assert (code, cluster.leftovers()) == (0, [])
            assert f"Downloaded {REPO}@main: " in err
        assert not list((tmp_path / "home").rglob("pytorch_model.bin"))
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    with serving(tmp_path / "run", REPO, environment=offline) as cluster:
        cluster.wait_ready()
        assert cluster.complete(PROMPT, 2, model=REPO)[0] == 200


def test_one_quantisation_of_a_split_gguf_model(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "tiny-Q8_0.gguf", "llama", ("Q8_0", "Q4_0"))
    parts = {f"Q8_0/{part.name}": part.read_bytes() for part in split_in_parts(whole, 2)}
    llm = LLM(str(whole), memory_bytes=8 << 20, dtype="float32")
    question = "hello, hello"
    (expected,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    llm.close()
    with HubServer() as server:
        server.add(GGUF_REPO, {**parts, "tiny-Q6_K.gguf": b"another", "pytorch_model.bin": b"never"})
        environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        with serving(tmp_path / "run", f"{GGUF_REPO}:Q8_0", environment=environment) as cluster:
            cluster.wait_ready()
            status, answer = cluster.chat(question, NUM_TOKENS, model=GGUF_REPO)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, expected.text), answer
            assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
            code, out, _ = cluster.stop()
            assert (code, cluster.leftovers()) == (0, [])
        assert "multiplied in blocks" in " ".join(out.replace("│", " ").split())  # in a box, on lines of any width
        assert len(server.downloads()) == len(parts)

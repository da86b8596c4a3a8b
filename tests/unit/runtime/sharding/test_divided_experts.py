"""Experts of a model that several processes share, whole: the same bits as of one process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.expert_group import (
    ElsewhereOfLayer,
    ExpertLink,
    ExpertSpec,
    answer_requests,
    load_share,
)
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.sharding.tensor_shard import ExpertShare, check_expert_parallel
from alignedserve.runtime.model.weight_files import ModelSpec, load_weights
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading
from kernels.cpu.rank_exchange import ExchangeBroken
from tests.support.models.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

SCORED = SamplingParams(temperature=0.0, max_tokens=100, num_logprobs=3)
FAMILIES = ("gpt_oss", "deepseek_v3", "llama4_text", "granitemoehybrid", "qwen3_next")  # each routes in its way


@contextmanager
def shared(folder: Path, size: int, **form: str) -> Iterator[Decoder]:
    """Load a model whose experts are on threads, in as many shares."""
    config, dtype = read_config(folder), form.get("dtype", "float32")
    spec = ExpertSpec(ModelSpec(config, folder, dtype, form.get("quantization")), size, 1, 20.0)
    links, threads, ends = list[ExpertLink](), list[threading.Thread](), list[socket.socket]()
    for index in range(1, size):
        ours, theirs = socket.socketpair()
        given = (theirs, load_share(spec, index), config.hidden_size, torch_dtype(dtype))
        threads.append(threading.Thread(target=answer_requests, args=given, daemon=True))
        links.append(ExpertLink(ours, spec.num_experts(index), spec.timeout_s))
        ends += [ours, theirs]
        threads[-1].start()
    reading = ExpertReading(spec.share(0), lambda layer: [ElsewhereOfLayer(link, layer) for link in links])
    read: dict[str, Any] = {"quantization": form.get("quantization"), "sharing": reading}
    yield Decoder(config, load_weights(folder, config, torch_dtype(dtype), **read))
    for end in ends[::2]:
        end.close()
    for thread in threads:
        thread.join()
    for end in ends[1::2]:
        end.close()


def answers(decoder: Decoder) -> list[SampledToken]:
    """A prompt in two chunks and its answer, beside another."""
    engine = TinyEngine(decoder)
    engine.add("a", random_tokens(1, 40), SCORED)
    engine.add("b", random_tokens(2, 7), SCORED)
    engine.step(a=25, b=7)
    return engine.generate("a", 10, "b")


@pytest.mark.parametrize("size", [2, 3])
def test_shares_compute_what_one_process_does(size: int, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mixtral")
    with shared(tmp_path, size) as decoder:
        assert answers(decoder) == answers(tiny_decoder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_routing(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    with shared(tmp_path, 2) as decoder:
        assert answers(decoder) == answers(tiny_decoder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_other_forms_of_weights(form: dict[str, Any], tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe")
    with shared(tmp_path, 2, **form) as decoder:
        assert answers(decoder) == answers(tiny_decoder(tmp_path, **form))


def test_random_weights_are_those_of_one_process(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mixtral")
    config = read_config(tmp_path)
    whole = load_weights(None, config, torch.float32)
    own = load_weights(None, config, torch.float32, sharing=ExpertReading(ExpertShare(0, 2)))
    assert torch.equal(whole.embedding.index_select(0, torch.arange(9)), own.embedding.index_select(0, torch.arange(9)))
    elsewhere = load_share(ExpertSpec(ModelSpec(config, None, "float32"), 2, 1, 1.0), 1)
    x = torch.randn(3, config.hidden_size)
    for layer, experts in elsewhere.items():
        all_of_layer = whole.layers[layer].mlp._experts  # type: ignore[union-attr]
        assert all(torch.equal(one(x), other(x)) for one, other in zip(experts, all_of_layer[2:], strict=False))


def test_a_process_that_is_lost_breaks_the_step() -> None:
    ours, theirs = socket.socketpair()
    link = ExpertLink(ours, 2, 5.0)
    link.request(0, torch.zeros(2, 4), [1, 1])
    theirs.close()
    with pytest.raises(ExchangeBroken):
        link.answer()
    with pytest.raises(ExchangeBroken):
        link.request(0, torch.zeros(2, 4), [1, 1])
    ours.close()


def test_where_it_cannot_help_it_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mixtral")
    config = read_config(tmp_path)
    check_expert_parallel(config, 1, 2, "cuda")
    refused = {
        "has no experts": (replace(config, experts=None), 2, 1, "cpu"),
        "ranks and stages": (config, 2, 2, "cpu"),
        "not on cuda": (config, 2, 1, "cuda"),
        "experts are whole": (config, 65, 1, "cpu"),
    }
    for message, given in refused.items():
        with pytest.raises(ConfigError, match=message):
            check_expert_parallel(*given)

"""Other shapes of cluster and other models than the default, served for real."""

import json
from pathlib import Path

import pytest

from tests.cluster.serving import EXACT, Serving, serving
from tests.cluster.streams import texts
from tests.gateway.support import write_tokenizer
from tests.support.models.tiny_models import make_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

COLOCATED = ("--set", "topology=colocated")
NUM_COLOCATED = 2  # one is on every node of hosts/test_driver_and_head.py


def test_colocated(separate_cluster: Serving, tmp_path: Path, random_model: Path) -> None:
    options = (*COLOCATED, "--set", f"decode.count={NUM_COLOCATED}")
    with serving(tmp_path / "run", str(random_model), *EXACT, *options) as colocated:
        colocated.wait_ready()
        assert len(colocated.actors("KvPool")) == 1  # for prefix blocks, which the workers share
        assert not colocated.actors("PrefillWorker")
        assert not colocated.actors("DecodeWorker")
        assert len(colocated.actors("ColocatedWorker")) == NUM_COLOCATED
        assert texts(colocated, 100) == texts(separate_cluster, 100)
        colocated.wait_idle()
        assert len(colocated.arenas()) == 1
        code, out, err = colocated.stop()
        assert f"1 router, {NUM_COLOCATED} colocated workers" in out
        assert (code, colocated.leftovers()) == (0, []), err


def test_elastic(separate_cluster: Serving, cluster: Serving) -> None:
    """Two workers of the default topology."""
    assert len(cluster.actors("KvPool")) == 1  # for prefix blocks
    assert len(cluster.actors("ColocatedWorker")) == 2
    assert texts(cluster, 100) == texts(separate_cluster, 100)
    cluster.wait_idle()  # by then the router has told of both
    _, metrics = cluster.get("/metrics")
    assert metrics.count("alignedserve_worker_lean{") == 2
    cluster.actors("ColocatedWorker")[0].kill()
    assert texts(cluster, 100) == texts(separate_cluster, 100)
    cluster.wait_idle()


def test_another_model(tmp_path: Path) -> None:
    """Of another family and in another type; all others are compared with transformers in one process."""
    model = tmp_path / "model"
    make_tiny_model(model, "qwen3", vocab_size=400)  # as many as the tokenizer may have
    write_tokenizer(model)
    settings = ("--set", "topology=disaggregated", "--set", "model.dtype=bfloat16")
    with serving(tmp_path / "run", str(model), *settings) as cluster:
        cluster.wait_ready()
        status, answer = cluster.complete([5, 6, 7, 8], max_tokens=20, ignore_eos=True)
        assert status == 200, json.dumps(answer)
        assert answer["usage"]["completion_tokens"] == 20
        cluster.wait_for("alignedserve_handoffs_verified_total", lambda count: count >= 1)
        cluster.wait_idle()
        assert cluster.stop()[0] == 0

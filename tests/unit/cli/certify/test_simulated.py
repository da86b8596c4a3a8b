"""`alignedserve certify --simulated`: the whole command, on a small modelled server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.core.errors import ConfigError
from lab.commands.certify.command import certify
from lab.commands.certify.options import CertifyOptions
from lab.commands.certify.simulated import simulated_config


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["elastic", "disaggregated"])
def test_a_simulated_server_is_certified(tmp_path: Path, topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = CertifyOptions(
        is_simulated=True,
        topology=topology,
        burst_s=4.0,
        idle_s=1.0,
        num_bursts=1,
        num_lines=20,
        overrides=("decode.max_running_requests=8", "pool.memory_bytes=1GiB"),
        min_documents=50.0,
        max_attainment_loss=5.0,
        output=tmp_path / "certificate",
    )
    assert certify(options) == 0
    assert "held: 100.0% of chats were in time beside documents" in capsys.readouterr().out
    document = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert [phase["phase"] for phase in document["phases"]] == [
        "chat alone",
        "chat beside documents",
        "documents alone",
    ]
    assert document["figures"]["lines"]["chat beside documents"]["num_answered"] == 60
    assert topology in dict(document["about"])["server"]
    assert "Held: all 11 bounds" in (tmp_path / "certificate" / "certificate.html").read_text()


def test_the_model_and_the_workers_are_those_that_were_asked_for_and_a_bound_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("topology: elastic\ndecode: {kv_cache_bytes: 1GiB}\nengine: {tensor_parallel: 2}\n")
    options = CertifyOptions(
        is_simulated=True, model="opt-13b", config=path, burst_s=2.0, idle_s=0.0, num_bursts=1, num_lines=4, rate=2.0,
        document_output_len=8, overrides=("decode.max_running_requests=4",), max_ttft_p99_ratio=0.1, output=tmp_path,
    )  # fmt: skip
    assert certify(options) == 1
    assert "p99 of TTFT, on to off" in (tmp_path / "certificate.html").read_text()
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert dict(document["about"])["model"] == "opt-13b on 2 x a100-80g a worker"
    one = simulated_config(replace(options, overrides=("engine.tensor_parallel=1",)))
    assert simulated_config(options).memory_tokens > 2 * one.memory_tokens
    with pytest.raises(ConfigError, match="says itself which model"):
        simulated_config(replace(options, costs="fitted:no.json"))

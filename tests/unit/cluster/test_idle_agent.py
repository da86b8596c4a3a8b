"""What stands in for Ray's agents: the files that its node process waits for, and an end with that process."""

import subprocess
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    get_port_filename,
)

from alignedserve.cluster.local_ray.start import _idle_agent

pytestmark = pytest.mark.slow
_NODE = "ab" * 28


@pytest.mark.parametrize(
    ("kind", "ports"),
    [
        (
            ray_constants.PROCESS_TYPE_DASHBOARD_AGENT,
            {METRICS_AGENT_PORT_NAME: "-1", METRICS_EXPORT_PORT_NAME: "-1", DASHBOARD_AGENT_LISTEN_PORT_NAME: "-1"},
        ),
        (ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT, {RUNTIME_ENV_AGENT_PORT_NAME: "1"}),
    ],
)
def test_an_agent_that_serves_nothing(tmp_path: Path, kind: str, ports: dict[str, str]) -> None:
    command = [*_idle_agent(kind, ""), "agent.py", f"--node-id={_NODE}", "--minimal", f"--session-dir={tmp_path}"]
    assert Path(command[0]).name.startswith("python")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()  # as its node process ends
        assert process.wait(10) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        get_port_filename(_NODE, name): port for name, port in ports.items()
    }

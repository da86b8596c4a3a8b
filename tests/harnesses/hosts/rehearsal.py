"""The hosts of a rehearsal and the cluster on them: a cluster file of the checkout, with these hosts in it."""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from alignedserve.client.openai_client import OpenAiClient
from alignedserve.core.errors import ResourceError
from tests.harnesses.hosts.namespace_hosts import NamespaceHost, NamespaceHosts

PORT = 8000
_CLUSTER_NAME = "alignedserve-rehearsal"
_RAY_UP_S = 400.0
_NUM_UPS = 3
_ANSWER_S = 5.0
_USED_AGAIN_S = 480.0  # Ray tries to start a host again about once a minute
_POLL_S = 0.5
_NUM_LOG_LINES = 40
_ANSWERS = re.compile(r'^alignedserve_answers_total{[^}]*worker="([^"]+)"} (\S+)$', re.MULTILINE)
_STAMP = "2026-01-31 12:00:00,000"  # as logs begin
_RAY_WAS_SLOW = "timed out during startup"
# Small, as all hosts share the cores of one machine.
SETTINGS = (
    "gateway.host=node",
    "engine.threads_per_worker=1",
    "engine.calibration_s=0.2",
    "model.dtype=float32",
    "batches.enabled=false",
)


class Rehearsal:
    """The hosts and the cluster on them."""

    def __init__(
        self,
        hosts: NamespaceHosts,
        settings: Sequence[str],
        variables: Mapping[str, str] | None = None,
        models: Sequence[str] = (),
        file: str = "cluster.yaml",
    ) -> None:
        """`variables`: of the environment in every shell of the hosts, such as time-outs of Ray.

        `models`: as `alignedserve up` takes them; none: that of the settings. `file`: what `ray up` is given.
        """
        self.hosts = hosts
        self.api_key = secrets.token_hex(16)  # without which no gateway answers
        self._settings = settings
        self._models = models
        self._variables = dict(variables or {})
        self._shipped, self._file = Path(file), hosts.base / "cluster.yaml"

    def prepare(self) -> None:
        """Write the commands, the start-up file of shells and cluster.yaml, before the hosts are booted."""
        base, commands = self.hosts.base, self.hosts.base / "bin"
        commands.mkdir(parents=True)
        for name, module in (("ray", "ray.scripts.scripts"), ("alignedserve", "alignedserve"), ("python", "")):
            inside = f"-m {module} " if module else ""
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {inside}"$@"\n', encoding="utf-8")
            (commands / name).chmod(0o755)
        own = {"RAY_AUTH_MODE": "token", "PYTHONPATH": str(Path.cwd()), "ALIGNEDSERVE_API_KEYS": self.api_key}
        exported = " ".join(f"{name}={value}" for name, value in (own | self._variables).items())
        (base / "bashrc").write_text(f"export PATH={commands}:$PATH {exported}\n", encoding="utf-8")
        for kept in Path("/tmp/ray").glob(f"cluster-{_CLUSTER_NAME}.*"):
            kept.unlink()
        self._file.write_text(yaml.safe_dump(self._cluster_yaml(), width=10_000), encoding="utf-8")

    def _cluster_yaml(self) -> dict[str, Any]:
        """Return the shipped file with our hosts in it, and without copying and installing."""
        shipped: dict[str, Any] = yaml.safe_load(self._shipped.read_text(encoding="utf-8"))
        addresses = [host.address for host in self.hosts.hosts]
        shipped["cluster_name"] = _CLUSTER_NAME
        shipped["provider"] |= {"head_ip": addresses[0], "worker_ips": addresses[1:]}
        shipped["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.hosts.key)}
        shipped["min_workers"] = shipped["max_workers"] = len(addresses) - 1
        shipped["file_mounts"] = {}
        shipped["setup_commands"] = [line for line in shipped["setup_commands"] if "auth_token" in line]
        shipped["setup_commands"] = [
            line.replace("~/alignedserve/.venv/bin/ray", "ray") for line in shipped["setup_commands"]
        ]
        options = " ".join(f"--set {setting}" for setting in self._settings)
        *start, up = shipped["head_start_ray_commands"]
        up = up.replace("cd ~/alignedserve", f"cd {Path.cwd()}").replace(" up ", f" up {' '.join(self._models)} ")
        shipped["head_start_ray_commands"] = [*start, f"{up} {options}"]
        return shipped

    def ray(self, command: str) -> str:
        """Run `ray COMMAND cluster.yaml` as from a desk beside the hosts, and return what it printed."""
        environment = os.environ | {"HOME": str(self.hosts.base), "PYTHONPATH": str(Path.cwd())}
        arguments = [sys.executable, "-m", "ray.scripts.scripts", *command.split(), "-y", str(self._file)]
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=_RAY_UP_S, check=False
        )
        (self.hosts.base / f"ray-{command.split()[0]}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            raise ResourceError(f"`ray {command}` failed:\n{(done.stdout + done.stderr)[-8000:]}")
        return done.stdout

    def up(self) -> str:
        """Run `ray up` and return what it said when the cluster answered.

        It is safe to repeat, and is repeated where a machine that other programs keep busy did not start Ray within
        the 30 s that Ray gives itself.
        """
        for _ in range(_NUM_UPS - 1):
            try:
                return self.ray("up --no-config-cache")
            except ResourceError as error:
                if _RAY_WAS_SLOW not in str(error):
                    raise
                print("Ray's own processes did not start within 30 s; again", flush=True)
        return self.ray("up --no-config-cache")

    def on_host(self, index: int, command: str, timeout_s: float = 60.0) -> str:
        """Run a command in a shell of a host, as its user would."""
        done = self.hosts.hosts[index].run("bash", "-c", f". ~/.bashrc; {command}", timeout_s=timeout_s)
        return done.stdout + done.stderr

    def num_answers(self, index: int) -> dict[str, int]:
        """Return how many requests each worker has answered for this host's gateway."""
        request = urllib.request.Request(f"{self.urls()[index]}/metrics")
        request.add_header("Authorization", f"Bearer {self.api_key}")
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
            text = response.read().decode()
        return {name: int(float(count)) for name, count in _ANSWERS.findall(text)}

    def status(self) -> dict[str, Any]:
        """Return what `alignedserve status --json` says on the first host."""
        lines = self.on_host(0, "alignedserve status --json").splitlines()
        # Ray's own processes may write between, braces among them.
        found: dict[str, Any] = json.loads("\n".join(lines[lines.index("{") : lines.index("}") + 1]))
        return found

    def host_of(self, process: str) -> str | None:
        """Return the name of the host on which this process runs, by its name or its label in metrics."""
        names = {process, process.replace("decode-", "worker-")}
        return next((node["hostname"] for node in self.status()["nodes"] if names & node["actors"].keys()), None)

    def noticed_s(self, since: float) -> float | None:
        """Return how long after this Unix time the driver gave the last host up; None: it did not."""
        for line in self.on_host(0, "alignedserve logs driver").splitlines():
            if f"{self.hosts.hosts[-1]} is lost" in line:
                at = datetime.strptime(line[: len(_STAMP)], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
                if at >= since:
                    return at - since
        return None

    def wait_until_used(self, host: NamespaceHost) -> None:
        """Wait until the cluster has the host and its gateway answers. Raises ResourceError when that does not come."""
        ends_s = time.monotonic() + _USED_AGAIN_S
        while time.monotonic() < ends_s:
            # The gateway first: the status is a command's, which takes a core that the start of a host could use.
            if _is_ready(host) and any(
                node["hostname"] == host.name and node["actors"] for node in self.status()["nodes"]
            ):
                return
            time.sleep(_POLL_S)
        said = self.on_host(0, f"tail -n {_NUM_LOG_LINES} /tmp/ray/session_latest/logs/monitor.*")
        raise ResourceError(f"{host} is not used again after {_USED_AGAIN_S:.0f} s; Ray's autoscaler said:\n{said}")

    def clients(self) -> list[OpenAiClient]:
        """Return a client of each gateway of the hosts that are up."""
        return [OpenAiClient(url=url, api_key=self.api_key) for url in self.urls()]

    def urls(self) -> list[str]:
        """Return the addresses of the gateways of the hosts that are up."""
        return [_url(host) for host in self.hosts.hosts if host.process is not None]


def _is_ready(host: NamespaceHost) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{_url(host)}/ready", timeout=_ANSWER_S):
        return True
    return False


def _url(host: NamespaceHost) -> str:
    return f"http://{host.address}:{PORT}"

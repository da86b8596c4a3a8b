"""The rehearsal of a cluster on one machine: hosts of namespaces, the very `ray up`, a checked trace, a lost host.

Run as `python -m alignedserve.evaluation.cluster_demo`, as root, from the top of the checkout. It differs from servers
in three things: the software is there already (no copying, no installing), all hosts share this machine's cores, and
the file system is one.
"""

import argparse
import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignedserve.core.errors import AlignedServeError, ResourceError
from alignedserve.evaluation.checked_trace import plan_checked_trace
from alignedserve.evaluation.namespace_hosts import NamespaceHosts
from alignedserve.evaluation.pocket_calls import pocket_tokenizer, task_call
from alignedserve.loadgen.client import CompletionOutcome, OpenAiClient
from alignedserve.loadgen.load_generator import LoadGenerator
from alignedserve.loadgen.load_plan import LoadRequest
from alignedserve.pocket.tasks import is_correct
from alignedserve.workload.traces import shipped_trace

_MODEL = "pocket"
_PORT = 8000
_CLUSTER_NAME = "alignedserve-rehearsal"
_RAY_UP_S = 400.0
_NUM_UPS = 3
_MIN_HOSTS, _MAX_HOSTS = 3, 16  # two whose gateways are asked, and the one that is lost
_RAY_WAS_SLOW = "timed out during startup"
# Small, as all hosts share the cores of one machine.
SETTINGS = (
    "gateway.host=node",
    "engine.threads_per_worker=1",
    "engine.calibration_s=0.2",
    "model.dtype=float32",
    "batches.enabled=false",
    "topology=colocated",
)


@dataclass(slots=True)
class Verdict:
    """Counts the trace's requests by their outcome."""

    num_sent: int = 0
    num_completed: int = 0
    num_correct: int = 0
    num_corrupted: int = 0  # wrong under load or loss, and another answer alone
    lost: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Return whether every answer arrived whole."""
        return not self.lost and not self.num_corrupted


class Rehearsal:
    """The hosts and the cluster on them."""

    def __init__(self, hosts: NamespaceHosts, settings: Sequence[str]) -> None:
        self.hosts = hosts
        self._settings = settings
        self._file = hosts.base / "cluster.yaml"

    def prepare(self) -> None:
        """Write the commands, the start-up file of shells and cluster.yaml, before the hosts are booted."""
        base, commands = self.hosts.base, self.hosts.base / "bin"
        commands.mkdir(parents=True)
        for name, module in (("ray", "ray.scripts.scripts"), ("alignedserve", "alignedserve"), ("python", "")):
            inside = f"-m {module} " if module else ""
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {inside}"$@"\n', encoding="utf-8")
            (commands / name).chmod(0o755)
        (base / "bashrc").write_text(
            f"export PATH={commands}:$PATH RAY_AUTH_MODE=token PYTHONPATH={Path.cwd()}\n", encoding="utf-8"
        )
        for kept in Path("/tmp/ray").glob(f"cluster-{_CLUSTER_NAME}.*"):  # noqa: S108  (what Ray remembers of a former one)
            kept.unlink()
        self._file.write_text(yaml.safe_dump(self._cluster_yaml(), width=10_000), encoding="utf-8")

    def _cluster_yaml(self) -> dict[str, Any]:
        """Return the shipped file with our hosts in it, and without copying and installing."""
        shipped: dict[str, Any] = yaml.safe_load(Path("cluster.yaml").read_text(encoding="utf-8"))
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
        up = f"cd {Path.cwd()} && alignedserve up {options}"
        shipped["head_start_ray_commands"] = [*shipped["head_start_ray_commands"][:-1], up]
        return shipped

    def ray(self, command: str) -> str:
        """Run `ray COMMAND cluster.yaml` as from a desk beside the hosts, and return what it printed."""
        environment = os.environ | {"HOME": str(self.hosts.base), "PYTHONPATH": str(Path.cwd())}
        arguments = [sys.executable, "-m", "ray.scripts.scripts", *command.split(), "-y", str(self._file)]
        done = subprocess.run(  # noqa: S603
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

    def urls(self) -> list[str]:
        """Return the addresses of the gateways of the hosts that are up."""
        return [f"http://{host.address}:{_PORT}" for host in self.hosts.hosts if host.process is not None]


async def replay(urls: Sequence[str], duration_s: float, rate: float, at_s: float, hurt: "asyncio.Event") -> Verdict:
    """Replay the trace through these gateways in turn, set the event at that time, and judge every answer."""
    count_tokens = pocket_tokenizer()
    checked = plan_checked_trace(shipped_trace(), duration_s=duration_s, rate=rate, seed=0, count_tokens=count_tokens)
    calls = [task_call(task, _MODEL, count_tokens) for task in checked.tasks]
    clients = [OpenAiClient(url=url) for url in urls]
    for client in clients:
        await client.__aenter__()

    async def send(request: LoadRequest, outcome: CompletionOutcome) -> None:
        await clients[request.index % len(clients)].complete(calls[request.index], outcome)

    timer = asyncio.get_running_loop().call_later(at_s, hurt.set)
    try:
        run = await LoadGenerator(plan=checked.plan, send=send).run()
        verdict = Verdict(num_sent=len(run.sent))
        for sent in run.sent:
            task, outcome = checked.tasks[sent.request.index], sent.outcome
            if outcome.failure is not None:
                verdict.lost.append(f"{outcome.failure.label}: {outcome.failure.message}")
                continue
            verdict.num_completed += 1
            verdict.longest_pause_s = max(verdict.longest_pause_s, _longest_pause(outcome))
            if is_correct(task, outcome.text):
                verdict.num_correct += 1
                continue
            again = await clients[0].complete(calls[sent.request.index], CompletionOutcome())
            verdict.num_corrupted += again.text != outcome.text
        return verdict
    finally:
        timer.cancel()
        for client in clients:
            await client.__aexit__(None, None, None)


def _longest_pause(outcome: CompletionOutcome) -> float:
    times = [outcome.sent_s, *outcome.token_times_s]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


async def _lose_a_host(rehearsal: Rehearsal, options: argparse.Namespace) -> Verdict:
    hurt = asyncio.Event()
    lost = rehearsal.hosts.hosts[-1]

    async def kill() -> None:
        await hurt.wait()
        print(f"{options.kill_at:.0f} s: {lost.name} ({lost.address}) is killed with all its processes", flush=True)
        rehearsal.hosts.kill(lost)

    killing = asyncio.create_task(kill())
    try:
        verdict = await replay(rehearsal.urls()[:2], options.duration, options.rate, options.kill_at, hurt)
    finally:
        killing.cancel()
    if lost.process is not None:
        raise ResourceError(f"{lost.name} was not killed: the last answer came before --kill-at {options.kill_at:g}")
    return verdict


def _print_verdict(verdict: Verdict) -> None:
    print(f"{'requests sent':<32}{verdict.num_sent}")
    print(f"{'completed':<32}{verdict.num_completed}")
    print(f"{'correct':<32}{verdict.num_correct}")
    print(f"{'corrupted':<32}{verdict.num_corrupted}")
    print(f"{'lost':<32}{len(verdict.lost)}")
    print(f"{'longest pause before a token':<32}{verdict.longest_pause_s:.2f} s")
    for reason in verdict.lost[:5]:
        print(f"  lost: {reason}")


def _clear(base: Path) -> None:
    """Remove what a former rehearsal left. Raises ResourceError for any other folder: this runs as root."""
    if base.exists() and any(base.iterdir()) and not (base / "bin" / "alignedserve").exists():
        raise ResourceError(f"{base} is not empty, and not of a former rehearsal; choose another --base")
    shutil.rmtree(base, ignore_errors=True)


def run(options: argparse.Namespace) -> bool:
    """Run the rehearsal and print it; return whether nothing was lost, corrupted or left behind."""
    _clear(options.base)
    settings = (*SETTINGS, *options.set)
    kept = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    hosts = NamespaceHosts(options.hosts, options.base, kept)
    rehearsal = Rehearsal(hosts, settings)
    rehearsal.prepare()
    with hosts:
        print(", ".join(f"{host.name} {host.address}" for host in hosts.hosts), flush=True)
        began_s = time.monotonic()
        try:
            said = rehearsal.up()
            print(said[max(said.find("AlignedServe serves"), 0) :].partition("Shared connection")[0], flush=True)
        except ResourceError:
            print(rehearsal.on_host(0, "tail -n 40 /tmp/alignedserve-*/driver.log"), flush=True)
            raise
        print(f"`ray up` took {time.monotonic() - began_s:.1f} s, until the cluster answered", flush=True)
        print(rehearsal.on_host(1, "alignedserve status"), flush=True)
        verdict = asyncio.run(_lose_a_host(rehearsal, options))
        _print_verdict(verdict)
        print(rehearsal.on_host(0, "alignedserve status"), flush=True)
        hosts.boot(hosts.hosts[-1])
        rehearsal.ray("down")
        time.sleep(options.settle)
        left = [line for host in hosts.hosts for line in host.processes()]
        shared = [line for host in hosts.hosts for line in host.run("ls", "/dev/shm").stdout.split()]  # noqa: S108
        print(f"after `ray down`: {len(left)} processes, {len(shared)} files of shared memory", flush=True)
        for line in (*left, *shared):
            print(f"  left: {line[:150]}")
        return verdict.is_passed and not left and not shared


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Rehearse a cluster on hosts of namespaces.")
    hosts = range(_MIN_HOSTS, _MAX_HOSTS + 1)
    parser.add_argument("--hosts", type=int, default=_MIN_HOSTS, choices=hosts, metavar=f"{_MIN_HOSTS}..{_MAX_HOSTS}")
    parser.add_argument("--base", type=Path, default=Path("/run/alignedserve-rehearsal"))
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of the trace")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--kill-at", type=float, default=15.0, help="seconds into the trace")
    parser.add_argument("--settle", type=float, default=90.0, help="seconds after `ray down`")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the hosts are removed then, too
    try:
        return 0 if run(parser.parse_args()) else 1
    except AlignedServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

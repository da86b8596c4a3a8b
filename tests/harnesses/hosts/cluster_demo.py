"""The rehearsal of a cluster on one machine: hosts of namespaces, the very `ray up`, a checked trace, a lost host.

Run as `python -m tests.harnesses.hosts.cluster_demo`, as root, from the top of the checkout. It differs from servers
in three things: the software is there already (no copying, no installing), all hosts share this machine's cores, and
the file system is one.
"""

import argparse
import asyncio
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.client.openai_client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from alignedserve.core.errors import AlignedServeError, ResourceError
from alignedserve.pocket.tasks import is_correct
from lab.evaluation.checked_trace import plan_checked_trace
from lab.evaluation.pocket_calls import pocket_tokenizer, task_call
from lab.loadgen.load_generator import LoadGenerator
from lab.loadgen.load_plan import LoadRequest
from lab.workload.traces import shipped_trace
from tests.harnesses.hosts.namespace_hosts import NamespaceHosts
from tests.harnesses.hosts.network_faults import FAULTS, HostFault
from tests.harnesses.hosts.rehearsal import SETTINGS, Rehearsal

_MODEL = "pocket"
_MIN_HOSTS, _MAX_HOSTS = 3, 16  # two whose gateways are asked, and the one that is lost
_MAX_CHATS = 10  # rounds
_NUM_CHATS = 12  # at once: one or two stay with workers of the gateway's own host
_NUM_ASKED = 2  # gateways that are asked


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


@dataclass(frozen=True, slots=True)
class FaultReport:
    """Result of a trace with a fault in the middle of it."""

    verdict: Verdict
    noticed_s: float | None  # until the driver gave a host up; None: it did not
    used_again_s: float | None  # from the end of the fault


async def replay(
    clients: Sequence[OpenAiClient], duration_s: float, rate: float, at_s: float, hurt: "asyncio.Event"
) -> Verdict:
    """Replay the trace through these gateways in turn, set the event at that time, and judge every answer."""
    count_tokens = pocket_tokenizer()
    checked = plan_checked_trace(shipped_trace(), duration_s=duration_s, rate=rate, seed=0, count_tokens=count_tokens)
    calls = [task_call(task, _MODEL, count_tokens) for task in checked.tasks]
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


async def _replay_with_fault(
    rehearsal: Rehearsal, options: argparse.Namespace, fault: HostFault
) -> tuple[Verdict, list[float]]:
    """Replay the trace with the fault in the middle of it.

    Return what came of it, and when the fault began and, if it did before the last answer, ended, in Unix time.
    """
    hurt = asyncio.Event()
    times: list[float] = []

    async def bring_about() -> None:
        await hurt.wait()
        times.append(time.time())
        print(f"{options.fault_at:.0f} s: {await asyncio.to_thread(fault.begin)}", flush=True)
        if options.heal_after:
            await asyncio.sleep(options.heal_after)
            await asyncio.to_thread(fault.end)
            times.append(time.time())
            print(f"{options.fault_at + options.heal_after:.0f} s: that is over", flush=True)

    faulty = asyncio.create_task(bring_about())
    try:
        clients = rehearsal.clients()[:-1][:_NUM_ASKED]  # never of the last host, to which the faults happen
        verdict = await replay(clients, options.duration, options.rate, options.fault_at, hurt)
        if not times:
            raise ResourceError(f"the last answer came before --fault-at {options.fault_at:g}")
        if options.heal_after:
            await faulty
        return verdict, times
    finally:
        faulty.cancel()


async def chat_with_another_host(rehearsal: Rehearsal) -> None:
    """Ask the head's gateway until a worker of another host has answered, and print what was said."""
    url, head = rehearsal.urls()[0], rehearsal.hosts.hosts[0]
    prompt = "spell otter"
    message = {"model": _MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    async with rehearsal.clients()[0] as client:
        for _ in range(_MAX_CHATS):
            before = rehearsal.num_answers(0)
            call = CompletionCall(CompletionApi.CHAT, message)
            asked = (client.complete(call, CompletionOutcome()) for _ in range(_NUM_CHATS))
            outcomes = await asyncio.gather(*asked)
            for worker, count in rehearsal.num_answers(0).items():
                host = rehearsal.host_of(worker)
                if count > before.get(worker, 0) and host != head.name:
                    print(f"asked {url} (gateway-0 on {head.name}): {prompt!r}; answer: {outcomes[0].text!r}")
                    print(f"answered by {worker} on {host}, by alignedserve_answers_total of gateway-0", flush=True)
                    return
    raise ResourceError(f"in {_MAX_CHATS} rounds no worker of another host has answered")


def replay_with_fault(rehearsal: Rehearsal, options: argparse.Namespace) -> FaultReport:
    """Replay the trace with the chosen fault, print what came of it, and have all hosts back."""
    fault = FAULTS[options.fault](rehearsal.hosts)
    verdict, times = asyncio.run(_replay_with_fault(rehearsal, options, fault))
    _print_verdict(verdict)
    noticed_s, used_again_s = rehearsal.noticed_s(times[0]), None
    print(f"{'a host was given up after':<32}{'-' if noticed_s is None else f'{noticed_s:.1f} s'}")
    print(rehearsal.on_host(0, "alignedserve status"), flush=True)
    if not options.heal_after:
        fault.end()
        times.append(time.time())
    if noticed_s is not None:
        rehearsal.wait_until_used(rehearsal.hosts.hosts[-1])
        used_again_s = time.time() - times[-1]
        print(f"{'it is used again after':<32}{used_again_s:.0f} s, without a command", flush=True)
    return FaultReport(verdict, noticed_s, used_again_s)


def _print_verdict(verdict: Verdict) -> None:
    print(f"{'requests sent':<32}{verdict.num_sent}")
    print(f"{'completed':<32}{verdict.num_completed}")
    print(f"{'correct':<32}{verdict.num_correct}")
    print(f"{'corrupted':<32}{verdict.num_corrupted}")
    print(f"{'lost':<32}{len(verdict.lost)}")
    print(f"{'longest pause before a token':<32}{verdict.longest_pause_s:.2f} s")
    for reason in verdict.lost[:5]:
        print(f"  lost: {reason}")


def clear_former(base: Path) -> None:
    """Remove what a former rehearsal left. Raises ResourceError for any other folder: this runs as root."""
    if base.exists() and any(base.iterdir()) and not (base / "bin" / "alignedserve").exists():
        raise ResourceError(f"{base} is not empty, and not of a former rehearsal; choose another --base")
    shutil.rmtree(base, ignore_errors=True)


def run(options: argparse.Namespace) -> bool:
    """Run the rehearsal and print it; return whether nothing was lost, corrupted or left behind."""
    clear_former(options.base)
    settings = (*SETTINGS, *options.set)
    kept = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    hosts = NamespaceHosts(options.hosts, options.base, kept)
    rehearsal = Rehearsal(hosts, settings, file=options.cluster)
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
        asyncio.run(chat_with_another_host(rehearsal))
        verdict = replay_with_fault(rehearsal, options).verdict
        rehearsal.ray("down")
        time.sleep(options.settle)
        left = [line for host in hosts.hosts for line in host.processes()]
        shared = [line for host in hosts.hosts for line in host.run("ls", "/dev/shm").stdout.split()]
        print(f"after `ray down`: {len(left)} processes, {len(shared)} files of shared memory", flush=True)
        for line in (*left, *shared):
            print(f"  left: {line[:150]}")
        return verdict.is_passed and not left and not shared


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Rehearse a cluster on hosts of namespaces.")
    hosts = range(_MIN_HOSTS, _MAX_HOSTS + 1)
    parser.add_argument("--hosts", type=int, default=_MIN_HOSTS, choices=hosts, metavar=f"{_MIN_HOSTS}..{_MAX_HOSTS}")
    parser.add_argument("--cluster", default="cluster.yaml", help="the file that `ray up` is given")
    parser.add_argument("--base", type=Path, default=Path("/run/alignedserve-rehearsal"))
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of the trace")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--fault", choices=sorted(FAULTS), default="kill", help="what happens on the way")
    parser.add_argument("--fault-at", type=float, default=15.0, help="seconds into the trace")
    parser.add_argument("--heal-after", type=float, default=0.0, help="seconds of the fault; 0: until the trace ends")
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

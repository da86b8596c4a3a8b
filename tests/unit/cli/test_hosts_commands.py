"""The commands of a cluster of hosts, without Ray: what the driver is given, and which clusters `stop` stops."""

import contextlib
import itertools
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._private import services
from rich.console import Console

from alignedserve.cli.commands.cluster import hosts
from alignedserve.cli.commands.cluster.one_host import load_line
from alignedserve.cli.commands.serving import serve as serving
from alignedserve.cli.commands.serving.serve import driver_command, urls_of
from alignedserve.cli.main import main
from alignedserve.cli.options import ServeOptions
from alignedserve.cli.wiring import start_cluster
from alignedserve.cluster.deployments.orders import DeploymentReport
from alignedserve.cluster.hosts import ray_directory
from alignedserve.cluster.hosts.record import (
    ActorRecord,
    ClusterRecord,
    NodeRecord,
    own_versions,
    read_record,
    recorded_drain_s,
    recorded_id,
)
from alignedserve.cluster.hosts.supervisor import SupervisorEnd, end_supervisor, start_supervisor
from alignedserve.cluster.ray_node import address_here
from alignedserve.cluster.serving_cluster import AskedToStop
from alignedserve.config.model_settings import ModelSettings, load_models
from alignedserve.core.errors import ConfigError, PeerLost, ProtocolError, ResourceError
from alignedserve.messages.gateways import ClusterStatus, PrefixTotals, WorkerLean
from tests.support.marks import each

pytestmark = pytest.mark.slow

DEAF = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
)


def settings_from(folder: Path, options: ServeOptions) -> dict[str, str]:
    """Return the last value of every setting on the driver's command line, made by a shell in this folder."""
    with contextlib.chdir(folder):
        command = driver_command(options, load_models(options.config, options.all_overrides, options.named_models))
    given = [after for before, after in itertools.pairwise(command) if before == "--set"]
    return dict(setting.split("=", 1) for setting in given)


def test_paths_may_have_any_characters(tmp_path: Path) -> None:
    folder = tmp_path / "otter 🦦 é"
    (folder / "model").mkdir(parents=True)
    options = ServeOptions(models=("model",), overrides=("batches.folder=🗂",), nodes=1)
    given = [f"{field}={value}" for field, value in settings_from(folder, options).items()]
    config = load_models(None, given, ()).configs[0]
    assert (config.model.path, config.batches.folder) == (str(folder / "model"), str(folder / "🗂"))


def test_paths_of_the_shell_are_those_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "c.yaml").write_text("batches: {folder: state}")
    options = ServeOptions(models=("model",), config=Path("c.yaml"), overrides=("gateway.port=9",), nodes=2)
    assert settings_from(tmp_path, options) == {
        "model.path": f'"{tmp_path}/model"',
        "gateway.port": "9",
        "batches.folder": f'"{tmp_path}/state"',
    }


def test_a_bucket_is_no_path_and_the_home_of_the_user_is_not_in_the_folder_of_the_shell(tmp_path: Path) -> None:
    overrides = ("batches.folder=s3://bucket/prefix", "recording.folder=~/run")
    settings = settings_from(tmp_path, ServeOptions(overrides=overrides, nodes=1))
    assert settings == {"batches.folder": "s3://bucket/prefix", "recording.folder": f'"{Path.home()}/run"'}


def test_several_models_and_their_settings_are_those_of_the_driver(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "c.yaml").write_text("models: [{model: {path: a}}, {model: {path: b, served_model_name: two}}]")
    options = ServeOptions(models=("a", "two=b", "pocket"), overrides=("two.decode.count=1",), nodes=2)
    with contextlib.chdir(tmp_path):
        command = driver_command(options, load_models(None, options.all_overrides, options.named_models))
    assert command[4:7] == [str(tmp_path / "a"), f"two={tmp_path / 'b'}", "pocket"]
    assert settings_from(tmp_path, options) == {"two.decode.count": "1"}
    listed = settings_from(tmp_path, ServeOptions(config=Path("c.yaml"), nodes=2))
    assert listed == {"a.model.path": f'"{tmp_path}/a"', "two.model.path": f'"{tmp_path}/b"'}


@pytest.mark.parametrize("name", ["pocket", "org/name", "/absolute"])
def test_names_of_models_stay_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "pocket").mkdir()
    assert settings_from(tmp_path, ServeOptions(models=(name,), nodes=1)) == {"model.path": f'"{name}"'}


class Cluster:
    """A cluster as `stop` finds it: the recorded ids, look by look, a driver that is heard, and its supervisor."""

    def __init__(self, ids: list[str | None], ending: SupervisorEnd, *, has_driver: bool = True) -> None:
        self.ids = ids
        self.ending = ending
        self.has_driver = has_driver
        self.asked: list[str] = []
        self.ended: list[object] = []

    def recorded_id(self) -> str | None:
        return self.ids.pop(0) if len(self.ids) > 1 else self.ids[0]

    def read_record(self) -> ClusterRecord | None:
        return self.record() if self.ids[0] is not None else None

    def record(self) -> ClusterRecord:
        if self.ids[0] is None:
            raise ResourceError("no cluster serves on these hosts")
        return ClusterRecord("c", "v", "pocket", "colocated", started=0.0, is_ready=True, nodes=())

    def end_supervisor(self, *, leaves_s: float, patience_s: float) -> SupervisorEnd:
        self.ended.append("supervisor")
        return self.ending

    def end_cluster(self, record: ClusterRecord) -> None:
        self.ended.append(record.cluster_id)
        self.ids = [None]


def stop(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> str:
    """Return what `stop` says."""
    monkeypatch.setattr(hosts, "connected", contextlib.nullcontext)
    monkeypatch.setattr(hosts, "_FOLLOW_S", 0.0)
    monkeypatch.setattr(hosts, "ask_to_stop", lambda cluster_id, at_once: cluster.asked.append(cluster_id))
    monkeypatch.setattr(hosts, "recorded_id", cluster.recorded_id)
    monkeypatch.setattr(hosts, "read_record", cluster.read_record)
    monkeypatch.setattr(hosts, "recorded_drain_s", lambda: 0.0)
    monkeypatch.setattr(hosts, "running_cluster", cluster.record)
    monkeypatch.setattr(hosts, "has_driver", lambda record: cluster.has_driver)
    monkeypatch.setattr(hosts, "end_supervisor_of_head", cluster.end_supervisor)
    monkeypatch.setattr(hosts, "end_cluster", cluster.end_cluster)
    console = Console(width=200)
    monkeypatch.setattr(hosts, "notes", lambda: console)
    with console.capture() as said:
        hosts.stop(at_once=False)
    return said.get().strip()


def test_a_cluster_that_a_supervisor_starts_anew_is_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(["former", "former", "former", "next", None], SupervisorEnd.ENDED)
    assert stop(monkeypatch, cluster) == "Stopped the cluster."
    assert cluster.asked == ["former", "former", "next"]
    assert cluster.ended == ["supervisor"]


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (SupervisorEnd.ENDED, "Stopped the cluster, without its driver."),
        (SupervisorEnd.NOT_THERE, "Stopped the cluster, without its driver."),
        (SupervisorEnd.KILLED, "its driver did not end by itself and was killed with its supervisor."),
    ],
)
def test_a_cluster_whose_driver_fails_or_hangs_is_ended_after_its_supervisor(
    monkeypatch: pytest.MonkeyPatch, ending: SupervisorEnd, said: str
) -> None:
    monkeypatch.setattr(hosts, "_SILENT_S", -1.0)
    cluster = Cluster(["headless"], ending, has_driver=False)
    assert said in stop(monkeypatch, cluster)
    assert cluster.ended == ["supervisor", "c"]


def test_a_driver_that_was_killed_as_it_went_on_is_none_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_STOP_S", -1.0)
    cluster = Cluster(["busy"], SupervisorEnd.KILLED, has_driver=True)
    assert "was killed with its supervisor" in stop(monkeypatch, cluster)
    assert cluster.ended == ["supervisor", "c"]


def test_a_driver_without_a_supervisor_that_does_not_end_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_STOP_S", -1.0)
    cluster = Cluster(["deaf"], SupervisorEnd.NOT_THERE)
    with pytest.raises(ResourceError, match=r"does not end .* `alignedserve serve`"):
        stop(monkeypatch, cluster)
    assert cluster.asked == ["deaf"]


def test_a_start_that_has_no_record_yet_is_ended_with_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster([None], SupervisorEnd.ENDED)
    assert stop(monkeypatch, cluster) == "Stopped a cluster that was about to start."
    assert cluster.asked == []


def test_where_nothing_runs_there_is_nothing_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="no cluster serves"):
        stop(monkeypatch, Cluster([None], SupervisorEnd.NOT_THERE))


@pytest.mark.parametrize(
    ("command", "ending"), [("import time; time.sleep(60)", SupervisorEnd.ENDED), (DEAF, SupervisorEnd.KILLED)]
)
def test_a_supervisor_ends_with_its_driver_also_one_that_is_deaf(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, ending: SupervisorEnd
) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", str(tmp_path))
    assert end_supervisor() is SupervisorEnd.NOT_THERE
    supervisor = start_supervisor([sys.executable, "-c", command, str(tmp_path / "deaf")], "auto")
    waited_for = [tmp_path / "supervisor.lock", *([tmp_path / "deaf"] if command == DEAF else [])]
    ends_s = time.monotonic() + 30.0
    # To ask whether the lock is held would hold it.
    while not all(path.exists() for path in waited_for) or not waited_for[0].read_text().isdigit():
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    children = psutil.Process(supervisor.pid).children()
    assert end_supervisor(patience_s=0.5 if ending is SupervisorEnd.KILLED else 30.0) is ending
    supervisor.wait()
    assert not any(child.is_running() for child in children)


DRAINS = """
import signal, sys, time
def note(number, frame):
    with open(sys.argv[1], 'a') as notes: notes.write('x')
signal.signal(signal.SIGTERM, note)
open(sys.argv[1], 'w').close()
while not open(sys.argv[1]).read(): time.sleep(0.05)
time.sleep(1.0)
"""


def test_a_driver_that_drains_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", str(tmp_path))
    told = tmp_path / "told"
    supervisor = start_supervisor([sys.executable, "-c", DRAINS, str(told)], "auto")
    ends_s = time.monotonic() + 30.0
    while not told.exists():
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    assert end_supervisor(drain_s=60.0) is SupervisorEnd.ENDED
    supervisor.wait()
    assert told.read_text() == "x"


@pytest.mark.parametrize("former", [b'{"cluster_id":"c-1"}', b'{"cluster_id":"c-1","version":7,"hosts":[]}'])
def test_a_record_of_another_version_still_names_its_cluster(monkeypatch: pytest.MonkeyPatch, former: bytes) -> None:
    monkeypatch.setattr(ray_directory, "get", lambda key: former)
    assert recorded_id() == "c-1"
    with pytest.raises(ProtocolError, match="of another version"):
        read_record()


@each(
    ("found", "drain_s"),
    [(b'{"cluster_id":"c-1","version":7,"drain_s":60.0}', 60.0), (b'{"cluster_id":"c-1"}', 0.0), (None, 0.0)],
)
def test_answers_of_another_version_are_finished_too(
    monkeypatch: pytest.MonkeyPatch, found: bytes | None, drain_s: float
) -> None:
    monkeypatch.setattr(ray_directory, "get", lambda key: found)
    assert recorded_drain_s() == drain_s


@each(("version", "is_whole", "asked"), [("AlignedServe 0.0.9", True, []), (own_versions(), False, ["gateway-0"])])
def test_the_status_of_another_version_is_told_without_what_only_that_one_reads(
    monkeypatch: pytest.MonkeyPatch, version: str, is_whole: bool, asked: list[str]
) -> None:
    node = NodeRecord("node-0", "id", "10.0.0.1", "host0", actors=(ActorRecord("gateway-0"),))
    model = DeploymentReport("m", "pocket", "pocket", "serving", num_open=None)
    record = ClusterRecord("c", version, "pocket", "elastic", 0.0, is_ready=True, nodes=(node,), models=(model,))
    calls: list[str] = []

    def call(name: str, method: str) -> dict[str, object]:
        calls.append(name)
        return {}

    monkeypatch.setattr(hosts, "connected", contextlib.nullcontext)
    monkeypatch.setattr(hosts, "running_cluster", lambda: record)
    monkeypatch.setattr(hosts, "lost_nodes", lambda record: set())
    monkeypatch.setattr(hosts, "call_actor", call)
    console = Console(width=200)
    monkeypatch.setattr(hosts, "results", lambda: console)
    with console.capture() as captured:
        assert hosts.status(json_output=False) is is_whole
    said = captured.get()
    assert calls == asked
    assert version in said
    assert ("This command is of another version" in said) == ("Load:" not in said) == is_whole


@pytest.mark.parametrize(("found", "known"), [(None, None), (b"no record", None), (b"[]", None)])
def test_what_is_no_record_names_no_cluster(
    monkeypatch: pytest.MonkeyPatch, found: bytes | None, known: str | None
) -> None:
    monkeypatch.setattr(ray_directory, "get", lambda key: found)
    assert recorded_id() == known


def test_the_ray_of_a_host_is_the_one_that_ray_start_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try the one of another `serve`, which admits nobody, for minutes."""
    running = {"127.0.0.1:64001", "10.0.0.7:6379", "10.0.0.3:6379"}
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: running)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: "10.0.0.7:6379")
    assert address_here() == "10.0.0.7:6379"
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: "10.0.0.9:6379")  # has ended
    assert address_here() == "10.0.0.3:6379"
    running -= {"10.0.0.7:6379", "10.0.0.3:6379"}
    with pytest.raises(
        ResourceError, match=r"this host; `alignedserve serve` starts a server that needs none, .*`ray up`"
    ):
        address_here()


@pytest.mark.parametrize(("settings", "num_nodes"), [({"gateway": {"host": "node"}}, None), ({}, 2)])
def test_what_is_for_a_ray_cluster_is_refused_on_one_host(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], num_nodes: int | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="is for a Ray cluster"):
        start_cluster(ModelSettings(settings, ({},)), num_nodes=num_nodes)


def test_ipv6_addresses_are_no_markup() -> None:
    node = NodeRecord("node-0", "id", "fd77::1", "host0", urls=("http://[fd77::1]:8000",))
    record = ClusterRecord("c", "v", "pocket", "colocated", started=0.0, is_ready=True, nodes=(node,))
    console = Console(width=120)
    for table in (urls_of(record), hosts._nodes_table(record, set())):
        with console.capture() as said:
            console.print(table)
        assert "http://[fd77::1]:8000" in said.get()


@each(
    ("topology", "said"),
    [
        ("elastic", "1 in prefill, 4 decoding; 3 elastic workers, 0 of 0 blocks used; decode-0 leans 25% to prompts"),
        ("disaggregated", "1 in prefill, 2 pooled, 4 decoding; 3 prefill and 3 decode workers, 0 of 0 blocks used"),
    ],
)
def test_the_load_is_told_in_the_words_of_the_topology(topology: str, said: str) -> None:
    leans = (WorkerLean("decode-0", 0.25),)
    counts: dict[str, Any] = {"num_prefill_workers": 3, "num_decode_workers": 3, "num_prefilling": 1, "num_pooled": 2}
    assert said in load_line(ClusterStatus(**counts, num_decoding=4, leans=leans), topology)
    cached = ClusterStatus(**counts, prefixes=PrefixTotals(400, 300, 12, 5))
    assert "0 of 0 blocks used; prefix cache: 12 blocks, 75% of tokens found" in load_line(cached, topology)
    assert load_line(None, topology) == "Load: unknown, as no gateway has a router"


def test_a_node_that_is_not_used_serves_nothing() -> None:
    used = NodeRecord("node-0", "id", "10.0.0.1", "host0", actors=(ActorRecord("gateway-0"),))
    nodes = (used, NodeRecord("", "id-1", "10.0.0.2", "host1", problem="it has another Python"))
    record = ClusterRecord("c", "v", "pocket", "colocated", started=0.0, is_ready=True, nodes=nodes)
    assert urls_of(record).title == "AlignedServe serves pocket on 1 node"


@pytest.mark.parametrize("options", [("--within", "60"), ("--force",), ("--no-wait",)])
def test_an_undo_ignores_no_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["alignedserve", "drain", "node-1", "--undo", *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--undo goes with no other option" in capsys.readouterr().err


def test_a_folder_of_others_holds_no_supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(ResourceError, match="open to others"):
        start_supervisor(["true"], "auto")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "end"), [(KeyError("node-7"), "leave"), (PeerLost("Ray's head is gone"), "stop"), (AskedToStop(), "stop")]
)
def test_a_fault_of_the_driver_ends_no_requests(monkeypatch: pytest.MonkeyPatch, error: Exception, end: str) -> None:
    ended: list[str] = []

    def fails(timeout_s: float) -> None:
        raise error

    made = SimpleNamespace(wait_ready=fails, stop=lambda: ended.append("stop"), leave=lambda: ended.append("leave"))
    monkeypatch.setattr(serving, "_start", lambda config, num_nodes, template, ending: made)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with contextlib.suppress(KeyError, PeerLost):
            serving.serve(ServeOptions(), load_models(None, (), ()), None)
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2  # until the process is gone
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert ended == [end]

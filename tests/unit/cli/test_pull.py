"""`alignedserve pull` and `models` as processes: killed and gone on with, at once, offline, on a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from alignedserve.cli.main import main
from alignedserve.runtime.model.hub.file_choice import parse_hub_name
from alignedserve.runtime.model.hub.repository import Hub
from tests.support.servers.hub_samples import REPO, WEIGHTS, model_files
from tests.support.servers.hub_server import HubServer

CONFIG_ERROR, FAILURE = 2, 1


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        running.add(REPO, model_files())
        yield running


class Commands:
    """Commands of ours with this hub and this cache."""

    def __init__(self, url: str, home: Path) -> None:
        self.cache = home / "hub"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment = inherited | {"HF_ENDPOINT": url, "HF_HOME": str(home)}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "alignedserve", *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        return ended(self.start(*arguments, **environment))

    def halves(self) -> list[Path]:
        return list(self.cache.glob("*/blobs/*.incomplete"))


@pytest.fixture
def commands(server: HubServer, tmp_path: Path) -> Commands:
    return Commands(server.url, tmp_path / "home")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60.0)
    return process.returncode, out, err


def wait_until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def weights_in(printed: str) -> bytes:
    return (Path(printed.strip()) / "model.safetensors").read_bytes()


def start_slowly(commands: Commands, server: HubServer) -> subprocess.Popen[str]:
    """Start a pull that has got some of the weights, and gets no more of them."""
    server.holds_after = len(WEIGHTS) // 4
    process = commands.start("pull", REPO)
    wait_until(lambda: any(half.stat().st_size > 1 << 18 for half in commands.halves()))
    return process


@pytest.mark.slow
def test_killed_and_gone_on_with(commands: Commands, server: HubServer) -> None:
    process = start_slowly(commands, server)
    process.kill()
    ended(process)
    (half,) = commands.halves()
    num_bytes = half.stat().st_size
    assert 0 < num_bytes < len(WEIGHTS)

    code, _, err = commands.run("pull", REPO, HF_HUB_OFFLINE="1")
    message = f"error: {REPO} is only half downloaded, without model.safetensors, and HF_HUB_OFFLINE is set.\n"
    assert (code, err) == (FAILURE, message)

    server.holds_after = None
    code, out, err = commands.run("pull", REPO)
    assert (code, weights_in(out)) == (0, WEIGHTS), err
    assert server.downloads()[-1].headers["range"] == f"bytes={num_bytes}-"
    assert f"Downloaded {REPO}: 4.2 MB in" in err
    assert commands.halves() == []


@pytest.mark.slow
def test_interrupted_with_ctrl_c(commands: Commands, server: HubServer) -> None:
    process = start_slowly(commands, server)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out, err) == (130, "", "Interrupted; the next pull goes on from here.\n")
    assert len(commands.halves()) == 1


@pytest.mark.slow
def test_two_at_once_download_it_once(commands: Commands, server: HubServer) -> None:
    server.bytes_per_s = 4 * len(WEIGHTS)
    both = [commands.start("pull", REPO) for _ in range(2)]
    for code, out, err in [ended(process) for process in both]:
        assert (code, weights_in(out)) == (0, WEIGHTS), err
    assert len(server.downloads()) == 1


@pytest.mark.slow
def test_the_other_goes_on_when_the_first_is_killed(commands: Commands, server: HubServer) -> None:
    first = start_slowly(commands, server)
    second = commands.start("pull", REPO)
    wait_until(lambda: sum(seen.path == f"/api/models/{REPO}" for seen in server.requests) == 2)
    time.sleep(0.5)  # it waits by now
    first.kill()
    ended(first)
    server.holds_after = None
    code, out, err = ended(second)
    assert (code, weights_in(out)) == (0, WEIGHTS), err
    assert [("range" in seen.headers) for seen in server.downloads()] == [False, True]


@pytest.mark.slow
def test_the_token_and_the_offline_mode_of_the_environment(commands: Commands, server: HubServer) -> None:
    server.repositories[REPO].is_gated = True
    code, _, err = commands.run("pull", REPO)
    assert (code, err) == (
        FAILURE,
        f"error: {REPO} is gated: accept its licence on {server.url}/{REPO} and set HF_TOKEN to a token of the "
        "account that did.\n",
    )
    code, out, _ = commands.run("pull", REPO, HF_TOKEN=server.token)
    assert code == 0
    assert commands.run("pull", REPO, HF_HUB_OFFLINE="1") == (0, out, "")
    assert commands.run("serve", "org/other", HF_HUB_OFFLINE="1") == (
        FAILURE,
        "",
        "error: org/other is not downloaded, or not completely, and HF_HUB_OFFLINE is set.\n",
    )


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["alignedserve", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("pull", "pocket"),
            "'pocket' is not the name of a model on a hub, ORG/NAME[:QUANTISATION][@REVISION], or a short one "
            "(docs/models.md)",
        ),
        (("pull", "org/m.gguf"), "org/m.gguf is a file or folder of this machine, not a model on a hub"),
        (("models", "rm", "org/m:Q8_0"), "org/m:Q8_0: models are removed whole; leave out :Q8_0"),
    ],
)
def test_names_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run_here(monkeypatch, *arguments) == CONFIG_ERROR
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_listed_and_removed(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = Hub(endpoint=server.url).fetch(parse_hub_name(REPO))
    assert run_here(monkeypatch, "models", "list") == 0
    assert [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if REPO in line] == [
        [f" {REPO} ", " main     ", f" {folder.name[:10]} ", " safetensors ", " 4.2 "]
    ]
    assert run_here(monkeypatch, "models", "list", "--json") == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["repo_id"], model["commit"], model["path"]) == (REPO, folder.name, str(folder))
    assert run_here(monkeypatch, "models", "rm", REPO) == 0
    assert capsys.readouterr().err == f"Removed {REPO}: 4.2 MB freed\n"
    assert run_here(monkeypatch, "models", "list") == 0
    assert capsys.readouterr() == ("", "No model has been downloaded; `alignedserve pull ORG/NAME` does.\n")
    assert run_here(monkeypatch, "models", "rm", REPO) == FAILURE
    assert capsys.readouterr().err == f"error: {REPO} is not in {tmp_path}.\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_meanwhile(server: HubServer, small_disk: Path) -> None:
    commands = Commands(server.url, small_disk)
    ballast = small_disk / "ballast"

    def fill(sent: int) -> None:
        if sent > len(WEIGHTS) // 2 and not ballast.exists():
            ballast.write_bytes(b"\0" * (3 << 20))

    server.on_bytes = fill
    server.bytes_per_s = 2 * len(WEIGHTS)
    code, out, err = commands.run("pull", REPO)
    assert (code, out) == (FAILURE, "")
    assert err.startswith(f"error: The disk is full ({small_disk}/hub) while {REPO} is downloaded; what has come is")
    code, _, err = commands.run("pull", REPO)
    assert (code, "MB more, and" in err) == (FAILURE, True), err
    ballast.unlink()
    server.on_bytes = lambda sent: None
    code, out, err = commands.run("pull", REPO)
    assert (code, weights_in(out)) == (0, WEIGHTS), err
    assert "range" in server.downloads()[-1].headers


@pytest.mark.slow
def test_a_file_that_may_not_grow_further(commands: Commands) -> None:
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    limited += "from alignedserve.cli.main import main; sys.argv = ['alignedserve', 'pull', 'org/tiny']; main()"
    done = subprocess.run(
        [sys.executable, "-c", limited], env=commands.environment, capture_output=True, text=True, timeout=60.0
    )
    assert (done.returncode, done.stdout) == (FAILURE, "")
    assert done.stderr.startswith("error: The disk is full"), done.stderr

"""The Dockerfile, compose.yaml and the systemd unit name what exists, and leave a cluster the time to end."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from alignedserve.cli.main import app
from alignedserve.config.sections.gateway import GatewayConfig

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["alignedserve"]
UNIT = (ROOT / "deploy/systemd/alignedserve.service").read_text()
STOPS_WITHIN_S = GatewayConfig().drain_s + 30.0


def steps(instruction: str) -> list[str]:
    """Return what follows each of these instructions of the Dockerfile, its continued lines joined."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{instruction} +(.*)$", text, re.MULTILINE)


def copied() -> set[str]:
    """Return what of the checkout the image is built from."""
    copies = [shlex.split(step) for step in steps("COPY") if not step.startswith("--from")]
    return {source for *sources, _ in copies for source in sources}


def setting(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def test_the_image_is_built_from_all_packages_and_nothing_that_is_missing() -> None:
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied()
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_every_step_is_a_command_that_the_shell_can_read() -> None:
    for step in steps("RUN"):
        assert subprocess.run(["sh", "-n", "-c", step], capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_step_that_lists_what_is_needed_lists_the_projects_dependencies(variant: str) -> None:
    (step,) = [step for step in steps("RUN") if "tomllib" in step]
    listed = subprocess.run(
        ["sh", "-c", step.partition("> /tmp")[0].replace("python", sys.executable, 1)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "VARIANT": variant},
    )
    extras = ["vision", "gpu"] if variant == "cuda" else ["vision"]
    named = [line for extra in extras for line in PROJECT["project"]["optional-dependencies"][extra]]
    assert listed.stdout.splitlines() == PROJECT["project"]["dependencies"] + named


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied()


def test_the_image_starts_a_command_of_the_package_with_options_that_it_has() -> None:
    (entrypoint,), (command,) = steps("ENTRYPOINT"), steps("CMD")
    assert json.loads(entrypoint)[0] in PROJECT["project"]["scripts"]
    for arguments in (json.loads(command), SERVICE["command"]):
        shown = CliRunner().invoke(app, [arguments[0], "--help"])
        assert shown.exit_code == 0
        assert [option for option in arguments if option.startswith("--") and option not in shown.output] == []


def test_the_image_serves_as_a_user_without_rights_who_owns_its_folders() -> None:
    (user,) = steps("USER")
    (made,) = [step for step in steps("RUN") if "useradd" in step]
    assert made.split("&&")[0].split()[-1] == user
    (environment,) = [step for step in steps("ENV") if "ALIGNEDSERVE_RUN_DIR" in step]
    folders = dict(re.findall(r"(ALIGNEDSERVE_\w+)=(\S+)", environment)).values()
    assert all(folder in made for folder in folders)
    assert f"-m 0700 -o {user}" in made


def test_a_container_of_compose_has_no_rights() -> None:
    assert SERVICE["cap_drop"] == ["ALL"]
    assert SERVICE["security_opt"] == ["no-new-privileges:true"]


def test_what_runs_in_the_image_gets_the_time_that_a_drain_takes() -> None:
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > STOPS_WITHIN_S
    assert float(setting("TimeoutStopSec")[0]) > STOPS_WITHIN_S
    page = (ROOT / "docs/draining.md").read_text()
    assert f"TimeoutStopSec={setting('TimeoutStopSec')[0]}`" in page
    assert f"--time {SERVICE['stop_grace_period'].removesuffix('s')}`" in page


def test_compose_publishes_the_port_that_is_served_on_loopback_alone() -> None:
    port = GatewayConfig().port
    assert SERVICE["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert steps("EXPOSE") == [str(port)]
    assert f"127.0.0.1:{port}/health" in SERVICE["healthcheck"]["test"][-1]
    (check,) = re.findall(r"CMD (.*)", steps("HEALTHCHECK")[0])
    assert ["CMD", *json.loads(check)] == SERVICE["healthcheck"]["test"]


def test_the_service_ends_serve_alone_first_and_starts_again_when_ray_was_lost() -> None:
    assert setting("KillMode") == ["mixed"]
    assert setting("RestartForceExitStatus") == ["75"]
    (command,) = setting("ExecStart")
    assert Path(command.split()[0]).name in PROJECT["project"]["scripts"]


def test_the_service_does_not_take_shared_memory_away() -> None:
    assert not any(setting(name) for name in ("PrivateIPC", "RemoveIPC", "MemoryDenyWriteExecute", "ProcSubset"))

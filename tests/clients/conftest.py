"""One served pocket model for all clients, and a way to run each in its own environment."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import HERE, node_environment, python_environment
from tests.clients.running import RunDriver, run_node_script, run_python_script
from tests.cluster.serving import Serving, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The shipped model. It was not trained for tools, so how it writes calls is set; grammars make them right."""
    with serving(tmp_path_factory.mktemp("run"), "pocket", "--set", "model.tool_format=hermes") as served:
        served.wait_ready()
        yield served


@pytest.fixture(scope="session")
def python_clients() -> Path:
    """The folder of the Python clients' executables."""
    return python_environment()


@pytest.fixture(scope="session")
def node_clients() -> Path:
    """The folder with the Node clients."""
    return node_environment()


@pytest.fixture
def run_python(server: Serving, python_clients: Path, tmp_path: Path) -> RunDriver:
    """Run a Python driver by its name; returns the JSON of the last line that it prints."""

    def run(name: str, *arguments: str) -> Any:
        driver = HERE / "drivers" / f"{name}.py"
        told = run_python_script(python_clients, driver, *arguments, url=server.url, cwd=tmp_path)
        return json.loads(told.splitlines()[-1])

    return run


@pytest.fixture
def run_node(server: Serving, node_clients: Path) -> RunDriver:
    """Run a Node driver by its name; returns the JSON of the last line that it prints."""

    def run(name: str, *arguments: str) -> Any:
        driver = HERE / "drivers" / f"{name}.mjs"
        return json.loads(run_node_script(node_clients, driver, *arguments, url=server.url).splitlines()[-1])

    return run

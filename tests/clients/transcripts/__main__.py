"""Runs every client against the pocket model and writes `docs/transcripts.md`."""

import sys
import tempfile
from pathlib import Path

import pytest

from alignedserve.runtime.model.named_models import pocket_folder
from benchmarks.measuring.arguments import parser_of
from tests.clients.environments import node_environment, python_environment
from tests.clients.running import run_node_script, run_python_script
from tests.clients.transcripts import page
from tests.cluster.serving import serving


class Runner:
    """Runs scripts of either language against one server, in a folder of its own."""

    def __init__(self, url: str, cwd: Path) -> None:
        self._url = url
        self._cwd = cwd
        self._python = python_environment()
        self._node = node_environment()

    def run(self, script: Path, *arguments: str) -> str:
        """Run one script and return what it prints."""
        print(script.name, *arguments, file=sys.stderr, flush=True)
        if script.suffix == ".mjs":
            return run_node_script(self._node, script, *arguments, url=self._url)
        return run_python_script(self._python, script, *arguments, url=self._url, cwd=self._cwd)

    def drive(self, driven: page.Driven) -> str:
        """Run a driver, and return the last line that it prints."""
        words = [str(pocket_folder())] if driven.argument == "MODEL_FOLDER" else driven.argument.split()
        return self.run(page.DRIVERS / driven.script, *words).splitlines()[-1]


def write(folder: Path) -> None:
    """Write the page; the server's files are kept in this folder while it runs."""
    with serving(folder / "run", "pocket", "--set", "model.tool_format=hermes") as served:
        served.wait_ready()
        runner = Runner(served.url, folder)
        sections = [page.section(shown, runner.run(page.SCRIPTS / shown.script)) for shown in page.SHOWN]
        rows = [page.row(driven, runner.drive(driven)) for driven in page.DRIVEN]
    page.PAGE.write_text(page.page(sections, rows), encoding="utf-8")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name))
    except pytest.skip.Exception as unreachable:
        sys.exit(str(unreachable))

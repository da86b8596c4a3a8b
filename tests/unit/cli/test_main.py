import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from alignedserve.cli.console import chat_command, open_closed_streams, print_json, results, written_output
from alignedserve.cli.main import LAB_COMMANDS, PANELS, app, main
from alignedserve.cli.options import ServeOptions
from alignedserve.config.loading import load_config
from alignedserve.core.errors import ConfigError, ModelNotFound, NodeLost
from lab.commands.bench.app import bench_app
from tests.support.marks import each
from tests.support.servers.fake_server import MODEL, FakeServer, Script, running

# What takes its time to load.
HEAVY = (
    "aiohttp",
    "anthropic",
    "cryptography",
    "fastapi",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "msgspec",
    "numpy",
    "obstore",
    "openai",
    "opentelemetry",
    "orjson",
    "prometheus_client",
    "pydantic",
    "ray",
    "redis",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
)
# By module, one loaded after the other: what each loads that those before it have not. `serve` is the driver of a
# cluster, which names actors and loads nothing that they serve with.
LOADED = {
    "alignedserve.cli.main": "pydantic",  # by Typer, for the help of a command with options
    "kvpool.service": "cryptography msgspec numpy",
    "router.service": "jinja2 orjson safetensors tokenizers",
    "alignedserve.gateway.actor": "ray",
    "alignedserve.batch_worker.actor": "",
    "alignedserve.cli.commands.serving.serve": "",
    "alignedserve.batch_worker.service": "llguidance prometheus_client",
    "alignedserve.gateway.start": "fastapi opentelemetry starlette uvicorn",
}
PATHS: tuple[list[str], ...] = (
    [],
    ["serve"],
    ["chat"],
    ["eval"],
    ["doctor"],
    ["demo"],
    ["profile"],
    ["simulate"],
    ["plan"],
    ["batch"],
    ["batch", "run"],
    ["batch", "submit"],
    ["batch", "status"],
    ["batch", "watch"],
    ["batch", "results"],
    ["batch", "errors"],
    ["batch", "cancel"],
    ["batch", "list"],
    ["bench"],
    ["bench", "serve"],
    ["replay"],
    ["pull"],
    ["models"],
    ["models", "list"],
    ["models", "rm"],
)
HELP_OF_ALL = f"""
import contextlib, importlib, io, sys
from alignedserve.cli.main import main
for path in {PATHS!r}:
    sys.argv = ["alignedserve", *path, "--help"]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            main()
    except SystemExit as end:
        assert end.code == 0, (path, end.code)
    assert "Usage: alignedserve" in shown.getvalue(), path
seen = set()
for module in {[*LOADED]!r}:
    importlib.import_module(module)
    loaded = {{name for name in {HEAVY!r} if name in sys.modules}}
    print(*sorted(loaded - seen))
    seen = loaded
"""


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["alignedserve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_help_of_every_command_and_processes_without_an_engine_load_no_more_than_they_need() -> None:
    ended = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert dict(zip(LOADED, ended.stdout.splitlines(), strict=True)) == LOADED


def test_an_interrupt_while_the_command_line_loads_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("alignedserve.cli.main.app", interrupted)
    assert run_command(monkeypatch, "simulate") == 130

    class Interrupted:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == "alignedserve.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "alignedserve.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("alignedserve", run_name="__main__")
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("alignedserve 0.")


def test_help_is_whole_in_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    for command in (("bench", "serve"), ("chat",), ("certify",), ("keys", "add"), ("batch", "submit")):
        assert run_command(monkeypatch, *command, "--help") == 0
        assert "…" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("bench", "serve", "--no-such-option"),
        ("bench", "serve", "--url", "http://127.0.0.1:1"),
        ("bench", "serve", "--synthetic", "rate=x,prompt=1,output=1"),
        ("bench", "serve", "--synthetic", "rate=1,prompt=1,output=1", "--rate", "3"),
        ("bench", "serve", "--synthetic", "rate=1,prompt=1,output=1", "--endpoint", "moderations"),
        ("bench", "serve", "--synthetic", "rate=1,prompt=1,output=1", "--ignore-eos", "--output-len", "free"),
        ("demo", "--url", "http://127.0.0.1:1", "--set", "gateway.port=9"),
        ("chat", "--url", "localhost:8000", "--once", "hi"),
        ("eval", "mmlu"),
        ("batch", "submit", "no-such-file.jsonl"),
        ("batch", "submit", __file__, "--window", "30s"),
        ("batch", "submit", __file__, "--endpoint", "moderations"),
        ("batch", "submit", __file__, "--metadata", "novalue"),
        ("batch", "submit", __file__, "--metadata", "a=" + "b" * 513),
        ("batch", "submit", __file__, "--idempotency-key", ""),
        ("batch", "status", "../../metrics"),
        ("batch", "list", "--url", "localhost:8000"),
        ("usage", "--since", "2026-12-01", "--until", "2026-11-01"),
        ("usage", "--since", "2999-01-01"),
        ("replay", "no-such-folder"),
        ("replay", ".", "--fit-on", "no-such-folder"),
    ],
)
def test_usage_errors_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run_command(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err
    assert "Traceback" not in shown.err + shown.out


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("a\nb"), 2), (ModelNotFound("a\nb"), 1), (NodeLost("a\nb"), 75)]
)
def test_our_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("alignedserve.cli.main.app", fail)
    assert run_command(monkeypatch) == code
    assert capsys.readouterr().err == "error: a b\n"


def test_nothing_answers_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1"
    assert run_command(monkeypatch, "bench", "serve", "--url", url, "--synthetic", "rate=1,prompt=1,output=1") == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: nothing answers at {url}")
    assert message.endswith("; `alignedserve serve` starts a server\n")


def test_a_server_of_this_host_at_another_port_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:  # bound, and nobody listens
        free.bind(("127.0.0.1", 0))
        usual = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr("alignedserve.cli.main.DEFAULT_URL", usual)
        monkeypatch.setattr("alignedserve.cluster.deployments.admin_api.urls_here", lambda: ["http://127.0.0.1:8001"])
        assert run_command(monkeypatch, "explain", "chatcmpl-1", "--url", usual) == 1
    assert capsys.readouterr().err.endswith("; one runs here already: --url http://127.0.0.1:8001\n")


def test_interrupted_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.commands.bench.serve.bench_serve", interrupt)
    assert run_command(monkeypatch, "bench", "serve", "--synthetic", "rate=1,prompt=1,output=1") == 130


@each("has_lab", [True, False])
def test_the_help_groups_every_command_by_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_lab: bool
) -> None:
    if not has_lab:
        monkeypatch.setattr("alignedserve.cli.main.entry_points", lambda group: ())
    assert run_command(monkeypatch, "--help") == 0
    lines = re.findall(r"^(?:╭─ (\w[\w ]*) ─|│ ([a-z][a-z-]*)  )", capsys.readouterr().out, re.MULTILINE)
    panels = {name: panel for name, panel in PANELS.items() if has_lab or panel != LAB_COMMANDS}
    expected = [word for name, names in panels.items() for word in ((name, ""), *(("", one) for one in names))]
    assert lines[lines.index((next(iter(panels)), "")) :] == expected
    own = TyperGroup.list_commands(typer.main.get_group(app), None)  # type: ignore[arg-type]
    assert set(own) == {name for names in PANELS.values() for name in names} - set(LAB_COMMANDS)


def test_the_start_screen_says_how_to_chat_with_this_server() -> None:
    assert chat_command("http://127.0.0.1:8000", "/opt/bin/alignedserve") == "/opt/bin/alignedserve chat"
    assert chat_command("http://127.0.0.1:8001", "alignedserve") == "alignedserve chat --url http://127.0.0.1:8001"
    by_module = chat_command("https://127.0.0.1:8000", "/src/alignedserve/__main__.py")
    assert by_module.endswith(" -m alignedserve chat --url https://127.0.0.1:8000")


def test_serve_conveniences_are_overrides() -> None:
    options = ServeOptions(("1.0",), port=9000, batching="fcfs", overrides=("gateway.port=9001",))
    config = load_config(None, options.all_overrides)
    assert (config.model.path, config.gateway.port, config.batching.policy) == ("1.0", 9001, "fcfs")
    assert ServeOptions().all_overrides == []
    with pytest.raises(ConfigError, match="--lora-modules names terse twice"):
        _ = ServeOptions(("1.0",), lora_modules=("terse=/a", "other=/b", "terse=/c")).all_overrides


def test_the_benchmarks_that_help_names_are_there() -> None:
    words = str(bench_app.info.help)
    first, *others = re.findall(r"`(?:python -m benchmarks)?(\.[.\w]+)`", words)
    modules = [Path("benchmarks", *name.strip(".").split(".")) for name in (first, *others)]
    root = Path(__file__).parents[3]
    assert len(modules) == 4
    assert [one for one in modules if not (root / one).is_dir() and not (root / one).with_suffix(".py").is_file()] == []


def test_bench_serve_writes_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    load = "rt: rate=200, prompt=5, output=3, ttft=5; be: outstanding=2, prompt=5, output=3"
    with running(FakeServer()) as server:
        arguments = ["--url", server.url, "--synthetic", load, "--num-requests", "20", "--json", str(target)]
        assert run_command(monkeypatch, "bench", "serve", *arguments) == 0
    written = json.loads(target.read_bytes())
    assert written["model"] == MODEL
    chat, documents = written["report"]["classes"]
    assert (chat["num_completed"], chat["slo_attainment"], documents["slo_attainment"]) == (20, 1.0, None)
    assert written["report"]["total"]["num_sent"] == 20 + documents["num_sent"]


def test_bench_serve_prints_what_it_measured_where_its_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("lab.commands.bench.serve.require_writable", lambda path, option: None)  # it was, before
    load = "rate=200, prompt=5, output=3"
    with running(FakeServer()) as server:
        arguments = ["--url", server.url, "--synthetic", load, "--num-requests", "2", "--json", str(tmp_path)]
        assert run_command(monkeypatch, "bench", "serve", *arguments) == 2
    printed = capsys.readouterr()
    assert "output tokens/s" in printed.out
    assert "cannot be written: Is a directory" in printed.err


def test_bench_serve_sends_nothing_where_its_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--synthetic", "rate=1, prompt=5, output=3", "--json", str(tmp_path)]
    assert run_command(monkeypatch, "bench", "serve", *arguments) == 2
    assert capsys.readouterr().err == f"error: --json {tmp_path}: cannot be written: Is a directory\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--window", "soon", "--window must be a duration from 1m to 7d"),
        ("--not-before", "tomorrow", "--not-before is no time with its zone"),
        ("--hours", "always", "--hours must end with a time zone"),
    ],
)
def test_batch_submit_names_the_option_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert run_command(monkeypatch, "batch", "submit", __file__, "--endpoint", "chat", option, value) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_bench_serve_prints_json_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(Path(__file__).parents[3] / "lab/workload/shipped/azure_conv_slice.csv")
    arguments = ["--trace", trace, "--rate", "200", "--num-requests", "9", "--max-prompt", "50", "--json", "-"]
    with running(FakeServer()) as server:
        assert run_command(monkeypatch, "bench", "serve", "--url", server.url, *arguments) == 0
    assert json.loads(capsys.readouterr().out)["report"]["num_clamped_prompts"] == 9


def test_bench_serve_reports_what_it_has_when_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, asked = tmp_path / "report.json", []

    def respond(body: object) -> Script:
        asked.append(body)
        if len(asked) < 5:
            return Script()
        os.kill(os.getpid(), signal.SIGINT)
        return Script(first_delay_s=30.0)

    with running(FakeServer(respond=respond)) as server:
        arguments = ["--url", server.url, "--synthetic", "outstanding=1,prompt=2,output=3", "--num-requests", "9"]
        assert run_command(monkeypatch, "bench", "serve", *arguments, "--json", str(target)) == 130
    report = json.loads(target.read_bytes())["report"]
    assert (report["total"]["num_completed"], report["num_interrupted"]) == (4, 1)
    told = capsys.readouterr().out
    assert "interrupted: what had ended by then counts, not the requests in the air (1)" in told
    assert "prompts had 3.5 times the tokens that were planned" in told  # the server counts seven


def test_bench_serve_fails_when_nothing_completes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(respond=lambda body: Script(status=503))) as server:
        arguments = ["--url", server.url, "--synthetic", "rate=100,prompt=5,output=3", "--num-requests", "3"]
        assert run_command(monkeypatch, "bench", "serve", *arguments) == 1
    assert "failed: http 503" in capsys.readouterr().out


ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
_GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {name: _GROUP.get_command(None, name) for name in _GROUP.list_commands(None)}
_NAMES = "|".join(map(re.escape, COMMANDS))
_CALLED = re.compile(rf"(?:\balignedserve |`)((?:{_NAMES}) [^\n`#|;&]*)")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
_OF_OTHERS = re.compile(r"'--[^'\n]*'")  # options within an option, for another program


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_pages_name_exist(page: Path) -> None:
    called = _CALLED.findall(_OF_OTHERS.sub("", page.read_text(encoding="utf-8").replace("\\\n", " ")))
    assert [line for line in called if not set(_OPTION.findall(line)) <= set(_options(line.split()))] == []


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"[a-z]+(?:-[a-z]+)*", " ".join(re.findall(r"^\| (`alignedserve [^|]*) \|", text, re.MULTILINE)))
    )
    assert sorted(COMMANDS.keys() - named) == []


def test_help_shows_what_a_model_is_called_by() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert "ORG/NAME[:QUANTISATION][@REVISION]" in shown


def _options(words: list[str]) -> Iterator[str]:
    yield "--help"
    command: Any = COMMANDS[words[0]]
    for word in words[1:]:
        if word not in getattr(command, "commands", ()):
            break
        command = command.commands[word]
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


def test_a_full_disk_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="1"), written_output():
            print("a table")
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


def test_a_reader_that_left_ends_a_command_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit, match="141"), written_output():
            print("a table")
    assert capsys.readouterr().err == ""


def _through_typer(text: str) -> None:
    app = typer.Typer()
    app.command()(lambda: typer.echo(text))
    app([])


@pytest.mark.parametrize("show", [_through_typer, lambda text: results().print(text)])
def test_libraries_that_end_a_command_without_a_reader_do_not_call_it_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], show: Callable[[str], None]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # typer replaces it
        with pytest.raises(SystemExit, match="141"), written_output():
            show("a table")
    assert capsys.readouterr().err == ""


def test_other_errors_are_not_taken_for_output_that_cannot_be_written() -> None:
    with pytest.raises(FileNotFoundError), written_output():
        os.open("/no/such/file", os.O_RDONLY)
    with pytest.raises(SystemExit, match="7"), written_output():
        sys.exit(7)


def test_a_command_that_was_started_without_streams_prints_into_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_closed_streams()
    opened = [sys.stdin, sys.stdout, sys.stderr]
    results().print("a table")
    print_json({})
    assert sys.stdin.read() == ""
    assert all(os.get_inheritable(stream.fileno()) for stream in opened)
    for stream in opened:
        stream.close()

"""`alignedserve serve`: start a cluster on this machine, say what to do next, stop cleanly.

The terminal while a cluster starts: the sizes chosen, and how much of the model is loaded.

`alignedserve up`: serve on the nodes of the Ray cluster that runs here, also after this shell has ended.
"""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from alignedserve.api.objectives import default_slo, in_words, unholdable
from alignedserve.cli.commands.serving.node_losses import NodeLosses
from alignedserve.cli.console import INTERRUPTED, chat_command, notes, results
from alignedserve.cli.downloads import fetch_model
from alignedserve.cli.keys.commands import check_keys, show_keys, warn_of_strangers
from alignedserve.cli.options import ServeOptions
from alignedserve.cli.wiring import start_cluster
from alignedserve.cluster.deployments.on_demand import ModelOnDemand
from alignedserve.cluster.drain_watch import LastAnswers
from alignedserve.cluster.hosts.orders import connected
from alignedserve.cluster.hosts.record import ClusterRecord, read_record, recorded_drain_s, recorded_driver
from alignedserve.cluster.hosts.supervisor import driver_log, end_supervisor, start_supervisor
from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.cluster.memory_planner import SizeChoice
from alignedserve.cluster.serving_cluster import AskedToStop, ServingCluster
from alignedserve.cluster.signals import ignore_signals
from alignedserve.config.environment import api_keys, ray_address
from alignedserve.config.model_settings import ModelSettings, load_models, name_of
from alignedserve.config.overrides import override_of
from alignedserve.config.sections import MIB, ClusterConfig, GatewayConfig
from alignedserve.core.errors import AlignedServeError, NodeLost, ResourceError
from alignedserve.gateway.connections.limits import file_shortage
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process import loading_progress
from alignedserve.process.heap import forget_pages_of_files, settle_heap
from alignedserve.runtime.device_check.choice import DeviceChoice
from alignedserve.runtime.model.named_models import POCKET, pocket_folder
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.factory import require_effect

_GIB = 1024 * MIB
_FIRST_ESTIMATE_S = 1.0  # of loading; earlier ones jump


class StartScreen:
    """A StartObserver on stderr, used as a context manager. Only the sizes are written where that is no terminal."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or notes()
        self._clock = clock
        self._began_s: float | None = None  # loading
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),  # the whole line fits in 80 columns
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
            refresh_per_second=4,  # drawing costs CPU that the loading needs
        )
        self._task = self._bar.add_task("Starting the cluster …", total=None, done="")

    def __enter__(self) -> "StartScreen":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stopping(self) -> None:
        self._bar.tasks[0].total = None
        self._bar.update(self._task, description="Stopping …", done="")

    def device_chosen(self, choice: DeviceChoice) -> None:
        if choice.remark:
            self._console.print(
                f"{'WARNING: ' if choice.is_warning else ''}{choice.remark}", markup=False, soft_wrap=True
            )

    def sizes_chosen(self, choice: SizeChoice, *, has_others: bool = False) -> None:
        self._console.print(choice.line(names_model=has_others), markup=False, soft_wrap=True)
        for warning in choice.remarks(names_model=has_others):
            self._console.print(f"warning: {warning}", markup=False, soft_wrap=True)

    def model_loading(self, progress: loading_progress.LoadedShare) -> None:
        if not progress.total_bytes:
            return
        if self._began_s is None:
            self._began_s = self._clock()
        if progress.read_bytes == progress.total_bytes:
            # Without a total, as a finished bar would stand still until the workers answer; `update` takes no None.
            self._bar.tasks[0].total = None
            self._bar.update(self._task, description="Warming up …", done=_amount(progress))
            return
        done = _amount(progress) + _left(progress, self._clock() - self._began_s)
        total, completed = progress.total_bytes, progress.read_bytes
        self._bar.update(self._task, description="Loading …", total=total, completed=completed, done=done)


def _amount(progress: loading_progress.LoadedShare) -> str:
    unit, name, digits = (_GIB, "GiB", 1) if progress.total_bytes >= 10 * _GIB else (MIB, "MiB", 0)
    read, total = (f"{size / unit:.{digits}f}" for size in (progress.read_bytes, progress.total_bytes))
    return f"{read} of {total} {name}, {progress.num_layers} of {progress.total_layers} layers"


def _left(progress: loading_progress.LoadedShare, elapsed_s: float) -> str:
    if not progress.read_bytes or elapsed_s < _FIRST_ESTIMATE_S:
        return ""
    left_s = elapsed_s * (progress.total_bytes - progress.read_bytes) / progress.read_bytes
    return f", {left_s:.0f} s left"


_READY_TIMEOUT_S = 120.0
_DRAIN_LOOK_S = 0.1
_WATCH_S = 0.5  # between looks for an end whose interrupt was dropped


def serve(options: ServeOptions, settings: ModelSettings, template: WorkerTemplate | None) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises an error of the tree, with nothing left running, when it cannot start.
    `settings`: those of the options. `template`: of the processes of a cluster on this host."""
    ending, losses = _StopSignals(), NodeLosses()
    try:
        _serve(options, settings, template, ending, losses)
    except NodeLost as error:
        if ending.is_asked_for:
            return
        losses.go_on_after(error, is_wanted=settings.configs[0].links.restart_on_node_loss)


def _serve(
    options: ServeOptions,
    settings: ModelSettings,
    template: WorkerTemplate | None,
    ending: "_StopSignals",
    losses: NodeLosses,
) -> None:
    started_s = time.monotonic()
    try:
        losses.pause()
        check_keys(settings.configs[0].gateway)
        settings = settings.with_local([fetch_model(config.model) for config in settings.configs])
        cluster = _start(settings, options.nodes, template, ending)
        warn_of_strangers(settings.configs[0].gateway)  # a start that is refused says why, and nothing else
    except KeyboardInterrupt:
        notes().print("Interrupted before it was up; nothing is left running.")
        raise typer.Exit(INTERRUPTED) from None
    except AskedToStop:
        notes().print("Stopped before it was up; nothing is left running.")
        return
    end = cluster.stop
    try:
        with notes().status("Waiting for the first token …"):
            cluster.wait_ready(_READY_TIMEOUT_S)
        settle_heap()
        forget_pages_of_files()
        results().print(_welcome(cluster, time.monotonic() - started_s))
        show_trial(cluster.url, cluster.served, cluster.config.gateway)
        _look_after(cluster, ending)
        _drain(cluster, ending)
        notes().print("Stopping …")
    except (KeyboardInterrupt, AskedToStop):
        notes().print("Stopping …")
    except AlignedServeError:
        raise
    except Exception:  # a fault of the driver's, for which requests need not end
        end = cluster.leave
        raise
    finally:
        ignore_signals()
        end()


def _look_after(cluster: ServingCluster, ending: "_StopSignals") -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while not ending.is_asked_for and cluster.check():
            if ending.takes_hangup():
                cluster.read_again()
                show_keys(cluster.config.gateway)
            time.sleep(_WATCH_S)


def _drain(cluster: ServingCluster, ending: "_StopSignals") -> None:
    drain_s, num_signals, is_said = cluster.config.gateway.drain_s, ending.num_signals, False
    ends_s, last_answers = time.monotonic() + drain_s, LastAnswers()
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < ends_s and not last_answers.look(cluster.actors()):
            if ending.num_signals > num_signals or cluster.ends_at_once():
                return
            if last_answers.num_open and not is_said:
                is_said = True
                notes().print(_draining(last_answers.num_open, drain_s), soft_wrap=True)
            cluster.check()
            time.sleep(_DRAIN_LOOK_S)


def _draining(num_open: int, drain_s: float) -> str:
    requests = "1 request goes" if num_open == 1 else f"{num_open} requests go"
    return f"Draining: {requests} on for at most {drain_s:g} s (gateway.drain_s); Ctrl-C or SIGTERM again ends at once."


class _StopSignals:
    """Handler of Ctrl-C and SIGTERM alike, also where a shell started us in the background with SIGINT ignored. SIGHUP
    is kept for whoever asks; at a terminal it ends the process, as when that is closed. The others raise where the main
    thread is, and are remembered as well: Python drops what is raised inside a destructor."""

    def __init__(self) -> None:
        self.num_signals, self._has_hangup = 0, False
        self.show: Callable[[], None] | None = None  # that a signal was heard
        if sys.stdin is None or not sys.stdin.isatty():
            signal.signal(signal.SIGHUP, self._hang_up)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    @property
    def is_asked_for(self) -> bool:
        return self.num_signals > 0

    def takes_hangup(self) -> bool:
        was, self._has_hangup = self._has_hangup, False
        return was

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._has_hangup = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        if self.show is not None:
            self.show()
        raise KeyboardInterrupt


def _start(
    settings: ModelSettings, num_nodes: int | None, template: WorkerTemplate | None, ending: _StopSignals
) -> ServingCluster:
    with StartScreen() as screen:
        ending.show = screen.stopping
        cluster = start_cluster(settings, screen, num_nodes, template)
    ending.show = None
    if ending.is_asked_for:
        cluster.stop()
        raise KeyboardInterrupt
    return cluster


def show_trial(url: str, served: ServedModel, config: GatewayConfig) -> None:
    key = ' -H "Authorization: Bearer $ALIGNEDSERVE_API_KEY"' if api_keys() or config.keys_file else ""
    path, body = _trial(served)
    command = f"curl {url}{path}{key} -H 'content-type: application/json' -d '{body}'"
    results().print(f"Try {command}", soft_wrap=True, markup=False)


def _trial(served: ServedModel) -> tuple[str, str]:
    if served.encoder is None:
        question = "spell otter" if served.folder == pocket_folder() else "What is the capital of France?"
        return (
            "/v1/chat/completions",
            f'{{"model":"{served.name}","messages":[{{"role":"user","content":"{question}"}}]}}',
        )
    if served.encoder.score is None:
        return "/v1/embeddings", f'{{"model":"{served.name}","input":"What is the capital of France?"}}'
    documents = '["Paris is the capital of France.","Berlin is in Germany."]'
    return "/v1/rerank", f'{{"model":"{served.name}","query":"capital of France","documents":{documents}}}'


def _welcome(cluster: ServingCluster, seconds: float) -> Panel:
    table = Table.grid(padding=(0, 2))
    if cluster.served.encoder is None:
        table.add_row("Chat here", f"[bold]{escape(chat_command(cluster.url, sys.argv[0]))}[/]  (in another terminal)")
        table.add_row("Web page", f"[bold]{cluster.url}/[/]")
    table.add_row("OpenAI API", f"[bold]{cluster.url}/v1[/]")
    if cluster.is_on_hosts:
        for node in cluster.record().nodes:
            table.add_row(f"{node.hostname} {node.address}", node.summary)
    else:
        table.add_row("Gateways", str(cluster.config.gateway.count))
    for plan in cluster.plans:
        if not cluster.is_on_hosts:
            (choice,) = plan.choices.values()
            table.add_row(f"[bold]{escape(plan.served.name)}[/]", _shape(choice.config))
        _describe(table, plan.served)
    for demand in cluster.on_demand:
        table.add_row(
            f"[bold]{escape(demand.order.subject)}[/]", f"asleep: loads on its first request{_leaves(demand)}"
        )
    describe_objectives(table, cluster.config.gateway, cluster.statuses())
    shortage = file_shortage(cluster.config.gateway)
    if shortage is not None:
        table.add_row("[yellow]warning[/]", escape(shortage))
    names = ", ".join(
        [*(plan.served.name for plan in cluster.plans), *(demand.order.subject for demand in cluster.on_demand)]
    )
    table.add_row("Logs", str(cluster.folder / "logs"))
    table.add_row("Stop", "Ctrl-C")
    return Panel(table, title=f"AlignedServe serves [bold]{escape(names)}[/] (ready in {seconds:.1f} s)")


def _leaves(model: ModelOnDemand) -> str:
    if model.keep_alive_s == math.inf:
        return ", and leaves only for others"
    return f", and leaves {model.keep_alive_s:g} s after the last one"


def describe_objectives(table: Table, config: GatewayConfig, statuses: Mapping[str, ClusterStatus]) -> None:
    for deployment, status in sorted(statuses.items()):
        slo = default_slo(config, status.speed)
        which = f"{deployment}: " if len(statuses) > 1 else ""
        table.add_row("Objectives", escape(f"{which}{in_words(slo)}  (of chat that names none)"))
        for warning in unholdable(slo, status.speed):
            table.add_row("[yellow]warning[/]", escape(f"{which}{warning}"))


def _describe(table: Table, served: ServedModel) -> None:
    if served.encoder is None:
        table.add_row("Sampling", escape(f"{served.sampling.in_words()}; a request's own fields win"))
    if served.stored is not None:
        table.add_row("Weights", served.stored.description)
    if served.cache_dtype is not None:
        table.add_row("KV cache", f"{served.cache_dtype}, with a scale per token and head")


def _shape(config: ClusterConfig) -> str:
    if not config.chosen_topology.is_separate:
        workers = "worker" if config.decode.count == 1 else "workers"
        kind = f"{config.chosen_topology.value} {workers}"
        return f"1 router, {config.decode.count} {kind}"
    return f"1 router, 1 KV pool, {config.prefill.count} prefill and {config.decode.count} decode workers"


_READY_S = 900.0
_POLL_S = 0.5
_TAIL_LINES = 15
_BOOTSTRAP_NAME = "ray_bootstrap_config.yaml"  # in the head's home


def up(options: ServeOptions) -> None:
    """Start the supervisor of a driver, in place of any former one, and wait until the cluster answers. Raises an error
    of the tree, with the driver's last words, when it does not."""
    settings = load_models(options.config, options.all_overrides, options.named_models)
    for config in settings.configs:
        check_keys(config.gateway)
        require_effect(config)  # a mistake is reported here, not in a log
    config = settings.configs[0]
    warn_of_strangers(config.gateway)
    with connected():
        end_supervisor(drain_s=recorded_drain_s())
        former = recorded_driver()
        supervisor = start_supervisor(driver_command(options, settings), ray_address() or "auto")
        with notes().status("Starting the cluster …"):
            record = _wait_ready(former, lambda: supervisor.poll() is not None)
    results().print(urls_of(record))


def urls_of(record: ClusterRecord) -> Table:
    num_serving = sum(bool(node.actors) for node in record.nodes)
    table = Table(title=f"AlignedServe serves {record.model} on {_counted(num_serving)}", title_justify="left")
    for heading in ("node", "host", "answers at"):
        table.add_column(heading)
    for node in record.nodes:
        table.add_row(
            node.name or "-", f"{node.hostname} ({node.address})", escape(node.problem or "\n".join(node.urls))
        )
    return table


def _counted(num_nodes: int) -> str:
    return f"{num_nodes} node" if num_nodes == 1 else f"{num_nodes} nodes"


def driver_command(options: ServeOptions, settings: ModelSettings) -> list[str]:
    """Return the driver's command line: that of `serve`, with paths as seen from any folder. `settings`: what the
    options amount to, seen from the folder of this shell."""
    command = [sys.executable, "-m", "alignedserve", "serve"]
    command += [_absolute_argument(model) for model in options.named_models]
    if options.config is not None:
        command += ["--config", str(options.config.absolute())]
    for override in (*options.all_overrides, *_absolute_paths(settings, is_named=bool(options.named_models))):
        command += ["--set", override]
    return [*command, "--nodes", str(options.nodes or expected_nodes(Path.home() / _BOOTSTRAP_NAME))]


def _absolute_argument(model: str) -> str:
    name, separator, path = ("", "", model) if Path(model).exists() else model.rpartition("=")
    return f"{name}{separator}{_absolute(path) if _is_local(path) else path}"


def _absolute_paths(settings: ModelSettings, *, is_named: bool) -> list[str]:
    """Return overrides for paths that mean something else in the driver's folder, which is not the shell's. `is_named`:
    the models are arguments of the command line, and no settings."""
    config = settings.configs[0]
    paths: dict[str, str | None] = {
        "batches.folder": config.batches.folder if not config.batches.is_in_bucket else None,
        "recording.folder": config.recording.folder,
    }
    if not is_named:
        prefixes = [""] if len(settings.own) == 1 else [f"{name_of(sections)}." for sections in settings.own]
        models = [config.model.path for config in settings.configs]
        paths |= {
            f"{prefix}model.path": path if _is_local(path) else None
            for prefix, path in zip(prefixes, models, strict=True)
        }
    return [
        override_of(field, _absolute(path))
        for field, path in paths.items()
        if path is not None and not Path(path).is_absolute()
    ]


def _is_local(model: str) -> bool:
    return model != POCKET and Path(model).exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def expected_nodes(bootstrap: Path) -> int:
    try:
        document = yaml.safe_load(bootstrap.read_text(encoding="utf-8"))
        types = document.get("available_node_types") or {}
        num_workers = sum(int(node_type.get("min_workers") or 0) for node_type in types.values())
        return 1 + max(num_workers, int(document.get("min_workers") or 0))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        return 1


def _wait_ready(former: tuple[str, str] | None, has_ended: Callable[[], bool]) -> ClusterRecord:
    ends_s = time.monotonic() + _READY_S
    while time.monotonic() < ends_s:
        time.sleep(_POLL_S)
        if recorded_driver() != former:  # a former one of another version could not be read
            record = read_record()
            if record is not None and record.is_ready:
                return record
        if has_ended():
            raise ResourceError(f"the driver has ended: {_last_words(driver_log())}")
    raise ResourceError(f"the cluster was not ready within {_READY_S:.0f} s; its driver writes to {driver_log()}")


def _last_words(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{path} cannot be read"
    errors = [line for line in lines[-_TAIL_LINES:] if line.startswith("error: ")]
    return f"{errors[-1].removeprefix('error: ')} (see {path})" if errors else f"see {path}"

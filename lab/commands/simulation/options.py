"""Options of the commands that simulate, a dataclass for each command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.options import ConfigOption, JsonFlag, ProcessesOption, SeedOption, SetOption
from alignedserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of `alignedserve replay`."""

    folder: Annotated[Path, typer.Argument(help="Folder that `serve --record` filled.", exists=True, file_okay=False)]
    component: Annotated[
        str | None,
        typer.Option("--component", metavar="NAME", help="Only this component's decisions, and no simulation."),
    ] = None
    fit_on: Annotated[
        Path | None,
        typer.Option(
            "--fit-on",
            metavar="DIR",
            help="Another recorded run, from which the simulation gets its costs.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    costs: Annotated[
        str | None, typer.Option("--costs", metavar="fitted:FILE", help="Costs from `alignedserve profile`.")
    ] = None
    outstanding: Annotated[
        tuple[str, ...],
        typer.Option(
            "--outstanding",
            metavar="rt|be=N",
            help="Simulate this class as N requests in the air at a time, not by the times at which they came.",
        ),
    ] = ()
    is_simulated: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Simulate the run and compare its times.")
    ] = True
    json_output: JsonFlag = False

    def __post_init__(self) -> None:
        if self.fit_on is not None and self.costs is not None:
            raise ConfigError("give either --fit-on or --costs")


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Options of `alignedserve simulate`."""

    policies: Annotated[
        tuple[str, ...],
        typer.Option(
            "--policy",
            metavar="NAME[:PARAMETER=VALUE,...]",
            help="A scheduling policy (repeatable).",
            show_default="aligned, aligned_slo, fcfs, sarathi",
        ),
    ] = ()
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="LINE",
            help="Traffic in one line (docs/workloads.md), such as './last-night.csv, arrivals=recorded'.",
            show_default="a trace of conversations, TTFT 1 s, TPOT 0.1 s",
        ),
    ] = None
    rates: Annotated[
        tuple[str, ...],
        typer.Option(
            "--rate",
            metavar="R[,R...]",
            help="Requests per second (repeatable).",
            show_default="2,3,4,6, or what the line says",
        ),
    ] = ()
    model: Annotated[str | None, typer.Option(help="Whose sizes to take.", show_default="llama-2-13b")] = None
    hardware: Annotated[str | None, typer.Option(help="Accelerator.", show_default="a100-80g")] = None
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Accelerators of one worker.", show_default="1, or what the configuration says"),
    ] = None
    num_prefill: Annotated[int | None, typer.Option("--prefill", min=1, help="Prefill workers.")] = None
    num_decode: Annotated[int | None, typer.Option("--decode", min=1, help="Decode workers.")] = None
    num_workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "--colocated",
            min=1,
            help="Workers that do both phases (elastic, colocated). Alone: every policy runs on such.",
            show_default="as many as --prefill and --decode together",
        ),
    ] = None
    num_pools: Annotated[int, typer.Option("--pools", min=1, help="Nodes that the workers are shared out among.")] = 1
    num_nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, max=10_000, help="Nodes with so many workers each.")
    ] = None
    num_routers: Annotated[int, typer.Option("--routers", min=1, help="Routers that nodes are shared out among.")] = 1
    router_us: Annotated[
        float, typer.Option(min=0.0, help="Microseconds that a router needs for an event.", show_default="0: at once")
    ] = 0.0
    costs: Annotated[
        str,
        typer.Option(
            metavar="NAME|fitted:FILE",
            help="What iterations cost: roofline, a published measurement, or a profile of `alignedserve profile`.",
        ),
    ] = "roofline"
    kernel: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="How decode attention is divided: load_balanced, flashinfer, flash_attention_2, ..."
        ),
    ] = "load_balanced"
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration",
            min=0.001,
            help="Seconds of arrivals.",
            show_default="60; with --workload a recording's own, otherwise 100 requests",
        ),
    ] = None
    seed: SeedOption = 0
    processes: ProcessesOption = None
    config: ConfigOption = None
    overrides: SetOption = ()
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where report.html and simulation.json go.")] = Path(
        "simulation"
    )
    json_output: JsonFlag = False


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `alignedserve plan`."""

    workload: Annotated[
        str | None,
        typer.Option(
            metavar="LINE|FILE",
            help="Traffic in one line (docs/workloads.md), or a trace: azure_conv, ./last-night.csv.",
        ),
    ] = None
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="A recorded run, in place of --workload (serve --record DIR)."),
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="What a plan may use, with prices per hour: '4x h100 @2.5, 8x a100-80g @1.2', or fitted:FILE of "
            "`alignedserve profile`.",
            show_default="with --from as many workers as there were",
        ),
    ] = None
    model: Annotated[str | None, typer.Option(help="Whose sizes to take, such as llama-2-13b.")] = None
    ttft_s: Annotated[
        float | None, typer.Option("--ttft", min=0.001, help="Seconds to the first token, where the workload has none.")
    ] = None
    tpot_s: Annotated[
        float | None, typer.Option("--tpot", min=0.0001, help="Mean seconds a token after it, where it has none.")
    ] = None
    attain: Annotated[
        float, typer.Option(min=1.0, max=100.0, help="Percent of the requests of each class that are to hold theirs.")
    ] = 99.0
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Requests per second of all open-loop classes together.")
    ] = None
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="Price per hour at most.")] = None
    policies: Annotated[
        tuple[str, ...],
        typer.Option(
            "--policy",
            metavar="NAME[:PARAMETER=VALUE,...]",
            help="A scheduling policy (repeatable).",
            show_default="aligned_slo",
        ),
    ] = ()
    topologies: Annotated[
        tuple[str, ...],
        typer.Option(
            "--topology", metavar="NAME", help="elastic, colocated, disaggregated (repeatable).", show_default="all"
        ),
    ] = ()
    degrees: Annotated[
        str | None,
        typer.Option(
            "--tensor-parallel",
            metavar="N[,N...]",
            help="Accelerators of one worker.",
            show_default="the least, and twice that",
        ),
    ] = None
    expert_degrees: Annotated[
        str | None,
        typer.Option(
            "--expert-parallel",
            metavar="N[,N...]",
            help="Processes of one worker that share a mixture's experts; of measured machines.",
            show_default="1,2,4,8, of a model with experts",
        ),
    ] = None
    costs: Annotated[str, typer.Option(metavar="NAME", help="Cost model of named accelerators.")] = "roofline"
    kernel: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="How decode attention is divided: load_balanced, flashinfer, flash_attention_2, ..."
        ),
    ] = "load_balanced"
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration", min=1.0, help="Seconds of arrivals.", show_default="a recording's own, otherwise 600"
        ),
    ] = None
    seed: SeedOption = 0
    processes: ProcessesOption = None
    config: ConfigOption = None
    overrides: SetOption = ()
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where report.html, plan.json and plan.yaml go.")] = Path(
        "plan"
    )
    json_output: JsonFlag = False

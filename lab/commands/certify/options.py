"""Options of `alignedserve certify`.

Loads nothing heavy, so that `--help` answers at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from alignedserve.cli.options import ConfigOption, JsonFlag, ModelOption, SeedOption, SetOption
from alignedserve.config.environment import CLIENT_KEY_VARIABLE, client_api_key
from alignedserve.core.errors import ConfigError

_FULL = (90.0, 90.0, 4)  # seconds of a burst, seconds of nothing, how often
_SMALL = (6.0, 5.0, 2)
_OF_SERVERS = {
    "endpoint": "--endpoint",
    "key_variable": "--key-from",
    "outstanding": "--outstanding",
    "streams": "--streams",
    "patience_s": "--patience",
}
_OF_SIMULATIONS = {"simulated_model": "--simulated-model", "hardware": "--hardware", "costs": "--costs"}
TOPOLOGIES = ("elastic", "colocated", "disaggregated")
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """Options of `alignedserve certify`."""

    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="Address of any OpenAI-compatible server. Without one a server with the pocket model is started, "
            "certified and stopped.",
        ),
    ] = None
    is_small: Annotated[bool, typer.Option("--small", help="Two minutes in all: two bursts of 6 s.")] = False
    is_simulated: Annotated[bool, typer.Option("--simulated", help="On modelled accelerators, by the simulator.")] = (
        False
    )
    model: ModelOption = None
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat"
    key_variable: Annotated[
        str, typer.Option("--key-from", metavar="VARIABLE", help="Environment variable with the key of the server.")
    ] = CLIENT_KEY_VARIABLE
    # --- the protocol
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Chats per second of a burst.", show_default="0.4 of what the server can do"),
    ] = None
    burst_s: Annotated[
        float | None, typer.Option("--burst", min=1.0, help="Seconds of a burst.", show_default="90")
    ] = None
    idle_s: Annotated[
        float | None, typer.Option("--idle", min=0.0, help="Seconds without chat after it.", show_default="90")
    ] = None
    num_bursts: Annotated[int | None, typer.Option("--bursts", min=1, help="Bursts.", show_default="4")] = None
    num_lines: Annotated[
        int | None,
        typer.Option("--lines", min=1, max=50_000, help="Lines of each batch.", show_default="as many as last"),
    ] = None
    windows: Annotated[
        tuple[str, ...],
        typer.Option("--window", help="A batch with this window (repeatable).", show_default="30m, 2h, 24h, in scale"),
    ] = ()
    chat_prompt_len: Annotated[int, typer.Option("--chat-prompt", min=1, help="Tokens, in the mean.")] = 64
    chat_output_len: Annotated[int, typer.Option("--chat-output", min=2, help="Tokens, in the mean.")] = 32
    document_prompt_len: Annotated[int, typer.Option("--document-prompt", min=1, help="Tokens, in the mean.")] = 256
    document_output_len: Annotated[int, typer.Option("--document-output", min=1, help="Tokens, at least.")] = 128
    chat_pictures: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Percent of chats that carry a picture, each its own.")
    ] = 0.0
    document_pictures: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Percent of documents that carry one.")
    ] = 0.0
    picture_edge: Annotated[int, typer.Option(min=16, max=4096, help="Pixels of a picture's edge; it is a square.")] = (
        96
    )
    outstanding: Annotated[
        int, typer.Option(min=1, max=10_000, help="Documents in the air at a time, for a server without batches.")
    ] = 256
    streams: Annotated[bool, typer.Option("--streams", help="Stream documents even where there are batches.")] = False
    ttft_s: Annotated[
        float | None,
        typer.Option("--ttft", min=0.001, help="Objective: seconds to the first token.", show_default="1, or 5 x idle"),
    ] = None
    tpot_s: Annotated[
        float | None,
        typer.Option("--tpot", min=0.0001, help="Objective: mean seconds a token.", show_default="0.1, or 3 x idle"),
    ] = None
    seed: SeedOption = 0
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=1.0, help="Give chats or documents up if none gets on for so many seconds."),
    ] = 300.0
    # --- bounds: exit code 1 when one does not hold
    max_attainment_loss: Annotated[float, typer.Option(help="Points of attainment lost beside documents.")] = 1.0
    max_ttft_ratio: Annotated[float, typer.Option(help="The latest first token, by its objective.")] = 3.0
    min_documents: Annotated[float, typer.Option(help="Percent of what chat leaves over that documents get.")] = 85.0
    max_lost: Annotated[int, typer.Option(min=0, help="Lines without a record.")] = 0
    max_doubled: Annotated[int, typer.Option(min=0, help="Records beyond the first of a line.")] = 0
    max_wrong: Annotated[int, typer.Option(min=0, help="Lines answered otherwise than alone.")] = 0
    max_failed: Annotated[int, typer.Option(min=0, help="Lines that failed.")] = 0
    max_timeouts: Annotated[int, typer.Option(min=0, help="Answers of 504, and answers that broke off.")] = 0
    max_missed_windows: Annotated[int, typer.Option(min=0, help="Batches that ended after their window.")] = 0
    min_beside: Annotated[float, typer.Option(help="Percent of chats that must have documents beside them.")] = 50.0
    min_attainment: Annotated[float | None, typer.Option(help="Percent of chats in time, beside documents.")] = None
    max_ttft_p99_ratio: Annotated[float | None, typer.Option(help="p99 of TTFT, with documents to without.")] = None
    max_tpot_p99_ratio: Annotated[float | None, typer.Option(help="p99 of TPOT, likewise.")] = None
    max_gap_p99_ratio: Annotated[float | None, typer.Option(help="p99 of gaps, likewise.")] = None
    # --- the server that is started, or simulated
    topology: Annotated[str | None, typer.Option(help="elastic, colocated or disaggregated.")] = None
    num_workers: Annotated[int, typer.Option("--workers", min=1, help="Workers; of separate ones so many of each.")] = 1
    config: ConfigOption = None
    overrides: SetOption = ()
    simulated_model: Annotated[
        str | None,
        typer.Option(help="With --simulated: whose sizes to take.", show_default="what --model says, or llama-2-13b"),
    ] = None
    hardware: Annotated[str | None, typer.Option(help="With --simulated: accelerator.", show_default="a100-80g")] = None
    costs: Annotated[str, typer.Option(metavar="NAME|fitted:FILE", help="With --simulated: cost model.")] = "roofline"
    # --- what comes of it
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where certificate.html and certificate.json go.")] = Path(
        "certificate"
    )
    json_output: JsonFlag = False

    def __post_init__(self) -> None:
        if self.url is not None and self.is_simulated:
            raise ConfigError("--simulated needs no server: leave the URL out")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url}: must begin with http:// or https://")
        if self.is_simulated:
            self._refuse(_OF_SERVERS, "no meaning with --simulated: there is no server to ask")
        else:
            self._refuse(_OF_SIMULATIONS, "no meaning without --simulated")
        if self.is_simulated and self.model is not None and self.simulated_model is not None:
            raise ConfigError("--model and --simulated-model both say whose sizes to take: leave one out")
        is_shaped = self.topology is not None or self.num_workers != 1 or self.config is not None or self.overrides
        if self.url is not None and is_shaped:
            raise ConfigError(
                "--topology, --workers, --config and --set belong to a server that this command starts; "
                "the URL names a running one"
            )
        if self.topology is not None and self.topology not in TOPOLOGIES:
            raise ConfigError(f"--topology {self.topology}: must be one of {', '.join(TOPOLOGIES)}")
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"--endpoint {self.endpoint}: must be chat or completions")
        if self.key_variable != CLIENT_KEY_VARIABLE and client_api_key(self.key_variable) is None:
            raise ConfigError(f"--key-from {self.key_variable}: the environment has no such variable, or it is empty")
        if self.chat_pictures or self.document_pictures:
            if self.is_simulated:
                raise ConfigError("--chat-pictures and --document-pictures: the simulated server sees no pictures")
            if self.endpoint != "chat":
                raise ConfigError("--endpoint completions takes no pictures: leave --chat-pictures and the like out")

    def _refuse(self, options: Mapping[str, str], why: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        changed = [option for name, option in options.items() if getattr(self, name) != defaults[name]]
        if changed:
            raise ConfigError(f"{' and '.join(changed)}: {why}")

    @property
    def modelled(self) -> str | None:
        """Return the model whose sizes a simulation takes; None: its default."""
        return self.simulated_model or self.model

    @property
    def bursts(self) -> tuple[float, float, int]:
        """Return seconds of a burst, seconds without chat after it, and how often."""
        burst_s, idle_s, num_bursts = _SMALL if self.is_small else _FULL
        return (
            burst_s if self.burst_s is None else self.burst_s,
            idle_s if self.idle_s is None else self.idle_s,
            self.num_bursts or num_bursts,
        )

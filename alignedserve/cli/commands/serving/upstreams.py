"""`alignedserve serve --upstream` or `--engine vllm`: stand before OpenAI-compatible servers, in this process alone."""

import asyncio
import gc
import logging
import signal
import sys
from dataclasses import replace

import uvloop
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from alignedserve.api.work_lanes import favour_the_loop
from alignedserve.cli.console import chat_command, notes, results
from alignedserve.cli.keys.commands import check_keys, warn_of_strangers
from alignedserve.cli.options import ServeOptions
from alignedserve.config.environment import UPSTREAM_KEY_VARIABLE, api_keys, client_api_key, log_format, trace_headers
from alignedserve.config.model_settings import load_models
from alignedserve.config.sections import Observing
from alignedserve.core.errors import ConfigError
from alignedserve.gateway.connections.limits import raise_file_limit
from alignedserve.process.heap import settle_heap
from alignedserve.process.logs import formatter
from alignedserve.upstream.children import VllmChildren
from alignedserve.upstream.logic import Upstream
from alignedserve.upstream.service import UpstreamServer


def serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises an error of the tree when it cannot start."""
    if options.upstream and (options.models or options.engine):
        raise ConfigError("--upstream serves the models of other servers: leave models and --engine out")
    if options.nodes is not None or options.lora_modules or options.policy or options.quantization:
        raise ConfigError("the servers hold adapters and quantized models themselves (--engine-args): leave these out")
    overrides = replace(options, models=()).all_overrides
    config = load_models(options.config, overrides, ()).configs[0]
    check_keys(config.gateway)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format(), "door"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    favour_the_loop()
    raise_file_limit()
    children = None
    if options.engine:
        named = options.engine, options.models, options.engine_count, options.engine_args
        children = VllmChildren(*named, default=config.gateway.named_slo)
    server = UpstreamServer(
        children.urls if children else options.upstream,
        config,
        api_keys=api_keys(),
        upstream_key=children.key if children else client_api_key(UPSTREAM_KEY_VARIABLE),
        observing=Observing(config.explain, config.tracing, trace_headers()),
    )
    gc.disable()
    uvloop.run(_run(server, children))


async def _run(server: UpstreamServer, children: VllmChildren | None) -> None:
    try:
        await _serve(server, children)
    finally:
        if children is not None:
            await children.stop()


async def _serve(server: UpstreamServer, children: VllmChildren | None) -> None:
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    if children is not None:
        notes().print("Starting vLLM …")
        await _started(children, ending)
        for manners in server.door.proxy.manners.values():
            manners.takes_terms = True
    with notes().status("Looking at the upstreams …"):
        await server.start()
    settle_heap()
    config = server.config.gateway
    if sys.stdin is None or not sys.stdin.isatty():
        loop.add_signal_handler(signal.SIGHUP, server.read_again)
    warn_of_strangers(config)
    results().print(_welcome(server))
    try:
        await ending.wait()
        ending.clear()
        draining = asyncio.create_task(server.drained())
        notes().print(f"Draining for at most {config.drain_s:g} s (gateway.drain_s); Ctrl-C again ends at once.")
        await asyncio.wait({draining, asyncio.create_task(ending.wait())}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        notes().print("Stopping …")
        await server.stop()


async def _started(children: VllmChildren, ending: asyncio.Event) -> None:
    """Return when they answer. Raises ConfigError: an engine, or somebody by a signal, ends that."""
    starting, ended = asyncio.create_task(children.start()), asyncio.create_task(ending.wait())
    await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        raise ConfigError("vLLM was stopped while it started")
    ended.cancel()
    starting.result()


def _welcome(server: UpstreamServer) -> Panel:
    table, upstreams = Table.grid(padding=(0, 2)), server.door.proxy.logic.upstreams.values()
    models = server.door.proxy.logic.models
    table.add_row("Chat here", f"[bold]{escape(chat_command(server.url, sys.argv[0]))}[/]  (in another terminal)")
    table.add_row("Web page", f"[bold]{server.url}/[/]")
    table.add_row("OpenAI API", f"[bold]{server.url}/v1[/]")
    for upstream in upstreams:
        table.add_row("Upstream", escape(_state(upstream)))
    slo = server.door.proxy.slo()
    table.add_row(
        "Documents", f"give way to chat: first token within {slo.ttft_s:g} s, then one every {slo.tpot_s:g} s"
    )
    table.add_row("Stop", "Ctrl-C")
    names = ", ".join(models) or "no model yet"
    return Panel(table, title=f"AlignedServe stands before [bold]{escape(names)}[/]")


def _state(upstream: Upstream) -> str:
    if upstream.is_up:
        return f"{upstream.url}  serves {', '.join(upstream.models)}"
    again = "it is left out" if upstream.is_refused else "it joins as soon as it answers"
    return f"{upstream.url}  {upstream.problem}: {again}"

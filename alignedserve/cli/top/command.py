"""The loop of `alignedserve top`: asks the gateway, draws, waits."""

import contextlib
import time
from collections import deque
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from alignedserve.cli.console import DEFAULT_URL, print_table, printable, results
from alignedserve.cli.top.document import LiveDocument, Reading
from alignedserve.cli.top.tables import drawn
from alignedserve.client.trust import trust_for
from alignedserve.client.unreachable import unreachable
from alignedserve.cluster.deployments.client import find_cluster, has_cluster, show_status
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import AlignedServeError, ConfigError, PeerError, ProtocolError

_PATH = "/v1/alignedserve/live"
_PATIENCE_S = 10.0
_MAX_BYTES = 16 * 1024 * 1024
_ONCE_S = 2.2  # between the two documents of --once: routers report once a second
_RATES_S = 5.0  # over which rates are told


def top(url: str | None, *, is_once: bool, every_s: float) -> None:
    """Draw until Ctrl-C, or once. Raises ConfigError, PeerError or PeerLost; those of later looks are shown instead."""
    url = _address(url)
    console = results()
    first = _look(url)
    if is_once:
        time.sleep(_ONCE_S)
        print_table(drawn(Reading(_look(url), first)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _go_on(url, first, console, every_s)


def _go_on(url: str, first: LiveDocument, console: Console, every_s: float) -> None:
    documents = deque([first])
    with contextlib.ExitStack() as stack:
        is_redrawn = console.is_terminal and not console.is_dumb_terminal
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False)) if is_redrawn else None
        while True:
            problem = _look_again(url, documents)
            picture = Group(_heading(url, problem), drawn(Reading(documents[-1], documents[0])))
            if live is not None:
                live.update(picture, refresh=True)
            else:
                console.print(picture)
            time.sleep(every_s)


def _look_again(url: str, documents: deque[LiveDocument]) -> str | None:
    try:
        documents.append(_look(url))
    except AlignedServeError as error:
        return str(error)
    while len(documents) > 2 and documents[-1].time_s - documents[1].time_s >= _RATES_S:
        documents.popleft()
    return None


def _heading(url: str, problem: str | None) -> Text:
    heading = Text.assemble(("alignedserve top", "bold"), f"  {url}  {datetime.now():%H:%M:%S}")
    if problem is not None:
        heading.append(f"  {printable(problem)}; trying again", style="red")
    return heading


def _address(url: str | None) -> str:
    if url is None:
        url = show_status(find_cluster(None, option="--url")).url if has_cluster() else DEFAULT_URL
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: must be the address of a server, such as {DEFAULT_URL}")
    return url.rstrip("/")


def _look(url: str) -> LiveDocument:
    try:
        status, body = _get(url)
    except (HTTPException, OSError) as error:
        raise unreachable(url, error) from error
    if status != HTTPStatus.OK:
        raise PeerError(_refusal(status))
    try:
        return msgspec.json.decode(body, type=LiveDocument)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{url} does not answer as AlignedServe does") from error


def _get(url: str) -> tuple[int, bytes]:
    parts, key = urlsplit(url), client_api_key()
    trust, host = trust_for(url), parts.netloc
    opened = (
        HTTPConnection(host, timeout=_PATIENCE_S)
        if trust is None
        else HTTPSConnection(host, timeout=_PATIENCE_S, context=trust)
    )
    with contextlib.closing(opened) as connection:
        connection.request("GET", parts.path + _PATH, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read(_MAX_BYTES)


def _refusal(status: int) -> str:
    if status == 401:
        return "the server needs an API key: set ALIGNEDSERVE_API_KEY"
    if status == 403:
        return "this key may not see what others use: it needs may_see_usage (docs/keys.md)"
    if status == 404:
        return "the server has no such page: it is older than this command, or not AlignedServe"
    return f"the server answers with status {status}"

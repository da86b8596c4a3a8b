"""`alignedserve bench versus`: servers started and ended in turn, the same loads on each, and their table."""

import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from alignedserve.core.errors import ConfigError
from lab.commands.bench.options import VersusOptions
from lab.commands.bench.versus import bench_versus
from tests.support.marks import each

ROOT = Path(__file__).parents[3]
SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.support.servers.fake_server import FakeServer, Script

async def main():
    script = Script(first_delay_s=float(sys.argv[2]))
    async with FakeServer(respond=lambda body: script, port=int(sys.argv[3])):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def command(delay_s: float) -> str:
    return shlex.join([sys.executable, "-c", SERVER, str(ROOT), str(delay_s), "{port}"])


def test_servers_take_turns_and_the_slower_one_stands_beside_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    options = VersusOptions(
        (f"fast={command(0.02)}", f"slow={command(0.08)}"),
        ("one=outstanding=1, prompt=8, output=3",),
        duration_s=1.0,
        warm_up_s=0.2,
        json_target=str(record),
    )
    assert bench_versus(options) == 0
    written = json.loads(record.read_text())
    assert [(row["round"], row["server"]) for row in written["rows"]] == [
        *((0, "fast"), (0, "slow"), (1, "fast"), (1, "slow")),
    ]
    rates = [row["classes"][0]["output_tokens_per_s"] for row in written["rows"]]
    assert min(rates[::2]) > 2 * max(rates[1::2])
    assert "fast" in (shown := capsys.readouterr().out)
    assert "1.00" in shown
    assert not [child for child in psutil.Process().children() if "fake_server" in " ".join(child.cmdline())]


@each(
    "servers, loads, says",
    [
        (("a=http://127.0.0.1:1",), (), "two servers"),
        (("a=http://127.0.0.1:1", "a=http://127.0.0.1:2"), (), "a name of its own"),
        (("a=serve", "b=http://127.0.0.1:2"), (), "{port}"),
        (("http", "b=http://127.0.0.1:2"), (), "NAME=COMMAND"),
        (("a=http://127.0.0.1:1", "b=http://127.0.0.1:2"), ("few",), "LABEL=SPEC"),
        (("a=http://127.0.0.1:1", "b=http://127.0.0.1:2"), ("few=rate=x",), "rate"),
        (("a=no-such-program {port}", "b=http://127.0.0.1:2"), (), "cannot be started"),
        (("a=sh -c 'echo $((4 * 1111))' {port}", "b=http://127.0.0.1:2"), (), "4444"),
    ],
)
def test_what_cannot_be_compared_is_said(servers: tuple[str, ...], loads: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bench_versus(VersusOptions(servers, loads))
    assert says in str(raised.value)

"""`alignedserve usage` against a gateway on a real port."""

import asyncio
import csv
import io
import sys
from pathlib import Path

import pytest

from alignedserve.cli.main import main
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import batch_gateway

pytestmark = pytest.mark.slow


async def test_the_bill_is_csv_and_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["alignedserve", "usage", *arguments])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    async with batch_gateway(tmp_path) as served, listening(served.app) as url:
        batch = await served.wait_for((await served.submit())["id"])
        assert await asyncio.to_thread(run, "--url", url, "--by", "key,model,class", "--csv") == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert await asyncio.to_thread(run, "--url", url, "--by", "day,key") == 0
        table = capsys.readouterr().out
        assert await asyncio.to_thread(run, "--url", url, "--by", "owner") == 2
        assert await asyncio.to_thread(run, "--url", url, "--since", "yesterday") == 2
        refused = capsys.readouterr().err
    assert rows == [
        {
            "key": "anyone",
            "model": "tiny",
            "class": "batch",
            "num_model_requests": "3",
            "input_tokens": str(batch["usage"]["input_tokens"]),
            "input_cached_tokens": "0",
            "output_tokens": str(batch["usage"]["output_tokens"]),
            "compute_seconds": "0.0",
        }
    ]
    assert "anyone" in table
    assert "--by owner" in refused
    assert "--since yesterday" in refused

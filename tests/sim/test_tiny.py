"""The smallest whole of AlignedServe, which its example shows: chat keeps its objectives, documents all end."""

import re

import pytest

from examples import tiny


def said(capsys: pytest.CaptureFixture[str], policy: str) -> tuple[int, int]:
    """Run the example; return the share of chats that hold, in percent, and the documents done beside them."""
    tiny.main([policy])
    text = capsys.readouterr().out
    assert text.endswith("none is lost\n")
    ((share, done),) = re.findall(r"(\d+)% hold.* (\d+) of 100 documents", text)
    return int(share), int(done)


def test_chats_hold_beside_documents_where_a_policy_without_classes_loses_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held, done = said(capsys, "aligned_slo")
    assert held >= 99
    assert done >= 50
    assert said(capsys, "sarathi")[0] <= 50

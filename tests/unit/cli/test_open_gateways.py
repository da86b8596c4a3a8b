import pytest

from alignedserve.cli.keys.commands import warn_of_strangers
from alignedserve.config.sections import GatewayConfig


@pytest.mark.parametrize(
    ("fields", "keys", "is_told"),
    [
        ({"host": "0.0.0.0"}, "", True),
        ({"host": "node"}, "", True),
        ({}, "", False),
        ({"host": "0.0.0.0"}, "secret", False),
        ({"host": "0.0.0.0", "keys_file": "/etc/keys.yaml"}, "", False),
    ],
)
def test_who_opens_gateways_to_anyone_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, str],
    keys: str,
    is_told: bool,
) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_API_KEYS", keys)
    warn_of_strangers(GatewayConfig(**fields))  # type: ignore[arg-type]
    assert ("anyone who reaches the gateways may use them" in capsys.readouterr().err) is is_told

"""The lock that pip verifies by: of the pinned versions, whole, with a hash for each package."""

import pytest

from scripts import lock
from tests.support.marks import each

ONE, OTHER = "a" * 64, "b" * 64
TEXT = f"""\
# --hash=sha256:{OTHER} of nothing
numpy==2.4.6 \\
    --hash=sha256:{ONE} \\
    --hash=sha256:{OTHER}
typing-extensions==4.16.0 \\
    --hash=sha256:{ONE}
"""
PINS = lock.pins_of("numpy==2.4.6\ntyping_extensions==4.16.0\ntorch==2.13.0\n")
WANTED = ("numpy", "typing-extensions")


def test_the_lock_of_the_checkout_is_that_of_its_pins(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.main(["--check"]) == 0, capsys.readouterr().out


def test_what_is_written_is_read_again() -> None:
    found = lock.locked(TEXT)
    assert found == {"numpy": ("2.4.6", [ONE, OTHER]), "typing-extensions": ("4.16.0", [ONE])}
    assert lock.locked(lock.written(found)) == found
    assert lock.problems(found, PINS, WANTED) == []


@each(
    ("text", "said"),
    [
        (TEXT.replace("2.4.6", "2.4.5"), "numpy is 2.4.5, and 2.4.6 in constraints.txt"),
        (TEXT.replace("typing-extensions", "six"), "typing-extensions is missing"),
        (TEXT + "six==1.17.0 \\\n    --hash=sha256:" + ONE, "six is not needed"),
        (TEXT.replace(f" \\\n    --hash=sha256:{ONE}\n", "\n"), "typing-extensions has no hash"),
    ],
)
def test_a_lock_that_does_not_fit_is_named(text: str, said: str) -> None:
    assert said in lock.problems(lock.locked(text), PINS, WANTED)


def test_hashes_of_a_cpu_build_stay_while_its_version_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "hashes_of", lambda pins: {})
    monkeypatch.setattr(lock, "torch_on_arm", lambda version: {ONE})
    assert lock.renewed({"torch": "2.13.0"}, {"torch": ("2.13.0", [OTHER])}, []) == {"torch": ("2.13.0", [ONE, OTHER])}
    assert lock.renewed({"torch": "2.14.1"}, {"torch": ("2.13.0", [OTHER])}, []) == {"torch": ("2.14.1", [ONE])}

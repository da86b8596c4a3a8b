"""Scripts say what they do when they are asked, and do nothing else then."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_READS_ARGUMENTS = re.compile(r"\b(?:parse_args|read_options|parse_known_args)\(|\.main\(\)")
WITHOUT_ARGUMENTS = (
    "benchmarks.gpu.estimates",
    "benchmarks.gpu.predicted",
    "benchmarks.gpu.seen",
    "experiments.pages.__main__",
    "scripts.model_families",
)


@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_a_script_without_arguments_shows_its_help_and_refuses_others(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module(name)
    monkeypatch.setattr(Path, "write_text", None)  # what it is about to write, if it runs
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert (script.__doc__ or "").splitlines()[0] in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [name, "--no-such-option"])
    with pytest.raises(SystemExit) as refused:
        script.main()
    assert refused.value.code == 2


def test_every_script_reads_its_arguments() -> None:
    scripts = [path for name in ("benchmarks", "experiments", "scripts") for path in (ROOT / name).rglob("*.py")]
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in scripts}
    started = {path: source for path, source in sources.items() if '__name__ == "__main__"' in source}
    assert len(started) > 35
    assert [str(path) for path, source in started.items() if not _READS_ARGUMENTS.search(source)] == []

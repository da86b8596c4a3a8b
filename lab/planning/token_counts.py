"""The tokenizer that counted the lengths of a trace: another model's counts the same text otherwise."""

from pathlib import Path

from lab.workload.catalogue import TOKENS_OF, Library
from lab.workload.grammar import parse_classes
from lab.workload.recordings import TraceSource

_FAMILIES = ("llama-2", "llama-3", "opt", "bloom")  # models whose names begin alike have one tokenizer


def warnings_of(line: str, model: str, data_dir: Path | None) -> list[str]:
    """Return a warning for each source of lengths that names another model, or none. Raises ConfigError."""
    library, counts = Library(data_dir), []
    for name in dict.fromkeys(spec.source for spec in parse_classes(line)):
        if name is None:
            continue
        source = library.source(name)
        named = TOKENS_OF.get(name) or _named_in(source)
        if named is None:
            counts.append(f"{name} does not say whose tokens its lengths are; for {model} they may be others.")
        else:
            counts += other_tokens(name, named, model)
    return counts


def other_tokens(source: str, named: str, model: str) -> list[str]:
    """Return a warning where the lengths of a source are tokens of another model, or none."""
    if _family(named) == _family(model):
        return []
    return [f"The lengths of {source} are tokens of {named}; the same texts have other lengths in {model}."]


def _named_in(source: object) -> str | None:
    return ", ".join(source.models) or None if isinstance(source, TraceSource) else None


def _family(model: str) -> str:
    lowered = model.rpartition("/")[2].lower().removeprefix("meta-")
    return next((family for family in _FAMILIES if lowered.startswith(family)), lowered)

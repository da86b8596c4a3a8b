"""The pocket model's own word list, read once from `words.txt` beside this file."""

from pathlib import Path

_WORDS_FILE = Path(__file__).with_name("words.txt")


def _read_groups() -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    name = ""
    for line in _WORDS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        head, colon, rest = line.partition(":")
        if colon:
            name, line = head, rest
        groups.setdefault(name, []).extend(line.split())
    # Duplicates would make two table rows with one key; dict.fromkeys keeps the order of the file.
    return {name: tuple(dict.fromkeys(words)) for name, words in groups.items()}


_GROUPS = _read_groups()

NOUNS: tuple[str, ...] = _GROUPS["nouns"]
ADJECTIVES: tuple[str, ...] = _GROUPS["adjectives"]
VERBS: tuple[str, ...] = _GROUPS["verbs"]
PLACES: tuple[str, ...] = _GROUPS["places"]
WORDS: tuple[str, ...] = tuple(dict.fromkeys(NOUNS + ADJECTIVES + VERBS))

"""Reads the files that lie here."""

import csv
from importlib.resources import files


def text_of(name: str) -> str:
    return (files(__package__) / name).read_text()


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, by column name."""
    return list(csv.DictReader(text_of(name).splitlines()))

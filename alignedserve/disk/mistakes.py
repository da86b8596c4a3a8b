"""Words for what is wrong with a file that a person wrote: YAML that cannot be read, and values of another kind."""

import re

import yaml

_EXPECTED = re.compile(r"Expected `?(?P<kinds>[a-z |]+)`?, got `?[\w.]+`?")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "datetime": "a time with its zone, such as 2027-01-31T00:00:00Z",
    "array": "a list",
    "object": "a mapping of fields",
}


def mistake_of(text: str, error: Exception) -> str:
    """Return in one line what is wrong with a text that `load_yaml` refused, and where."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    rest = text.split("\n")[mark.line :]
    if rest and "\t" in rest[0][: len(rest[0]) - len(rest[0].lstrip())]:
        return f"line {mark.line + 1} is indented by a tab, and YAML takes spaces alone"
    told = f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    if error.context is None or error.context_mark is None:
        return told
    return f"{told}, {error.context} that begins in line {error.context_mark.line + 1}"


def required_kind(problem: str) -> str | None:
    """Return what a value must be where msgspec says so: "must be a number"; None: its words say something else."""
    expected = _EXPECTED.fullmatch(problem)
    if expected is None:
        return None
    names = expected["kinds"].split(" | ")
    told = [name for name in names if name != "null" and not (name == "int" and "float" in names)]
    return f"must be {' or '.join(_KINDS.get(name, name) for name in told)}"

"""Reads YAML as plain values, and refuses a key that a mapping has twice: YAML would silently keep the last."""

import re
from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"
_MAX_DEPTH = 100


def load_yaml(text: str) -> Any:
    """Return what a text says. Raises yaml.YAMLError, and ValueError for what only looks like a date or number."""
    _require_flat(text)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_repeated(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _require_flat(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _mistake("it nests too deeply", event.start_mark)


def _refuse_repeated(root: yaml.Node) -> None:
    rest, seen = [root], {id(root)}
    while rest:
        node = rest.pop()
        children = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
            _check(node)
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        for child in children:
            if not isinstance(child, yaml.ScalarNode) and id(child) not in seen:  # an alias is the node that it names
                seen.add(id(child))
                rest.append(child)


def _check(mapping: yaml.MappingNode) -> None:
    names = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        if (key.tag, key.value) in names:
            raise _mistake(f"{key.value[:64]!r} is there twice", key.start_mark)
        names.add((key.tag, key.value))


def _mistake(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


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
    problem = f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    if error.context is None or error.context_mark is None:
        return problem
    return f"{problem}, {error.context} that begins in line {error.context_mark.line + 1}"


def required_kind(problem: str) -> str | None:
    """Return what a value must be where msgspec says so: "must be a number"; None: its words say something else."""
    expected = _EXPECTED.fullmatch(problem)
    if expected is None:
        return None
    names = expected["kinds"].split(" | ")
    allowed = [name for name in names if name != "null" and not (name == "int" and "float" in names)]
    return f"must be {' or '.join(_KINDS.get(name, name) for name in allowed)}"

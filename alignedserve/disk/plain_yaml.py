"""Reads YAML as plain values, and refuses a key that a mapping has twice: YAML would silently keep the last."""

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

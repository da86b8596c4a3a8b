"""Names of modules as PEFT selects them: full names, their ends, or regular expressions.

Expressions come from files that anyone may have written, so they are matched in linear time, by the regex engine of
pydantic-core: one with look-around or back references is refused.
"""

from collections.abc import Callable

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from alignedserve.core.errors import AdapterError

NamePredicate = Callable[[str], bool]


def ends_with_any(ends: tuple[str, ...]) -> NamePredicate:
    """Match names that are one of these or end with one behind a dot."""
    dotted = tuple(f".{end}" for end in ends)
    return lambda name: name in ends or name.endswith(dotted)


def whole(expression: str, where: str) -> NamePredicate:
    """Match names that the expression matches as a whole. Raises AdapterError naming `where`."""
    return _predicate(f"^(?:{expression})$", where)


def end(expression: str, where: str) -> NamePredicate:
    """Match names whose end the expression matches, from their beginning or from behind a dot.

    So PEFT finds the rank and the scale of a module. Raises AdapterError naming `where`.
    """
    return _predicate(rf"^(?:.*\.)?(?:{expression})$", where)


def _predicate(pattern: str, where: str) -> NamePredicate:
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        raise AdapterError(f"{where} is not a regular expression that is supported (no look-around).") from error

    def matches(name: str) -> bool:
        try:
            validator.validate_python(name)
        except ValidationError:
            return False
        return True

    return matches

"""Fields that constrain an answer, under OpenAI's names and vLLM's, and the one constraint that they ask for."""

from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from alignedserve.api.schema import Schema
from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.constraints import StructuredOutputs

ChoiceList = list[Any]  # of texts, which StructuredOutputs checks
SchemaForms = dict[str, Any] | str | bool


class _ConstraintSchema(Schema):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class JsonSchemaFormat(_ConstraintSchema):
    """`json_schema` of a response format. Strict or not, every answer is held to the schema."""

    name: str = Field("", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_ConstraintSchema):
    """OpenAI's `response_format`, and vLLM's type of it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None  # of a structural tag, which is vLLM's
    triggers: list[Any] | None = None


class StructuredOutputsField(_ConstraintSchema):
    """vLLM's `structured_outputs`."""

    json_: SchemaForms | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: ChoiceList | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class ConstraintFields(Schema):
    """Fields that constrain an answer; at most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: SchemaForms | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    allow_blank_runs: bool = False  # an extension: any number of blanks in a row, where the constraint has them

    @property
    def has_free_blanks(self) -> bool:
        """Return whether the client allows runs of blanks, or has said what may stand between tokens of JSON."""
        outputs = self.structured_outputs
        pattern = outputs.whitespace_pattern if outputs is not None else None
        return self.allow_blank_runs or pattern is not None or self.guided_whitespace_pattern is not None


class Constraint(NamedTuple):
    """A constraint of the answer, and the field that sets it."""

    outputs: StructuredOutputs
    param: str

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        return InvalidRequest(f"Invalid value for {self.param}: {error}.", param=self.param, code=error.code)


def constraint_of(fields: ConstraintFields) -> Constraint | None:
    """Return the constraint that the fields ask for, if any. Raises InvalidRequest."""
    asked = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    if len(asked) > 1:
        names = " and ".join(constraint.param for constraint in asked[:2])
        raise InvalidRequest(f"{names} cannot be combined: give one constraint.", param=asked[1].param)
    if not asked and fields.guided_whitespace_pattern is not None:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern")
    return asked[0] if asked else None


def _response_format(fields: ConstraintFields) -> list[Constraint]:
    wanted = fields.response_format
    if wanted is None:
        return []
    has_tags = wanted.structures is not None or wanted.triggers is not None
    _check_member(wanted, "json_schema", "json_schema", is_there=wanted.json_schema is not None)
    _check_member(wanted, "structural_tag", "structures", is_there=has_tags)
    if wanted.json_schema is not None:
        return [Constraint(StructuredOutputs(json=wanted.json_schema.schema_), "response_format.json_schema.schema")]
    if has_tags:
        tags = {"structures": wanted.structures, "triggers": wanted.triggers}
        return [Constraint(StructuredOutputs(structural_tag=tags), "response_format")]
    return [Constraint(StructuredOutputs(json_object=True), "response_format")] if wanted.type == "json_object" else []


def _check_member(wanted: ResponseFormat, of_type: str, member: str, *, is_there: bool) -> None:
    if is_there != (wanted.type == of_type):
        param = f"response_format.{member}"
        raise InvalidRequest(f"{param} must come with the type {of_type!r}, and only with it.", param=param)


def _structured_outputs(fields: ConstraintFields) -> list[Constraint]:
    wanted = fields.structured_outputs
    if wanted is None:
        return []
    try:
        outputs = StructuredOutputs(
            json=wanted.json_,
            json_object=wanted.json_object is True,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            structural_tag=wanted.structural_tag,
            disable_any_whitespace=wanted.disable_any_whitespace,
            whitespace_pattern=wanted.whitespace_pattern,
        )
    except InvalidRequest as error:
        raise _named("structured_outputs", error) from error
    return [Constraint(outputs, f"structured_outputs.{outputs.kind}")]


def _guided(fields: ConstraintFields) -> list[Constraint]:
    given: dict[str, Any] = {
        "json": fields.guided_json,
        "regex": fields.guided_regex,
        "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }
    try:
        return [
            Constraint(
                StructuredOutputs(**{kind: value}, whitespace_pattern=fields.guided_whitespace_pattern),
                f"guided_{kind}",
            )
            for kind, value in given.items()
            if value is not None
        ]
    except InvalidRequest as error:
        raise _named("guided_whitespace_pattern", error) from error


def _named(param: str, error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for {param}: {error}.", param=param, code=error.code)

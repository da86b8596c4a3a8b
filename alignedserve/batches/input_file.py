"""The input file of one batch: validated from beginning to end, then read line by line while lines run."""

from collections.abc import AsyncIterator, Container, Sequence

from alignedserve.batches.input_lines import InputValidator, LineSplitter, LineTooLong, ParsedLine, parse_line, too_long
from alignedserve.batches.interfaces import BlobReader, BlobStore
from alignedserve.batches.logic import Validated, ValidationFailed
from alignedserve.batches.records import BatchRecord, LineProblem, is_client
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import StorageDamaged, StorageError


class _AnyModel:
    def __contains__(self, name: object) -> bool:
        return True


class InputFile:
    """Lines of one batch. Await `scan` first, then `open`; only then can lines be read."""

    def __init__(self, record: BatchRecord, blobs: BlobStore, config: BatchesConfig, models: Container[str]) -> None:
        self._record = record
        self._blobs = blobs
        # Limits hold for files that are validated: since this one was, they may have been lowered.
        self._max_line_bytes = max(config.max_line_bytes, record.input_bytes if record.num_lines else 0)
        # Other APIs than Files looked for each line's model when they made the batch, and know no errors of a whole
        # file: a model that is gone since fails its lines, each with a result.
        self._validator = InputValidator(
            record.endpoint, models if is_client(record.owner) else _AnyModel(), config.max_lines
        )
        self._reader: BlobReader | None = None

    async def scan(self) -> AsyncIterator[int]:
        """Read the file; yield the number of lines so far after each chunk.

        A batch that was validated before is only indexed: the served models may have changed since.
        """
        splitter = LineSplitter(self._max_line_bytes)
        add = self._validator.index.add if self._record.num_lines else self._validator.check
        try:
            async for chunk in self._blobs.chunks(self._record.input_file_id):
                for line in splitter.push(chunk):
                    add(line)
                yield len(self._validator.index)
                if self._validator.is_full:
                    return
            for line in splitter.finish():
                add(line)
        except LineTooLong as error:
            self._validator.problems.append(too_long(error.number, self._max_line_bytes))
        except StorageDamaged as error:
            self._validator.problems.append(LineProblem(code="file_unreadable", message=str(error)))

    def validation(self) -> Validated | ValidationFailed:
        problems = self._validator.finish()
        if problems:
            return ValidationFailed(problems)
        num_lines, by_model = len(self._validator.index), self._validator.lines_by_model
        if len(by_model) == 1:
            return Validated(num_lines, next(iter(by_model)))
        return Validated(num_lines, None, by_model)

    async def open(self) -> None:
        """Open the file for reading single lines. Raises StorageDamaged, also where it has lost lines, or gained some,
        since it was validated: then those that are there can be read."""
        self._reader = await self._blobs.open(self._record.input_file_id)
        if self._record.num_lines not in (0, len(self._validator.index)):
            raise StorageDamaged("the input file has changed since it was validated")

    def line(self, line: int) -> ParsedLine:
        if self._reader is None:
            raise StorageDamaged("the input file cannot be read")
        return parse_line(self._reader.read_at(*self._validator.index.span(line)))

    def custom_id(self, line: int) -> str:
        """Return a line's custom_id; where the file is damaged since it was validated, what tells which line it was."""
        try:
            return self.line(line).custom_id
        except (StorageError, ValueError, LookupError, TypeError):
            return f"unreadable line {line + 1}"

    def model(self, line: int) -> str:
        """Return the model that a line names; where the file is damaged since it was validated, none."""
        try:
            return str(self.line(line).body.get("model", ""))
        except (StorageError, ValueError, LookupError, TypeError):
            return ""

    def order(self) -> Sequence[int]:
        """Return the lines in the order in which they should run (input_lines.py)."""
        return self._validator.index.beginnings.order()

    def line_bytes(self, line: int) -> int:
        return self._validator.index.span(line)[1]

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

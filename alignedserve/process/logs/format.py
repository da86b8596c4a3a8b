"""How a process's log is written: lines for people, or an object of JSON per line for what collects them."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from alignedserve.core.errors import ConfigError
from alignedserve.process.logs.context import current_request

TEXT, JSON = "text", "json"
FIELDS = "fields"  # attribute of a record: names and values beside the message, for lines of JSON


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, and the request that the process was at."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        line, request_id = super().formatMessage(record), current_request.get()
        return f"{line} [{request_id}]" if request_id and request_id not in line else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, process, logger, message; request_id and error where there are such."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request.get():
            line["request_id"] = request_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


_FORMATTERS: dict[str, Callable[[str], logging.Formatter]] = {
    TEXT: lambda process: TextFormatter(),
    JSON: JsonFormatter,
}


def require_format(name: str) -> str:
    """Return the name of a format. Raises ConfigError for others."""
    if name not in _FORMATTERS:
        raise ConfigError(f"the format of logs must be {' or '.join(_FORMATTERS)}, not {name[:40]!r}")
    return name


def formatter(name: str, process: str) -> logging.Formatter:
    return _FORMATTERS[require_format(name)](process)

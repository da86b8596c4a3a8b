"""`alignedserve quantize`: round a model's matrices to 4 or 8 bits, and show what that changes."""

from pathlib import Path
from typing import Any

from rich.table import Table

from alignedserve.cli.console import notes, progress, results, to_json, write_json
from alignedserve.cli.options import QuantizeOptions
from alignedserve.core.errors import ConfigError
from alignedserve.core.metrics import in_percent
from alignedserve.offline.text_scores import TextScores, score_text, shipped_text
from alignedserve.runtime.model.named_models import model_path
from alignedserve.runtime.model.quantizing import quantize_folder

_MIB = 1 << 20
_MAX_TEXT_BYTES = 16 << 20


def quantize(options: QuantizeOptions) -> int:
    """Run the command and return its exit code. Raises ConfigError, ModelError."""
    folder = model_path(str(options.folder))
    output = options.output or Path(f"{folder.resolve().name}-{options.form}")
    text = _text(options.text)
    with progress() as bar:

        def noted(what: str) -> Any:
            task = bar.add_task(what, total=None, status="")
            return lambda done, whole: bar.update(task, completed=done, total=whole)

        written = quantize_folder(folder, output, options.form, noted("matrices"))
        before = score_text(folder, text, noted("text, before"))
        after = score_text(output, text, noted("text, after"))
    left = f"; {written.num_left} stay, as 32 do not divide their inputs" if written.num_left else ""
    notes().print(f"written to {output}: {written.num_matrices} matrices{left}", markup=False, soft_wrap=True)
    rows = [
        _row(str(folder), before, before, written.bytes_before),
        _row(str(output), after, before, written.bytes_after),
    ]
    if options.json_output:
        write_json(to_json({"tokens": len(before.logprobs), "models": rows}), "-")
        return 0
    table = Table(title=f"{len(before.logprobs)} tokens of text", title_justify="left", header_style="bold")
    for heading in ("model", "perplexity", "same likeliest token", "files", "in a worker"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        sizes = (f"{row[name] / _MIB:.0f} MiB" for name in ("file_bytes", "worker_bytes"))
        table.add_row(row["model"], f"{row['perplexity']:.3f}", in_percent(row["same_likeliest"]), *sizes)
    results().print(table)
    return 0


def _row(model: str, scores: TextScores, before: TextScores, file_bytes: int) -> dict[str, Any]:
    return {
        "model": model,
        "perplexity": scores.perplexity,
        "same_likeliest": scores.agreement(before),
        "file_bytes": file_bytes,
        "worker_bytes": scores.weight_bytes,
    }


def _text(path: Path | None) -> str:
    if path is None:
        return shipped_text()
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise ConfigError(f"--text {path}: is longer than {_MAX_TEXT_BYTES // _MIB} MiB")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8") from error

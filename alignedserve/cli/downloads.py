"""Downloads of models, shown as they come."""

import time

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from alignedserve.cli.console import notes
from alignedserve.config.sections import ModelSectionConfig
from alignedserve.runtime.model.hub.file_choice import names_hub_model
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.named_models import full_name


def fetch_model(section: ModelSectionConfig) -> ModelSectionConfig:
    """Download the model if its name is one on a hub, with a progress bar where stderr is a terminal. Returns the
    section with the folder or file in its place. Raises like Hub.fetch."""
    if not names_hub_model(full_name(section.path)):
        return section
    console = notes()
    bar = Progress(
        TextColumn("Downloading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        refresh_per_second=4,
    )
    began_s, num_bytes = time.monotonic(), 0
    with bar:
        task = bar.add_task(section.path, total=None)

        def report(done: int, total: int) -> None:
            nonlocal num_bytes
            num_bytes = total
            bar.update(task, completed=done, total=total)

        local = with_local_model(section, report)
    if num_bytes:
        seconds = time.monotonic() - began_s
        console.print(f"Downloaded {section.path}: {num_bytes / 1e6:.1f} MB in {seconds:.1f} s", soft_wrap=True)
    return local

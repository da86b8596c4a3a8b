"""The commands of `alignedserve`: the core's own, and those of the laboratory where it is installed."""

from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

LAB_COMMANDS = ("bench", "certify", "demo", "eval", "gpu-check", "plan", "profile", "replay", "simulate")


class CommandGroup(TyperGroup):
    """Looks for the laboratory's commands only when the core has none of that name, or when all are listed."""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self._lab]

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in LAB_COMMANDS:
            if cmd_name not in self._lab:
                ctx.fail(f"{cmd_name} is a command of the laboratory: pip install 'alignedserve[lab]'")
            command = self._lab[cmd_name]
        return command

    @cached_property
    def _lab(self) -> dict[str, Any]:
        apps = [point.load() for point in entry_points(group="alignedserve.commands")]
        return {name: command for app in apps for name, command in typer.main.get_group(app).commands.items()}

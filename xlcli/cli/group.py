"""A command with actions, such as `xlcli models show`: each action is a Typer function of its own."""

from __future__ import annotations

from typing import Any

from xlcli.cli.help import Program
from xlcli.cli.usage import nearest
from xlcli.errors import ConfigError


class Group(Program):
    """A command that is complete without an action. Options of an action may stand before it."""

    heading = "Output"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[COMMAND] [OPTIONS]`."""
        return ["[COMMAND]", "[OPTIONS]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Moves the action to the front and parses."""
        params = [param for command in (self, *self.commands.values()) for param in command.params]
        with_value = {name for param in params if not getattr(param, "is_flag", True) for name in param.opts}
        places = iter(range(len(args)))
        for place in places:
            if args[place] in with_value:
                next(places, None)
            elif not args[place].startswith("-"):
                args = [args[place], *args[:place], *args[place + 1 :]]
                break
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Name and command of the action, and its arguments.

        Raises:
            ConfigError: There is no such action.
        """
        if args[0] in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = nearest(args[0], self.commands)
        remedy = f"Did you mean {ctx.command_path} {near}?" if near else self.remedy(args[0])
        raise ConfigError(f"there is no '{ctx.command_path} {args[0]}'.", remedy)

    def remedy(self, word: str) -> str:
        """Remedy for a word that resembles no action."""
        return f"See xlcli {self.name} --help."

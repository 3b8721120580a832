"""
The ``jumpstart`` command. Only this package prints and exits.

Options that are settings are made from their declarations in `settings.py`; each command takes the sections it needs.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from jumpstart._version import __version__
from jumpstart.errors import JumpstartError
from jumpstart_server.config import environment, load_settings, unknown_variables
from jumpstart_server.exits import ExitCode, exit_code
from jumpstart_server.logs import LogModuleError, set_up_logging
from jumpstart_server.settings import Option, Settings, declared_options
from jumpstart_server.spawn import Interpreter

logger = logging.getLogger(__name__)


@dataclass
class Launch:
    """How the command was started; `waiting` is taken by the supervisor that makes use of it."""

    started: float
    waiting: Interpreter | None


F = TypeVar("F", bound=Callable[..., Any])


def settings_options(*sections: str, but: Iterable[str] = ()) -> Callable[[F], F]:
    """Add the options of *sections* to a command, except the keys in *but*, and ``-c`` and ``--tenant``."""

    def decorate(command: F) -> F:
        for option in reversed(declared_options()):
            if option.section in sections and option.flags and option.key not in but:
                command = _click_option(option)(command)
        command = click.option("--tenant", metavar="NAME", help="Which tenant of the file.")(command)
        return click.option("-c", "--config", "config_file", metavar="FILE", help="jumpstart.toml by default.")(command)

    return decorate


def _click_option(option: Option) -> Callable[[F], F]:
    parameter = f"{option.section}__{option.key}"
    unit = f" ({option.unit})" if option.unit else ""
    default = "" if option.default in ("", (), None) or option.is_flag else f" [default: {_shown(option.default)}]"
    text = f"{option.help}{unit}{default}"
    metavar = f"[{'|'.join(option.choices)}]" if option.choices else "VALUE"
    if option.is_flag:
        long = option.flags[0]
        names = f"{long}/--no-{long[2:]}"
        return click.option(
            names, parameter, default=None, help=text + f" [default: {'on' if option.default else 'off'}]"
        )
    # Values stay text here: one place converts and complains, wherever they come from.
    return click.option(*option.flags, parameter, default=None, multiple=option.many, metavar=metavar, help=text)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(target: str | None, config_file: str | None, tenant: str | None, given: dict[str, Any]) -> Settings:
    """Settings from what click parsed; *given* is parameter (``section__key``) → value."""
    command_line = {name.replace("__", ".", 1): value for name, value in given.items()}
    if target is not None:
        _refuse_file(target)
        command_line["app.target"] = command_line["tenant.target"] = target
    environ = environment()
    for line in unknown_variables(environ):
        click.echo(f"jumpstart: warning: {line}", err=True)
    settings = load_settings(command_line, environ, config_file=config_file, tenant=tenant)
    if not settings.target:
        raise click.UsageError("which app? Give TARGET as module:attribute, or [app] target in jumpstart.toml")
    return settings


def set_up_logging_of(settings: Settings) -> None:
    """
    Set up the command's own log.

    What ``--log-config`` names of the app is not imported here, but where the app is; this process then speaks for
    itself, as without it.

    Raises:
        ConfigError: a log file cannot be opened, or ``--log-config`` is wrong.
    """
    server = settings.server
    try:
        set_up_logging(
            server.log_level,
            file=server.error_logfile,
            config=settings.logging,
            capture_output=server.capture_output,
        )
    except LogModuleError as error:
        logger.info("%s; in this process it is not applied", error)


def _refuse_file(target: str) -> None:
    """A file's name is what hands type first; say what it is as a target."""
    name, _, attribute = target.partition(":")
    if name.endswith(".py"):
        path = Path(name)
        folder = "" if path.parent == Path() else f" --app-dir {path.parent}"
        meant = f"{path.stem}:{attribute or 'app'}{folder}"
        raise click.UsageError(f"TARGET {target} is a file; write its module and the app's name in it: {meant}")


class _Commands(click.Group):
    """The commands by name; only the module of the one that is used is imported, for each boot pays for it."""

    MODULES = ("serve", "build", "profile", "keys", "warm", "status")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.MODULES:
            return None
        command = getattr(importlib.import_module(f"jumpstart_server.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="jumpstart")
def cli() -> None:
    """An application server for Python (WSGI and ASGI) that boots warm."""


def run(started: float, waiting: Interpreter | None) -> int:
    """
    Run the command line; return the exit code of the README.

    Args:
        started: when the command began, on the monotonic clock.
        waiting: a process that was started ahead, for ``serve``.
    """
    try:
        return int(cli.main(standalone_mode=False, obj=Launch(started, waiting)) or ExitCode.CLEAN)
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        return 130  # the shell's code for an end by Ctrl-C
    except JumpstartError as error:
        click.echo(f"jumpstart: {error}", err=True)
        return exit_code(error)

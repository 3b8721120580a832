"""
The ``jumpstart`` command. Only this package prints and exits.

Options that are settings are made from their declarations in `settings.py`; each command takes the sections it needs.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from jumpstart._version import __version__
from jumpstart.errors import JumpstartError
from jumpstart_server.cli import say
from jumpstart_server.cli.foreign import explain, foreign_options
from jumpstart_server.config import Sources, Typed, environment, load_all, load_settings, unknown_variables
from jumpstart_server.envelope.explain import Tenant, findings
from jumpstart_server.envelope.memory import read_machine
from jumpstart_server.exits import ExitCode, exit_code
from jumpstart_server.logs import LogModuleError, set_up_logging
from jumpstart_server.problems import Errors
from jumpstart_server.settings import GROUPS, Option, Settings, declared_options
from jumpstart_server.spawn import Interpreter

logger = logging.getLogger(__name__)


@dataclass
class Launch:
    """How the command was started; `waiting` is taken by the supervisor that makes use of it."""

    started: float
    waiting: Interpreter | None


F = TypeVar("F", bound=Callable[..., Any])
SPELLED = f"{__name__}.spelled"  # in a context's meta: option → the spelling of it that was typed


def settings_options(*sections: str, but: Iterable[str] = ()) -> Callable[[F], F]:
    """Add the options of *sections* to a command, except the keys in *but*, and ``-c`` and ``--tenant``."""

    def decorate(command: F) -> F:
        command = foreign_options(command)
        for option in reversed(declared_options()):
            if option.section in sections and option.flags and option.key not in but:
                command = _click_option(option)(command)
        command = click.option("--tenant", metavar="NAME", help="Which tenant of the file.")(command)
        return click.option("-c", "--config", "config_file", metavar="FILE", help="jumpstart.toml by default.")(command)

    return decorate


class SettingsCommand(click.Command):
    """A command with many options, which its help shows in groups, and which remembers how each was spelled."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[SPELLED] = _spelled(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {_parameter_name(option): option.group for option in declared_options()}
        own = "Options"
        rows: dict[str, list[tuple[str, str]]] = {own: [], **{title: [] for title in GROUPS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                rows[group_of.get(parameter.name or "", own)].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _spelled(words: Iterable[str]) -> dict[str, str]:
    """Option (``tenant.workers``) → the flag in *words* that named it last."""
    owners = {flag: f"{option.section}.{option.key}" for option in declared_options() for flag in option.flags}
    found = {}
    for word in words:
        if word == "--":
            break
        flag = word.partition("=")[0] if word.startswith("--") else word[:2]
        if flag in owners:
            found[owners[flag]] = flag
    return found


def _parameter_name(option: Option) -> str:
    return f"{option.section}__{option.key}"


def _click_option(option: Option) -> Callable[[F], F]:
    parameter = _parameter_name(option)
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
    """Settings of one tenant from what click parsed; *given* is parameter (``section__key``) → value."""
    environ = environment()
    warn_of_unknown(environ)
    settings = load_settings(command_line_of(target, given), environ, config_file=config_file, tenant=tenant)
    _refuse_without_target([settings])
    return settings


def settings_of_all(
    target: str | None, config_file: str | None, tenant: str | None, given: dict[str, Any]
) -> list[Settings]:
    """As `settings_of`, of every tenant of the file, or of the one that is named; together they must make sense."""
    sources: dict[str, Sources] = {}
    settings = load_all(
        command_line_of(target, given), environment(), config_file=config_file, tenant=tenant, sources=sources
    )
    _refuse_without_target(settings)
    tenants = [Tenant(each, sources[each.tenant_name]) for each in settings]
    errors = Errors()
    for finding in findings(tenants, read_machine()):
        if finding.is_error:
            errors.add(f"{finding.place}: {finding.text}")
    errors.raise_any()
    return settings


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Say which ``JUMPSTART_*`` variables nobody reads."""
    for line in unknown_variables(environ):
        say.warning(line)


def command_line_of(target: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Option (``tenant.workers``) → what click parsed for it, and the spelling that was typed."""
    context = click.get_current_context(silent=True)
    spelled: dict[str, str] = context.meta.get(SPELLED, {}) if context is not None else {}
    command_line = {name.replace("__", ".", 1): value for name, value in given.items()}
    for name, flag in spelled.items():
        if name in command_line:
            command_line[name] = Typed(command_line[name], flag)
    if target is not None:
        _refuse_file(target)
        command_line["app.target"] = command_line["tenant.target"] = target
    return command_line


def _refuse_without_target(tenants: Sequence[Settings]) -> None:
    for settings in tenants:
        if not settings.target:
            of_whom = f" for tenant {settings.tenant_name}" if len(tenants) > 1 else ""
            raise click.UsageError(
                f"which app{of_whom}? Give TARGET as module:attribute, or [app] target in jumpstart.toml"
            )


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


class Group(click.Group):
    """Commands; a name that is none of them is answered with what was probably meant."""

    MEANT: ClassVar[Mapping[str, str]] = {}
    """Name that hands type → the command that it is here."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = self.meant(ctx, args)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def meant(self, ctx: click.Context, args: list[str]) -> str:
        """The command line that was probably meant; empty where nothing is near."""
        known = self.list_commands(ctx)
        close = self.MEANT.get(args[0].lower()) or next(iter(difflib.get_close_matches(args[0].lower(), known, 1)), "")
        return f"{ctx.command_path} {shlex.join([close, *args[1:]])}" if close else ""


class _Commands(Group):
    """The commands by name; only the module of the one that is used is imported, for each boot pays for it."""

    MODULES = ("serve", "build", "profile", "keys", "warm", "shadow", "status", "check", "advise", "export")
    CHECK_CONFIG = "--check-config"  # gunicorn's
    MEANT: ClassVar[Mapping[str, str]] = {"run": "serve", "start": "serve", "config": "check", "stats": "status"}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.MODULES:
            return None
        command = getattr(importlib.import_module(f"jumpstart_server.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in ("serve", "check") and self.CHECK_CONFIG in args:
            args = ["check", *(word for word in args[1:] if word != self.CHECK_CONFIG)]
        return super().resolve_command(ctx, args)

    def meant(self, ctx: click.Context, args: list[str]) -> str:
        if any(char in args[0] for char in ":./"):  # an app, as uvicorn and gunicorn take it
            return f"{ctx.command_path} {shlex.join(['serve', *args])}"
        return super().meant(ctx, args)


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
    except click.NoSuchOption as error:
        say.misuse(explain(error))
        return ExitCode.USAGE
    except click.ClickException as error:
        say.misuse(error)
        return ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        return 130  # the shell's code for an end by Ctrl-C
    except JumpstartError as error:
        say.error(error)
        return exit_code(error)

"""What the command says on standard error: one form for errors, warnings and notes, whoever finds them."""

from __future__ import annotations

import click

from jumpstart.errors import ConfigError, JumpstartError
from jumpstart_server.problems import texts_of


def warning(text: str) -> None:
    """Something works, and is most probably not meant."""
    click.echo(f"warning: {text}", err=True)


def note(text: str) -> None:
    """What something comes to."""
    click.echo(f"note: {text}", err=True)


def error(problem: JumpstartError | str) -> None:
    """What is wrong, a line for each thing."""
    for text in texts_of(problem) if isinstance(problem, ConfigError) else (str(problem),):
        click.echo(f"error: {text}", err=True)


def misuse(problem: click.ClickException) -> None:
    """A wrong command line, with the form of a right one above."""
    context = problem.ctx if isinstance(problem, click.UsageError) else None
    if context is not None:
        click.echo(context.get_usage(), err=True)
        if context.command.get_help_option(context) is not None:
            click.echo(f"Try '{context.command_path} {context.help_option_names[-1]}' for help.\n", err=True)
    if isinstance(problem, click.MissingParameter) and isinstance(problem.param, click.Option):
        option = problem.param
        error(f"{' or '.join(option.opts)} {option.metavar or ''} is missing: {option.help}")
    else:
        error(problem.format_message())

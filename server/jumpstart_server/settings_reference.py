"""The reference of all options, `docs/settings.md`, made from their declarations; `scripts/docs` writes it."""

from __future__ import annotations

import sys
from typing import Any

from jumpstart_server.problems import GUNICORN_SETTINGS
from jumpstart_server.settings import GROUPS, SECTIONS, Option, declared_options

INTRODUCTION = """# Settings

Made from the declarations in `server/jumpstart_server/settings.py` by `scripts/docs`; do not edit by hand.

Precedence: command line, then the environment variable, then `jumpstart.toml` (or `[tool.jumpstart]` in
`pyproject.toml`), then the default. Paths in a file are relative to that file. Lists are repeated options on the
command line, comma-separated in the environment, arrays in TOML. Times are in seconds.

TARGET is `module:attribute` or `module:factory()`. A module alone, such as `shop.web` or `mysite.wsgi`, means its
attribute `app`, or else `application`.

Without any address it listens on the sockets that systemd passes; else, where the environment sets `PORT`, as platforms
do, on 0.0.0.0:$PORT; else on 127.0.0.1:8000. A `JUMPSTART_` variable that is no option costs a line at start that names
it.

## Under systemd, and as another user

With `Type=notify` (or `notify-reload`) in the unit systemd hears when the server is ready, reloads and stops; a boot
that goes on asks for more time by itself, and `WatchdogSec=` is fed for as long as the server's event loop turns.
Sockets of a `.socket` unit go to a tenant that has no address of its own: all of them where there is one tenant, else
those whose `FileDescriptorName=` is the tenant's name. `bind = "fd://NAME"` asks for one by its name.

With `--user` the server stays root: it binds, keeps the pid file, the admin socket, the keys and the warm-start cache.
The processes that run the app become that user before they import it, with its groups and its `HOME`. Log files and
Unix sockets are given to that user, their folders need not be. The user must be able to read the app, Python and the
TLS key.

## The file of `--env-file`

`NAME=VALUE` lines, as other tools read them: comments with `#`, an `export` in front, single quotes (as it stands) or
double quotes (`\\n`, `\\"`) over several lines too. Nothing is substituted. Variables that are set already win.

## Where a host keeps its state

- The warm-start cache, and copies of what stores of profiles gave: `$JUMPSTART_HOME/cache`, else
  `$XDG_CACHE_HOME/jumpstart`, else `~/.cache/jumpstart`. It may be deleted at any time; the next boot is cold then.
- Admin sockets, and the boot ledger, which knows the profiles that processes died of: `$JUMPSTART_HOME/state`, else
  `$XDG_STATE_HOME/jumpstart`, else `~/.local/state/jumpstart`.
- Keys: `$JUMPSTART_HOME/config`, else `$XDG_CONFIG_HOME/jumpstart`, else `~/.config/jumpstart`. Without them, profiles
  that were signed by them are refused.

`JUMPSTART_HOME` is an environment variable only. A relative one is taken from the current folder. An `XDG_` variable
that is empty or relative counts as unset. The folders are made when something is stored, for this user alone (0700). A
folder that cannot be written costs one line at start and a cold boot next time; the server runs all the same.
"""

OF_GUNICORN = """## Instead of gunicorn.conf.py

gunicorn's configuration files are Python, and are not read. These are the keys for its settings. Its hooks have no
place here: an app uses lifespan, or `jumpstart.on_capture` and `jumpstart.on_restore`.
"""

TABLES = {"app": "[app]", "tenant": "[tenants.NAME]", "profile": "[profile]", "server": "[server]"}


def render() -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION]
    for section, struct in SECTIONS.items():
        summary = (struct.__doc__ or "").strip().partition(": ")[2]
        lines += [f"## {TABLES[section]}", "", summary[:1].upper() + summary[1:], ""]
        groups = {
            title: [each for each in declared_options() if (each.section, each.group) == (section, title)]
            for title in GROUPS
        }
        used = {title: options for title, options in groups.items() if options}
        for title, options in used.items():
            if len(used) > 1:
                lines += [f"### {title}", ""]
            lines += ["| key | command line | environment | default | meaning |", "| --- | --- | --- | --- | --- |"]
            lines += [*map(_row, options), ""]
    return "\n".join([*lines, *_of_gunicorn()])


def _of_gunicorn() -> list[str]:
    """Where the settings of gunicorn's file are here."""
    rows = [f"| `{name}` | {_key_of(key)} |" for name, key in GUNICORN_SETTINGS.items()]
    return [OF_GUNICORN, "| gunicorn.conf.py | jumpstart.toml |", "| --- | --- |", *rows, ""]


def _key_of(text: str) -> str:
    key, _, table = text.partition(" of ")
    return f"`{table or '[tenants.NAME]'} {key}`"


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    if option.is_flag and option.flags:
        flags += f", `--no-{option.flags[0][2:]}`"
    environment = ", ".join(f"`{name}`" for name in (option.env, *option.other_env)) if option.flags else ""
    choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    unit = f" ({option.unit})" if option.unit else ""
    cells = [f"`{option.key}`", flags, environment, _default(option), f"{option.help}{choices}{unit}"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(option: Option) -> str:
    value: Any = option.default
    if value is None or value in ("", ()):
        return ""
    if option.is_flag:
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(render())

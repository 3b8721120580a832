"""``jumpstart export``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import click

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import parse_address
from jumpstart_server.cli import Group, say
from jumpstart_server.config import configured_tenants, load_all
from jumpstart_server.export import envoy as envoy_text
from jumpstart_server.export import kubernetes as kubernetes_text
from jumpstart_server.export import nginx as nginx_text
from jumpstart_server.export import systemd as systemd_text
from jumpstart_server.export.model import Tenant, tenants_of, with_all_routes

F = TypeVar("F")


class _Engines(Group):
    MEANT: ClassVar[Mapping[str, str]] = {"k8s": "kubernetes", "kube": "kubernetes", "systemctl": "systemd"}


@click.group(cls=_Engines)
def export() -> None:
    """
    Write the tenants of jumpstart.toml for the engine that runs a fleet of them.

    What counts is the file alone: the environment of this shell is not that of the servers.
    """


def _common(command: F) -> F:
    for decorate in (
        click.option(
            "-o", "--output", metavar="PATH", help="File, or folder, to write to; by default standard output."
        ),
        click.option("--tenant", "names", metavar="NAME", multiple=True, help="Only this one; repeatable."),
        click.option("-c", "--config", "config_file", metavar="FILE", help="jumpstart.toml by default."),
    ):
        command = decorate(command)  # type: ignore[type-var]  # click's own decorators are generic over functions
    return command


_health = click.option(
    "--health", default="/healthz", show_default=True, metavar="PATH", help='Path of the health page; "" for none.'
)


@export.command()
@click.option("--listen", default="80", show_default=True, metavar="ADDRESS", help="As nginx's listen takes it.")
@click.option(
    "--server-name", default="_", show_default=True, metavar="NAMES", help="As nginx's server_name takes them."
)
@_health
@_common
def nginx(
    listen: str, server_name: str, health: str, config_file: str | None, names: Sequence[str], output: str | None
) -> int:
    """A file for nginx's http context, such as /etc/nginx/conf.d/jumpstart.conf."""
    for option, text in (("--listen", listen), ("--server-name", server_name)):
        if not text.strip() or any(char in text for char in "{};\"'#\n"):
            raise click.UsageError(f"{option} {text!r}: not what nginx takes there")
    _check_health(health)
    tenants, _ = _load(config_file, names, routed=True)
    options = nginx_text.NginxOptions(listen=listen, server_name=server_name, health=health)
    _warn([each.distrust() for each in tenants])
    return _write({"jumpstart.conf": nginx_text.render(tenants, options)}, output)


@export.command()
@click.option("--listen", default="0.0.0.0:8080", show_default=True, metavar="ADDRESS", help="HOST:PORT or unix:PATH.")
@click.option(
    "--server-name", "server_names", multiple=True, metavar="NAME", help="Domain; repeatable. Any by default."
)
@_health
@click.option("--json", "as_json", is_flag=True, help="JSON, which Envoy takes too, without the comments.")
@_common
def envoy(
    listen: str,
    server_names: tuple[str, ...],
    health: str,
    as_json: bool,
    config_file: str | None,
    names: Sequence[str],
    output: str | None,
) -> int:
    """A bootstrap file for Envoy."""
    _check_health(health)
    tenants, _ = _load(config_file, names, routed=True)
    options = envoy_text.EnvoyOptions(
        listen=envoy_text.check_listen(parse_address(listen, option="--listen"), listen),
        server_names=server_names or ("*",),
        health=health,
    )
    _warn([each.distrust() for each in tenants])
    file = "envoy.json" if as_json else "envoy.yaml"
    ends = (".json",) if as_json else (".yaml", ".yml")
    if output is not None and output != "-" and not _is_folder(output) and not output.endswith(ends):
        raise ConfigError(f"-o {output}: Envoy goes by the name's end; let it be {' or '.join(ends)}")
    return _write({file: envoy_text.render(tenants, options, as_json=as_json)}, output)


@export.command()
@click.option("--name", default="jumpstart", show_default=True, help="Of the units, and of the state folder.")
@click.option("--user", default="www-data", show_default=True, help="Who the server runs as.")
@click.option("--group", default="", help="By default the main one of --user.")
@click.option("--command", metavar="PATH", help="Whole path of `jumpstart` there; by default the one that runs now.")
@click.option("--per-tenant", is_flag=True, help="A service for each tenant, instead of one for all.")
@click.option("--sockets", is_flag=True, help="Socket units too: systemd holds the addresses, also over restarts.")
@_common
def systemd(
    name: str,
    user: str,
    group: str,
    command: str | None,
    per_tenant: bool,
    sockets: bool,
    config_file: str | None,
    names: Sequence[str],
    output: str | None,
) -> int:
    """Units for /etc/systemd/system."""
    tenants, file = _load(config_file, names)
    options = systemd_text.SystemdOptions(
        name=name,
        user=user,
        group=group,
        command=command or _this_command(),
        config=str(file.absolute()),
        per_tenant=per_tenant,
        sockets=sockets,
        is_part=bool(names) and len(tenants) < len(configured_tenants(config_file)[1]),
    )
    return _write(systemd_text.render(tenants, options), output)


@export.command()
@click.option("--image", default="", metavar="IMAGE", help="With the app, jumpstart.toml in its working folder.")
@click.option("--namespace", default="", metavar="NAME", help="By default that of kubectl.")
@click.option("--replicas", type=click.IntRange(min=0), default=2, show_default=True, help="Pods of each tenant.")
@click.option("--name", default="jumpstart", show_default=True, help="Of the app; begins the names of all objects.")
@click.option("--user", type=click.IntRange(min=1), default=10001, show_default=True, help="User id of the pods.")
@click.option("--ingress", default="", metavar="CLASS", help="An Ingress too, for the routes, of this class.")
@click.option("--gateway", default="", metavar="NAME", help="An HTTPRoute too, for the routes, of this Gateway.")
@click.option("--server-name", default="", metavar="NAME", help="Host of --ingress or --gateway; any by default.")
@_common
def kubernetes(
    image: str,
    namespace: str,
    replicas: int,
    name: str,
    user: int,
    ingress: str,
    gateway: str,
    server_name: str,
    config_file: str | None,
    names: Sequence[str],
    output: str | None,
) -> int:
    """A Deployment and a Service for each tenant."""
    if not image:
        raise click.UsageError(
            "--image is missing: the image with the app; for example: "
            "jumpstart export kubernetes --image registry.example/shop:1.4"
        )
    tenants, _ = _load(config_file, names, routed=bool(ingress or gateway))
    options = kubernetes_text.KubernetesOptions(
        image=image,
        config=config_file or "",
        namespace=namespace,
        replicas=replicas,
        name=name,
        user=user,
        ingress=ingress,
        gateway=gateway,
        server_name=server_name,
    )
    if ingress or gateway:
        _warn([kubernetes_text.distrust(each) for each in tenants])
    return _write({"kubernetes.yaml": kubernetes_text.render(tenants, options)}, output)


def _load(config_file: str | None, names: Sequence[str], *, routed: bool = False) -> tuple[list[Tenant], Path]:
    """The tenants that were asked for; all are read, for what one may claim, such as routes, depends on the others."""
    file, tenants = configured_tenants(config_file)
    for name in names:
        if name not in tenants:
            raise ConfigError(f"--tenant {name}: {file} has {', '.join(tenants) or 'no tenants'}")
    every = load_all({}, {}, config_file=str(file.absolute()), cwd=file.parent)
    for each in every:
        if not each.target:
            raise ConfigError(
                f'{file}: [tenants.{each.tenant_name}] has no app; write [app] target = "module:attribute"'
            )
    found = tenants_of(every, are_named=bool(tenants))
    if routed:
        found = with_all_routes(found)
    return [each for each in found if not names or each.name in names], file


def _check_health(path: str) -> None:
    if path and (not path.startswith("/") or not path.isprintable() or any(char in path for char in " {};\"'\\?#")):
        raise click.UsageError(f"--health {path!r}: write a path, such as /healthz")


def _this_command() -> str:
    beside = Path(sys.executable).parent / "jumpstart"
    found = str(beside) if beside.exists() else shutil.which("jumpstart")
    if found is None:
        raise click.UsageError("where is the command there? Give its whole path: --command /opt/app/bin/jumpstart")
    return found


def _is_folder(output: str) -> bool:
    return output.endswith("/") or Path(output).is_dir()


def _write(files: Mapping[str, str], output: str | None) -> int:
    """To standard output, one below the other; to a folder, by their names; or one to a file."""
    if output is None or output == "-":
        for number, (name, text) in enumerate(files.items()):
            heading = f"# ---- {name} ----\n" if len(files) > 1 else ""
            click.echo(("\n" if number else "") + heading + text, nl=False)
        return 0
    path = Path(output)
    is_folder = _is_folder(output)
    if len(files) > 1 and not is_folder:
        raise ConfigError(f"-o {output}: these are {len(files)} files ({', '.join(files)}); name a folder: {output}/")
    try:
        if is_folder:
            path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name if is_folder else path).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"-o {output}: {error.strerror or error}") from None
    return 0


def _warn(reasons: Sequence[str]) -> None:
    """They stand in the text too; who writes it to a file does not read it."""
    for reason in filter(None, reasons):
        say.warning(reason)

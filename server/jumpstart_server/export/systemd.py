"""
systemd units for the tenants: one service for all, or one for each, and sockets that systemd holds. Pure.

The service tells systemd when it is ready, reloads and stops, and feeds its watchdog. Hardening goes as far as apps in
general bear: no rule against writable code (cffi and JIT compilers need it), none against devices (GPUs).
"""

from __future__ import annotations

import ipaddress
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import Address, socket_permissions
from jumpstart_server.exits import ExitCode
from jumpstart_server.export.model import BASE_MEMORY, Figure, Tenant, longest, total

WATCHDOG = 30  # seconds; the supervisor feeds it while its event loop turns, which never runs app code
PRIVILEGED = 1024  # ports below are root's
NEVER_AGAIN = (ExitCode.USAGE, ExitCode.APP, ExitCode.COLD)
_UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class SystemdOptions:
    """
    Attributes:
        name: of the units, and of the folder under ``/var/lib``.
        user: who the server runs as; not where ``[server] user`` says who the app's processes become.
        group: empty for the main one of *user*.
        command: whole path of ``jumpstart``.
        config: whole path of the file.
        per_tenant: a service for each tenant.
        sockets: socket units too.
        is_part: not all tenants of the file were asked for.
    """

    name: str
    user: str
    group: str
    command: str
    config: str
    per_tenant: bool = False
    sockets: bool = False
    is_part: bool = False


def render(tenants: Sequence[Tenant], options: SystemdOptions) -> dict[str, str]:
    """
    The units by their file names.

    Raises:
        ConfigError: what was asked for cannot be said to systemd.
    """
    for option, text in (("--command", options.command), ("-c", options.config)):
        if not text.startswith("/") or "\n" in text:
            raise ConfigError(f"{option} {text}: systemd needs the whole path; begin it with a slash")
    if not _UNIT_NAME.fullmatch(options.name):
        raise ConfigError(f"--name {options.name}: no name for a unit; use letters, digits, and . _ -")
    if options.sockets and len(tenants) > 1 and not options.per_tenant:
        raise ConfigError(
            "--sockets: one service cannot be told which socket is which tenant's while the file has their bind; "
            "add --per-tenant"
        )
    if options.is_part and len(tenants) > 1 and not options.per_tenant:
        raise ConfigError("--tenant: serve takes all tenants of the file or one; add --per-tenant, or name one")
    if not options.per_tenant:
        return dict(_units(options.name, tenants, options))
    fixed = tenants[0].admin not in ("auto", "off")
    if fixed and len(tenants) > 1:
        raise ConfigError(
            f'--per-tenant: each service would bind [server] admin = "{tenants[0].admin}"; write admin = "auto", '
            "or run all tenants in one service"
        )
    files: dict[str, str] = {}
    for tenant in tenants:
        files.update(_units(f"{options.name}-{tenant.name}", [tenant], options))
    return files


def _units(name: str, tenants: Sequence[Tenant], options: SystemdOptions) -> Iterator[tuple[str, str]]:
    yield f"{name}.service", "\n".join([*_service(name, tenants, options), ""])
    if options.sockets:
        (tenant,) = tenants
        yield f"{name}.socket", "\n".join([*_socket(name, tenant, options), ""])


def _service(name: str, tenants: Sequence[Tenant], options: SystemdOptions) -> Iterator[str]:
    places = ", ".join(each.name for each in tenants)
    yield "# Made by `jumpstart export systemd`. Each figure names the keys that it comes from."
    yield "[Unit]"
    yield f"Description=Jumpstart: {places}"
    yield "Wants=network-online.target"
    yield "After=network-online.target"
    if options.sockets:
        yield f"Requires={name}.socket"
        yield f"After={name}.socket"
    yield "StartLimitIntervalSec=300"
    yield "StartLimitBurst=5"
    yield ""
    yield "[Service]"
    yield "# Ready means that a worker is warm and accepts."
    yield "Type=notify"
    yield "NotifyAccess=main"
    yield f"ExecStart={_command(tenants, options)}"
    yield "# A roll: the new workers are ready before the old ones drain."
    yield "ExecReload=/bin/kill -HUP $MAINPID"
    yield f"WorkingDirectory={_path(options.config.rpartition('/')[0] or '/')}"
    yield from _who(tenants, options)
    yield ""
    start = longest([each.startup_time() for each in tenants])
    stop = longest([each.stop_time() for each in tenants])
    yield from _note(start.text)
    yield f"TimeoutStartSec={_limit(start)}"
    yield from _note(stop.text)
    yield f"TimeoutStopSec={_limit(stop)}"
    yield "# TERM goes to the supervisor, which drains; KILL at the end to all that is left."
    yield "KillMode=mixed"
    yield f"WatchdogSec={WATCHDOG}"
    yield "Restart=on-failure"
    yield "RestartSec=1"
    yield "# 2: the configuration is wrong; 3: the app does not boot, and was tried; 4: --require-warm refused. Each"
    yield "# needs somebody. 5, an address in use, may pass."
    yield f"RestartPreventExitStatus={' '.join(str(int(code)) for code in NEVER_AGAIN)}"
    yield ""
    files = longest([each.files() for each in tenants])
    tasks = total([each.tasks() for each in tenants])
    memory = total([each.memory(generations=2) for each in tenants], more=BASE_MEMORY, why=f"{BASE_MEMORY >> 20} MiB")
    yield from _note(files.text)
    yield f"LimitNOFILE={files.value}"
    yield from _note(tasks.text)
    yield f"TasksMax={tasks.value}"
    if memory.value is None:
        yield from _note(f"no MemoryMax: {memory.text}")
    else:
        yield from _note(f"{memory.text} for the supervisor and molds")
        yield f"MemoryMax={memory.value}"
    yield "# When the kernel kills a worker for memory, the supervisor replaces it."
    yield "OOMPolicy=continue"
    yield ""
    yield from _hardening(tenants, options)
    yield ""
    yield "[Install]"
    yield "WantedBy=multi-user.target"


def _command(tenants: Sequence[Tenant], options: SystemdOptions) -> str:
    words = [options.command, "serve", "-c", options.config]
    if len(tenants) == 1 and tenants[0].is_named:
        words += ["--tenant", tenants[0].name]
    if options.sockets:
        words += ["--bind", f"fd://{tenants[0].name}"]
    return " ".join(_word(word) for word in words)


def _who(tenants: Sequence[Tenant], options: SystemdOptions) -> Iterator[str]:
    """Identity, and folders that belong to it."""
    if tenants[0].user:
        yield f"# [server] user {tenants[0].user}: the server starts as root, and its app's processes become that user."
    else:
        yield f"User={options.user}"
        if options.group:
            yield f"Group={options.group}"
    yield "# Warm-start cache, keys and admin sockets; what others could write there is not used."
    yield f"StateDirectory={options.name}"
    yield "StateDirectoryMode=0700"
    yield f"Environment=JUMPSTART_HOME=%S/{options.name}"
    run = f"/run/{options.name}/"
    if any(path.startswith(run) for path in _socket_files(tenants)):
        yield f"# for the Unix sockets in {run}"
        yield f"RuntimeDirectory={options.name}"
        if options.per_tenant:
            yield "RuntimeDirectoryPreserve=yes"


def _socket_files(tenants: Sequence[Tenant]) -> list[str]:
    addresses = [address for each in tenants for address in (*each.binds, each.admin_address) if address is not None]
    return [address.path for address in addresses]


def _hardening(tenants: Sequence[Tenant], options: SystemdOptions) -> Iterator[str]:
    yield "NoNewPrivileges=yes"
    if not tenants[0].user:
        low = [address for each in tenants for address in each.binds if address.host and 0 < address.port < PRIVILEGED]
        capabilities = "CAP_NET_BIND_SERVICE" if low and not options.sockets else ""
        if capabilities:
            yield f"# bind {low[0]}"
            yield f"AmbientCapabilities={capabilities}"
        yield f"CapabilityBoundingSet={capabilities}"
    if any(path.startswith(("/tmp/", "/var/tmp/")) for path in _socket_files(tenants)):
        yield "# no PrivateTmp: the proxy would not find the Unix sockets in it"
    else:
        yield "PrivateTmp=yes"
    yield "# Not strict: apps write their uploads and databases somewhere."
    yield "ProtectSystem=full"
    yield "ProtectHome=read-only"
    for key in (
        *("ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups"),
        *("ProtectClock", "ProtectHostname", "RestrictSUIDSGID", "RestrictRealtime", "RestrictNamespaces"),
        "LockPersonality",
    ):
        yield f"{key}=yes"
    yield "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK"
    yield "SystemCallArchitectures=native"


def _socket(name: str, tenant: Tenant, options: SystemdOptions) -> Iterator[str]:
    yield "# Made by `jumpstart export systemd`. The address stays while the service restarts: clients wait."
    yield "[Unit]"
    yield f"Description=Jumpstart: where {tenant.name} is served"
    yield ""
    yield "[Socket]"
    for address in tenant.binds:
        yield f"ListenStream={_listen(address, tenant)}"
    yield "# its name, by which the service asks for it: --bind fd://NAME"
    yield f"FileDescriptorName={tenant.name}"
    yield f"# {tenant.place} backlog"
    yield f"Backlog={tenant.settings.backlog}"
    if any(address.path for address in tenant.binds):
        yield f"# {tenant.place} uds_permissions, umask"
        yield f"SocketMode={socket_permissions(tenant.settings):04o}"
        if not tenant.user:
            yield f"SocketUser={options.user}"
            if options.group:
                yield f"SocketGroup={options.group}"
    yield ""
    yield "[Install]"
    yield "WantedBy=sockets.target"


def _listen(address: Address, tenant: Tenant) -> str:
    if address.path:
        if not address.path.startswith("/") or any(char.isspace() for char in address.path):
            raise ConfigError(f"{tenant.place} bind {address}: systemd needs a whole path without spaces")
        return address.path.replace("%", "%%")
    if address.fd >= 0:
        raise ConfigError(f"{tenant.place} bind {address}: --sockets needs the address itself")
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        raise ConfigError(f"{tenant.place} bind {address}: systemd listens on IP addresses, not names") from None
    if not address.port:
        raise ConfigError(f"{tenant.place} port 0: systemd needs a port; choose one")
    return str(address)


def _note(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# ")


def _limit(figure: Figure) -> str:
    return "infinity" if figure.value is None else str(figure.value)


def _path(path: str) -> str:
    return path.replace("%", "%%")


def _word(text: str) -> str:
    """As ExecStart= takes a word: systemd expands % and $ there, and reads quotes and backslashes as C does."""
    text = text.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_./:=@%$+,-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

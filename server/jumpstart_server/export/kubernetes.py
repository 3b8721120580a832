"""
Kubernetes objects for the tenants: a Deployment and a Service for each, and its routes. Pure.

In a pod the tenant serves on all addresses, at the port of its `bind`, and the admin pages are on a TCP port, for the
probes; the arguments of the container say so, whatever the file has for a single host. A pod gets traffic when
``/readyz`` says that a worker is warm, is restarted only when the supervisor does not answer ``/livez``, and may take
as long to stop as its requests may take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import DEFAULT_PORT, parse_address
from jumpstart_server.export.model import BASE_MEMORY, Figure, Tenant, with_all_routes
from jumpstart_server.export.yaml import Noted, to_yaml

HEAD = """Made by `jumpstart export kubernetes`. Each figure names the keys that it comes from."""
ADMIN_PORT = 9000  # where the file has no port for it
STATE = "/var/lib/jumpstart"
START_PERIOD = 2  # seconds
ENDLESS_START = 3600  # seconds; a start-up probe has to end
DRAIN_DELAY = 5  # seconds until proxies have learnt that a pod is going, where the file has none
PROGRESS = 600  # seconds; Kubernetes' own
UNLIMITED = 86_400  # seconds, where an ingress controller has no word for no limit
_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesOptions:
    """
    Attributes:
        config: ``-c`` of the server, in the image; empty for jumpstart.toml in its working folder.
        namespace: empty for that of kubectl.
        name: begins the names of all objects.
        user: number of the user in the pods.
        ingress: class of the Ingress; empty for none.
        gateway: name of the Gateway of the HTTPRoute; empty for none.
        server_name: host of either; empty for any.
    """

    image: str
    config: str = ""
    namespace: str = ""
    replicas: int = 2
    name: str = "jumpstart"
    user: int = 10_001
    ingress: str = ""
    gateway: str = ""
    server_name: str = ""


def render(tenants: Sequence[Tenant], options: KubernetesOptions) -> str:
    """
    Raises:
        ConfigError: a name or an address is none for Kubernetes, or routes are asked for and missing.
    """
    return "---\n".join(
        to_yaml(each, head=HEAD if number == 0 else "") for number, each in enumerate(objects(tenants, options))
    )


def objects(tenants: Sequence[Tenant], options: KubernetesOptions) -> list[dict[str, Any]]:
    """The objects, with comments (`yaml.Noted`); see `render`."""
    if options.ingress or options.gateway:
        tenants = with_all_routes(tenants)
    names: dict[str, str] = {}
    found = []
    for tenant in tenants:
        if tenant.user:
            raise ConfigError(
                f"[server] user {tenant.user}: a pod is its user from the start; leave it out, see --user"
            )
        tenant = _with_drain_delay(tenant)
        name = _object_name(tenant, options)
        other = names.setdefault(name, tenant.name)
        if other != tenant.name:
            raise ConfigError(f"[tenants.{other}] and {tenant.place}: both are {name} for Kubernetes; rename one")
        found += [_deployment(tenant, name, options), _service(tenant, name, options)]
        if options.ingress:
            found.append(_ingress(tenant, name, options))
        if options.gateway:
            found.append(_http_route(tenant, name, options))
    return found


def _with_drain_delay(tenant: Tenant) -> Tenant:
    delay = tenant.settings.drain_delay or DRAIN_DELAY
    return replace(tenant, settings=msgspec.structs.replace(tenant.settings, drain_delay=delay))


def _object_name(tenant: Tenant, options: KubernetesOptions) -> str:
    name = f"{options.name}-{tenant.name.lower().replace('_', '-')}"
    if not _LABEL.fullmatch(name) or len(name) > 63:
        raise ConfigError(
            f"--name {options.name} and {tenant.place}: {name!r} is no name for Kubernetes, which takes up to 63 small "
            "letters, digits and -, with a letter first"
        )
    return name


def _labels(tenant: Tenant, options: KubernetesOptions) -> dict[str, Any]:
    return {"app.kubernetes.io/name": options.name, "app.kubernetes.io/component": tenant.name}


def _metadata(tenant: Tenant, name: str, options: KubernetesOptions) -> dict[str, Any]:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **namespace, "labels": _labels(tenant, options)}


def _deployment(tenant: Tenant, name: str, options: KubernetesOptions) -> dict[str, Any]:
    start = tenant.startup_time()
    start_s = ENDLESS_START if start.value is None else start.value
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(tenant, name, options),
        "spec": {
            "replicas": options.replicas,
            "selector": {"matchLabels": _labels(tenant, options)},
            "strategy": Noted(
                {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                "the new pod is warm before an old one goes",
            ),
            "progressDeadlineSeconds": max(PROGRESS, start_s + 60),
            "template": {
                "metadata": {"labels": _labels(tenant, options)},
                "spec": _pod(tenant, start, start_s, options),
            },
        },
    }


def _pod(tenant: Tenant, start: Figure, start_s: int, options: KubernetesOptions) -> dict[str, Any]:
    stop = tenant.stop_time()
    return {
        "terminationGracePeriodSeconds": Noted(stop.value, stop.text),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": Noted(options.user, f"so that {STATE} can be written"),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(tenant, start, start_s, options)],
        "volumes": Noted(
            [{"name": "state", "emptyDir": {}}],
            "The warm-start cache outlives a container, and not the pod. To boot new pods warm, ship a profile in the\n"
            "image or mount it, name it with `profile`, and mount trusted keys read-only at\n"
            f"{STATE}/config/keys/trusted." + _of_profile(tenant),
        ),
    }


def _of_profile(tenant: Tenant) -> str:
    return f"\n{tenant.place} profile must be there in the image, too." if tenant.settings.profile else ""


def _container(tenant: Tenant, start: Figure, start_s: int, options: KubernetesOptions) -> dict[str, Any]:
    admin = _admin_port(tenant)
    arguments = ["serve"]
    if options.config:
        arguments += ["-c", options.config]
    if tenant.is_named:
        arguments += ["--tenant", tenant.name]
    arguments += ["--bind", f"0.0.0.0:{_port(tenant)}", "--admin", f"0.0.0.0:{admin}"]
    arguments += ["--drain-delay", f"{tenant.settings.drain_delay:g}"]
    container: dict[str, Any] = {
        "name": "jumpstart",
        "image": options.image,
        "command": ["jumpstart"],
        "args": Noted(
            arguments,
            "In a pod it serves on all addresses. The probes need the admin pages on a TCP port; whoever reaches the\n"
            "pod reaches them too (/status, /metrics, /capture), so close the port to others with a NetworkPolicy.\n"
            "Proxies need a moment to learn that a pod goes; so long it serves on: drain_delay."
            + (f"\nBEWARE: {reason}." if (reason := distrust(tenant)) else ""),
        ),
        "env": [{"name": "JUMPSTART_HOME", "value": STATE}],
        "ports": [
            {"name": "http", "containerPort": Noted(_port(tenant), _of_port(tenant))},
            {"name": "admin", "containerPort": admin},
        ],
        "startupProbe": Noted(
            {
                "httpGet": {"path": "/readyz", "port": "admin"},
                "periodSeconds": START_PERIOD,
                "timeoutSeconds": 2,
                "failureThreshold": Noted(math.ceil(start_s / START_PERIOD), f"× {START_PERIOD} s ≥ {start.text}"),
            },
            "ready means that a worker is warm",
        ),
        "readinessProbe": Noted(
            {
                "httpGet": {"path": "/readyz", "port": "admin"},
                "periodSeconds": 5,
                "timeoutSeconds": 3,
                "failureThreshold": 2,
            },
            "503 too while no worker has a free thread: other pods get the traffic",
        ),
        "livenessProbe": Noted(
            {
                "httpGet": {"path": "/livez", "port": "admin"},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
                "failureThreshold": 6,
            },
            "of the supervisor, which replaces workers by itself; a minute, for a busy node is no reason to kill",
        ),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "state", "mountPath": STATE}],
    }
    container["resources"] = _resources(tenant)
    return container


def _resources(tenant: Tenant) -> Any:
    base = f"{BASE_MEMORY >> 20} MiB for the supervisor and the mold"
    wanted, most = tenant.memory(), tenant.memory(spare=1)
    if wanted.value is None or most.value is None:
        text = f"{wanted.text}: set it, or a limit here, from which each worker then takes its share"
        return Noted({}, text)
    return {
        "requests": {"memory": Noted(_mebibytes(wanted.value + BASE_MEMORY), f"{wanted.text} + {base}")},
        "limits": {
            "memory": Noted(
                _mebibytes(most.value + BASE_MEMORY), f"{most.text} + {base}; 1 more, ready before the old one goes"
            )
        },
    }


def _service(tenant: Tenant, name: str, options: KubernetesOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(tenant, name, options),
        "spec": {
            "selector": _labels(tenant, options),
            "ports": [{"name": "http", "port": 443 if tenant.settings.ssl_certfile else 80, "targetPort": "http"}],
        },
    }


def _ingress(tenant: Tenant, name: str, options: KubernetesOptions) -> dict[str, Any]:
    if tenant.strips:
        raise ConfigError(
            f"{tenant.place} root_path: an Ingress cannot strip {tenant.strips}; use --gateway, or leave root_path out"
        )
    silence = tenant.silence()
    seconds = str(UNLIMITED if silence.value is None else silence.value)
    prefix = "nginx.ingress.kubernetes.io/"
    annotations: dict[str, Any] = {
        prefix + "proxy-read-timeout": Noted(seconds, silence.text),
        prefix + "proxy-send-timeout": seconds,
        prefix + "proxy-body-size": Noted(
            str(tenant.settings.limit_request_body), f"{tenant.place} limit_request_body; 0 is no limit, in both"
        ),
        prefix + "proxy-next-upstream": Noted("error", "never because a request takes long"),
        prefix + "proxy-buffering": "off" if tenant.streams else "on",
    }
    if tenant.settings.ssl_certfile:
        annotations[prefix + "backend-protocol"] = "HTTPS"
    paths = [
        {
            "path": route,
            "pathType": "Prefix",
            "backend": {"service": {"name": name, "port": {"name": "http"}}},
        }
        for route in tenant.routes
    ]
    host = {"host": options.server_name} if options.server_name else {}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {
            **_metadata(tenant, name, options),
            "annotations": Noted(annotations, "as ingress-nginx takes them; others need their own words for the same"),
        },
        "spec": {"ingressClassName": options.ingress, "rules": [{**host, "http": {"paths": paths}}]},
    }


def _http_route(tenant: Tenant, name: str, options: KubernetesOptions) -> dict[str, Any]:
    time = tenant.request_time()
    rule: dict[str, Any] = {
        "matches": [{"path": {"type": "PathPrefix", "value": route}} for route in tenant.routes],
        "timeouts": {"request": Noted("0s" if time.value is None else f"{time.value}s", time.text)},
        "backendRefs": [{"name": name, "port": 443 if tenant.settings.ssl_certfile else 80}],
    }
    if tenant.strips:
        if tenant.routes != (tenant.strips,):
            raise ConfigError(
                f"{tenant.place} root_path {tenant.strips} is what the gateway strips; write routes = "
                f'["{tenant.strips}/"]'
            )
        rule["filters"] = Noted(
            [{"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}}],
            f"{tenant.place} root_path",
        )
    hosts = {"hostnames": [options.server_name]} if options.server_name else {}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": _metadata(tenant, name, options),
        "spec": {"parentRefs": [{"name": options.gateway}], **hosts, "rules": [rule]},
    }


def _port(tenant: Tenant) -> int:
    """Of the first address that has one; a pod has its own addresses, so any will do."""
    return next((address.port for address in tenant.binds if address.host and address.port), DEFAULT_PORT)


def _of_port(tenant: Tenant) -> str:
    has_port = any(address.host and address.port for address in tenant.binds)
    return f"{tenant.place} bind" if has_port else f"{tenant.place} bind has no port; {DEFAULT_PORT} is the default"


def _admin_port(tenant: Tenant) -> int:
    admin = tenant.admin
    known = parse_address(admin, option="[server] admin") if admin not in ("auto", "off") else None
    port = known.port if known is not None and known.host and known.port else ADMIN_PORT
    if port != _port(tenant):
        return port
    if known is not None and known.port:
        raise ConfigError(f"{tenant.place} bind and [server] admin: both have port {port}; choose another for one")
    return ADMIN_PORT + 1


def distrust(tenant: Tenant) -> str:
    """Why an ingress controller is not believed about its clients; empty where the file says whom to believe."""
    each = tenant.settings
    default = type(each)().forwarded_allow_ips
    if not each.proxy_headers or each.forwarded_allow_ips != default:
        return ""
    return (
        f"{tenant.place} forwarded_allow_ips = {default!r} does not name the ingress controller: "
        "the app sees its address instead of the client's"
    )


def _mebibytes(size: int) -> str:
    return f"{-(-size >> 20)}Mi"

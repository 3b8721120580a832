"""What is written for each engine, and that the engine's own programs and published schemas take it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jumpstart.errors import ConfigError
from jumpstart_server.addresses import Address
from jumpstart_server.export import envoy, kubernetes, nginx, systemd
from jumpstart_server.export.envoy import EnvoyOptions
from jumpstart_server.export.kubernetes import KubernetesOptions
from jumpstart_server.export.model import Tenant
from jumpstart_server.export.nginx import NginxOptions
from jumpstart_server.export.systemd import SystemdOptions
from jumpstart_server.export.yaml import plain
from tests.server.export_lab import TWO, find_envoy, find_nginx, nginx_main, tenants_from

HTTP = EnvoyOptions(listen=Address(host="127.0.0.1", port=8080))
KUBERNETES = KubernetesOptions(image="shop:1")
UNITS = SystemdOptions(name="jumpstart", user="root", group="", command="/bin/true", config="/srv/shop/jumpstart.toml")
ODD = """
[app]
target = "shop.web:app"
[tenants.a]
bind = ["[::]:8000", "unix:/run/a b.sock", "localhost:8002"]
routes = ["/a.b+c/", "/"]
timeout = 0
keep_alive = 0
body_timeout = 0
header_timeout = 0
limit_request_line = 0
stream_bodies = true
limit_request_body = 5
[tenants.b]
bind = "10.0.0.1:8001"
routes = ["/shop/"]
root_path = "/shop"
first_byte_timeout = 5
idle_timeout = 2.5
queue_timeout = 0.5
startup_timeout = 0
memory_limit = "1GiB"
"""
TEXTS = pytest.mark.parametrize("text", [TWO, ODD], ids=["two", "odd"])


# -- nginx --


@TEXTS
def test_nginx_takes_what_is_written_for_it(tmp_path: Path, text: str) -> None:
    exported = tmp_path / "jumpstart.conf"
    exported.write_text(nginx.render(tenants_from(tmp_path, text), NginxOptions()))
    nginx_takes(tmp_path, exported)


def nginx_takes(folder: Path, exported: Path) -> None:
    main = nginx_main(folder, exported)
    done = subprocess.run([find_nginx(), "-t", "-p", folder, "-c", main], capture_output=True, text=True)
    assert done.returncode == 0 and "[warn]" not in done.stderr, done.stderr


def with_tls(tenants: list[Tenant]) -> list[Tenant]:
    return [replace(each, settings=msgspec.structs.replace(each.settings, ssl_certfile="/c.pem")) for each in tenants]


def test_proxies_speak_tls_to_a_tenant_that_does(tmp_path: Path) -> None:
    tenants = with_tls(tenants_from(tmp_path, TWO))
    exported = tmp_path / "jumpstart.conf"
    exported.write_text(nginx.render(tenants, NginxOptions()))
    assert "proxy_pass https://jumpstart_web;" in exported.read_text()
    nginx_takes(tmp_path, exported)
    file = tmp_path / "envoy.yaml"
    file.write_text(envoy.render(tenants, HTTP))
    assert file.read_text().count("UpstreamTlsContext") == 2 and "health_checks" not in file.read_text()
    envoy_takes(file)
    service = plain(kubernetes.objects(tenants, KUBERNETES)[1])
    assert service["spec"]["ports"][0]["port"] == 443


def location(text: str, opening: str) -> str:
    start = text.index(f"    location {opening} {{")
    return text[start : text.index("\n    }", start)]


def test_nginx_is_more_patient_than_the_tenant(tmp_path: Path) -> None:
    text = nginx.render(tenants_from(tmp_path, TWO), NginxOptions())
    web, chat = location(text, "/"), location(text, '~ "^/chat(?:/|$)"')
    assert "proxy_read_timeout 45s;" in web and "proxy_read_timeout 715s;" in chat
    assert "proxy_buffering on;" in web and "proxy_buffering off;  # it streams" in chat
    assert "proxy_pass http://jumpstart_genai;" in chat
    assert location(text, '~ "^/v1(?:/|$)"').partition("\n")[2] == chat.partition("\n")[2]
    assert "upstream jumpstart_genai {\n    server unix:/run/jumpstart/genai.sock max_fails=0;" in text
    assert "proxy_pass http://jumpstart_admin/readyz;" in location(text, "= /healthz")


def test_nginx_says_what_it_cannot_do(tmp_path: Path) -> None:
    text = nginx.render(tenants_from(tmp_path, ODD), NginxOptions(listen="[::]:80", server_name="a.example b.example"))
    assert 'No /healthz: [server] admin = "auto" is no address that nginx can know.' in text
    assert "BEWARE: [tenants.b] forwarded_allow_ips" in text
    assert "listen [::]:80;\n    server_name a.example b.example;" in text
    a, b = location(text, "/"), location(text, '~ "^/shop(?:/|$)"')
    assert "proxy_read_timeout 7d;" in a and "proxy_request_buffering off;" in a and "client_max_body_size 5;" in a
    assert "proxy_read_timeout 11s;" in b, "0.5 + 5 + 5, rounded up"
    assert 'rewrite "(?s)^/shop/?(.*)$" /$1 break;' in b
    assert "no idle connections are kept: [tenants.a] keep_alive 0" in text
    assert text.index('"^/a\\.b\\+c(?:/|$)"') < text.index("location / {")


def test_nginx_has_no_answer_where_nobody_has_the_rest(tmp_path: Path) -> None:
    text = TWO.replace("threads = 200", 'threads = 200\nroutes = ["/web/"]')
    assert "return 404;" in location(nginx.render(tenants_from(tmp_path, text), NginxOptions()), "/")


# -- Envoy --


@TEXTS
@pytest.mark.parametrize("as_json", [False, True], ids=["yaml", "json"])
def test_envoy_takes_what_is_written_for_it(tmp_path: Path, text: str, as_json: bool) -> None:
    file = tmp_path / ("envoy.json" if as_json else "envoy.yaml")
    file.write_text(envoy.render(tenants_from(tmp_path, text), HTTP, as_json=as_json))
    envoy_takes(file)


def envoy_takes(file: Path) -> None:
    done = subprocess.run(
        [find_envoy(), "--mode", "validate", "-c", file, "--use-dynamic-base-id"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "deprecated" not in done.stderr.lower(), done.stderr


def envoy_document(tmp_path: Path, text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(envoy.render(tenants_from(tmp_path, text), HTTP, as_json=True))
    return document["static_resources"]  # type: ignore[no-any-return]


def test_envoy_is_more_patient_than_the_tenant_and_admits_everything(tmp_path: Path) -> None:
    resources = envoy_document(tmp_path, TWO)
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    health, chat, v1, rest = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert chat == {
        "match": {"path_separated_prefix": "/chat"},
        "route": {"cluster": "genai", "timeout": "715s", "idle_timeout": "715s"},
    }
    assert health["match"] == {"path": "/healthz"} and health["route"]["cluster"] == "jumpstart/admin"
    assert v1["route"] == chat["route"] and rest["match"] == {"prefix": "/"}
    assert (rest["route"]["cluster"], rest["route"]["timeout"]) == ("web", "45s")
    web, genai, admin = resources["clusters"]
    assert admin["name"] == "jumpstart/admin"
    endpoint = genai["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert endpoint["address"] == {"pipe": {"path": "/run/jumpstart/genai.sock"}}
    assert endpoint["health_check_config"]["address"]["socket_address"]["port_value"] == 9000
    for cluster in (web, genai):
        assert cluster["health_checks"][0]["http_health_check"]["path"] == f"/readyz/{cluster['name']}"
        assert cluster["circuit_breakers"]["thresholds"][0]["max_requests"] > 4 * (200 + 1000)
        assert not {"outlier_detection", "retry_policy"} & set(cluster)
    assert "retry" not in json.dumps(resources)


def test_envoy_without_a_fixed_admin_address_checks_nothing_and_says_so(tmp_path: Path) -> None:
    resources = envoy_document(tmp_path, ODD)
    assert all("health_checks" not in cluster for cluster in resources["clusters"])
    assert [cluster["type"] for cluster in resources["clusters"]] == ["STRICT_DNS", "STATIC"]
    text = envoy.render(tenants_from(tmp_path, ODD), HTTP)
    assert 'No /healthz: [server] admin = "auto" is no address' in text and "No health checks: they need" in text
    routes = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]
    action = next(
        each["route"]
        for each in routes["virtual_hosts"][0]["routes"]
        if each["match"].get("path_separated_prefix") == "/shop"
    )
    rewrite = action["regex_rewrite"]
    for path, seen in (("/shop", "/"), ("/shop/", "/"), ("/shop/a/shop/b", "/a/shop/b")):
        assert re.sub(rewrite["pattern"]["regex"], rewrite["substitution"], path, count=1) == seen


@pytest.mark.parametrize("address", [Address(host="localhost", port=1), Address(fd=3)])
def test_envoy_cannot_serve_everywhere(address: Address) -> None:
    with pytest.raises(ConfigError, match="--listen x: envoy serves on IP addresses and Unix sockets"):
        envoy.check_listen(address, "x")


# -- systemd --


def unit_values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def verify(folder: Path, units: dict[str, str]) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    for name, text in units.items():
        (folder / name).write_text(text)
    done = subprocess.run([program, "verify", *[folder / name for name in units]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@TEXTS
def test_systemd_takes_what_is_written_for_it(tmp_path: Path, text: str) -> None:
    verify(tmp_path, systemd.render(tenants_from(tmp_path, text), UNITS))


def test_systemd_takes_a_service_and_a_socket_for_each_tenant(tmp_path: Path) -> None:
    tenants = tenants_from(tmp_path, TWO.replace('admin = "127.0.0.1:9000"', ""))
    units = systemd.render(tenants, replace(UNITS, per_tenant=True, sockets=True))
    assert list(units) == [f"jumpstart-{name}.{kind}" for name in ("web", "genai") for kind in ("service", "socket")]
    verify(tmp_path, units)
    service, sock = units["jumpstart-genai.service"], units["jumpstart-genai.socket"]
    assert unit_values(service, "ExecStart") == [
        "/bin/true serve -c /srv/shop/jumpstart.toml --tenant genai --bind fd://genai"
    ]
    assert unit_values(sock, "FileDescriptorName") == ["genai"]
    assert unit_values(sock, "ListenStream") == ["/run/jumpstart/genai.sock"]
    assert unit_values(sock, "SocketMode") == ["0666"]
    assert unit_values(units["jumpstart-web.socket"], "ListenStream") == ["127.0.0.1:8000"]


def test_systemd_waits_as_long_as_the_slowest_tenant_needs(tmp_path: Path) -> None:
    (text,) = systemd.render(tenants_from(tmp_path, TWO), UNITS).values()
    assert unit_values(text, "TimeoutStopSec") == ["130"]  # genai: graceful_timeout 120 + 10
    assert unit_values(text, "TimeoutStartSec") == ["250"]
    assert unit_values(text, "TasksMax") == [str(2 * 4 * (200 + 16) + 64 + 2 * (500 + 16) + 64)]
    assert unit_values(text, "MemoryMax") == []  # web has no memory_limit
    assert unit_values(text, "ExecStart") == ["/bin/true serve -c /srv/shop/jumpstart.toml"]
    assert unit_values(text, "RestartPreventExitStatus") == ["2 3 4"]
    assert unit_values(text, "RuntimeDirectory") == ["jumpstart"]
    (text,) = systemd.render(tenants_from(tmp_path, ODD), UNITS).values()
    assert unit_values(text, "TimeoutStartSec") == ["infinity"]
    both = TWO.replace("threads = 200", 'threads = 200\nmemory_limit = "1GiB"')
    (text,) = systemd.render(tenants_from(tmp_path, both), UNITS).values()
    assert unit_values(text, "MemoryMax") == [str((2 * 4 * 1024 + 2 * 2048 + 256) << 20)]


def test_systemd_units_fit_users_ports_and_odd_paths(tmp_path: Path) -> None:
    low = "[app]\ntarget = 'a:b'\n[tenants.web]\nbind = ['0.0.0.0:80', 'unix:/tmp/a.sock']\n"
    options = replace(UNITS, user="shop", group="web", config="/srv/100% $x/j s.toml")
    (text,) = systemd.render(tenants_from(tmp_path, low), options).values()
    assert unit_values(text, "AmbientCapabilities") == ["CAP_NET_BIND_SERVICE"]
    assert unit_values(text, "PrivateTmp") == []
    assert unit_values(text, "User") + unit_values(text, "Group") == ["shop", "web"]
    assert unit_values(text, "ExecStart") == ['/bin/true serve -c "/srv/100%% $$x/j s.toml" --tenant web']
    assert unit_values(text, "WorkingDirectory") == ["/srv/100%% $x"]
    (text,) = systemd.render(tenants_from(tmp_path, "[server]\nuser = 'nobody'\n" + low), options).values()
    assert unit_values(text, "User") == unit_values(text, "CapabilityBoundingSet") == []
    (text,) = systemd.render(tenants_from(tmp_path, "[app]\ntarget = 'a:b'\n[tenants.web]"), options).values()
    assert unit_values(text, "CapabilityBoundingSet") == [""]


@pytest.mark.parametrize(
    ("text", "change", "words"),
    [
        (TWO, {"sockets": True}, "--sockets: one service cannot be told which socket is which tenant's"),
        (TWO, {"per_tenant": True}, '--per-tenant: each service would bind [server] admin = "127.0.0.1:9000"'),
        (TWO, {"command": "jumpstart"}, "--command jumpstart: systemd needs the whole path"),
        (TWO, {"name": "a b"}, "--name a b: no name for a unit"),
        (TWO, {"is_part": True}, "--tenant: serve takes all tenants of the file or one; add --per-tenant"),
        (ODD, {"sockets": True, "per_tenant": True}, "[tenants.a] bind unix:/run/a b.sock: systemd needs a whole path"),
    ],
)
def test_what_systemd_cannot_be_told_is_refused(tmp_path: Path, text: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        systemd.render(tenants_from(tmp_path, text), replace(UNITS, **change))
    assert str(caught.value).startswith(words)


# -- Kubernetes --

EVERYTHING = replace(KUBERNETES, namespace="shop", ingress="nginx", config="etc/j.toml", server_name="shop.example")


@TEXTS
@pytest.mark.parametrize("options", [KUBERNETES, EVERYTHING], ids=["plain", "everything"])
def test_the_published_schemas_of_kubernetes_hold(tmp_path: Path, text: str, options: KubernetesOptions) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    tenants = tenants_from(tmp_path, text.replace('root_path = "/shop"', ""))
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents = list(yaml.safe_load_all(kubernetes.render(tenants, options)))
    assert documents == [plain(each) for each in kubernetes.objects(tenants, options)]
    assert [each["kind"] for each in documents] == 2 * ["Deployment", "Service", *(["Ingress"] * bool(options.ingress))]
    for document in documents:
        for version in ("1.30", schemas.latest_version()):
            schemas.validate(document, version, strict=True)


def pods(tmp_path: Path, text: str, options: KubernetesOptions = KUBERNETES) -> list[dict[str, Any]]:
    objects = [plain(each) for each in kubernetes.objects(tenants_from(tmp_path, text), options)]
    return [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]


def test_a_pod_is_ready_when_warm_and_stops_when_its_requests_have_ended(tmp_path: Path) -> None:
    web, genai = pods(tmp_path, TWO)
    assert (web["terminationGracePeriodSeconds"], genai["terminationGracePeriodSeconds"]) == (45, 135)
    (container,) = genai["containers"]
    assert container["args"] == [
        "serve",
        "--tenant",
        "genai",
        "--bind",
        "0.0.0.0:8000",
        "--admin",
        "0.0.0.0:9000",
        "--drain-delay",
        "5",
    ]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 8000, "admin": 9000}
    for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        assert container[probe]["httpGet"] == {"path": path, "port": "admin"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 250  # twice startup_timeout, and 10
    assert container["resources"] == {"requests": {"memory": "2304Mi"}, "limits": {"memory": "4352Mi"}}
    assert web["containers"][0]["resources"] == {}


def test_objects_of_a_tenant_belong_together(tmp_path: Path) -> None:
    tenants = tenants_from(tmp_path, TWO)
    objects = [plain(each) for each in kubernetes.objects(tenants, replace(EVERYTHING, gateway="edge"))]
    deployment, service, ingress, route = objects[4:]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert {each["metadata"]["namespace"] for each in objects} == {"shop"}
    name = service["metadata"]["name"]
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    assert [(each["path"], each["pathType"]) for each in paths] == [("/chat", "Prefix"), ("/v1", "Prefix")]
    assert {each["backend"]["service"]["name"] for each in paths} == {name}
    assert route["spec"]["parentRefs"] == [{"name": "edge"}] and route["spec"]["hostnames"] == ["shop.example"]
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "715s"} and rule["backendRefs"] == [{"name": name, "port": 80}]
    assert [each["path"]["value"] for each in rule["matches"]] == ["/chat", "/v1"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_a_gateway_strips_what_an_ingress_cannot(tmp_path: Path) -> None:
    tenants = tenants_from(tmp_path, ODD)
    with pytest.raises(ConfigError, match=r"\[tenants.b\] root_path: an Ingress cannot strip /shop; use --gateway"):
        kubernetes.objects(tenants, replace(KUBERNETES, ingress="nginx"))
    route = plain(kubernetes.objects(tenants, replace(KUBERNETES, gateway="edge"))[-1])
    path = route["spec"]["rules"][0]["filters"][0]["urlRewrite"]["path"]
    assert path == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (TWO, {"name": "Shop"}, "--name Shop and [tenants.web]: 'Shop-web' is no name for Kubernetes"),
        (TWO.replace("genai]", "WEB]"), {}, "[tenants.web] and [tenants.WEB]: both are jumpstart-web for Kubernetes"),
        (TWO.replace(":9000", ":8000"), {}, "[tenants.web] bind and [server] admin: both have port 8000"),
        (
            TWO.replace("[server]", "[server]\nuser = 'nobody'"),
            {},
            "[server] user nobody: a pod is its user from the start",
        ),
    ],
)
def test_what_kubernetes_cannot_be_told_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kubernetes.objects(tenants_from(tmp_path, text), replace(KUBERNETES, **options))
    assert str(caught.value).startswith(words)


def test_exports_are_the_same_each_time(tmp_path: Path) -> None:
    for text in (TWO, ODD.replace('root_path = "/shop"', "")):
        once, again = (tenants_from(tmp_path, text) for _ in range(2))
        assert nginx.render(once, NginxOptions()) == nginx.render(again, NginxOptions())
        assert envoy.render(once, HTTP) == envoy.render(again, HTTP)
        assert systemd.render(once, UNITS) == systemd.render(again, UNITS)
        assert kubernetes.render(once, EVERYTHING) == kubernetes.render(again, EVERYTHING)

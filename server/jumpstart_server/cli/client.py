"""Talks to the admin address of a running server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import httpx

from jumpstart.errors import ConfigError, JumpstartError
from jumpstart.paths import HostPaths
from jumpstart_server.addresses import Address, parse_address

TIMEOUT = 60.0  # seconds; a capture asks every worker for all it knows
CHOICE_TIMEOUT = 3.0  # seconds that one of several servers has to say which it is; its workers have 2 of them
CHOICES_DESCRIBED = 16  # servers that are asked, at once


class AdminClient:
    """One server's admin pages."""

    def __init__(self, address: Address, timeout_s: float = TIMEOUT) -> None:
        self.address = address
        self._timeout_s = timeout_s

    @classmethod
    def find(cls, text: str | None, paths: HostPaths) -> AdminClient:
        """
        Return the client for ``--admin``, or for the one server of this user that runs.

        Raises:
            ConfigError: none runs, or several do; the message lists them.
        """
        if text:
            return cls(parse_address(text, option="--admin"))
        # Not at the top: it brings starlette and the server, which a command with --admin can do without.
        from jumpstart_server.admin import clean_stale, run_folder

        living = clean_stale(run_folder(paths))
        if len(living) == 1:
            return cls(Address(path=str(living[0])))
        if not living:
            raise ConfigError("no running server found; start one, or name its admin address with --admin")
        choices = "\n".join(_describe_servers(living))
        raise ConfigError(f"{len(living)} servers run; choose one:\n{choices}")

    def get(self, path: str) -> Any:
        """
        Return the JSON of a page.

        Raises:
            JumpstartError: the server does not answer, or not with 200.
        """
        return self._request("GET", path).json()

    def text(self, path: str) -> tuple[int, str]:
        """Return status and text of a page, whatever the status."""
        response = self._send("GET", path)
        return response.status_code, response.text

    def capture(self, tenant: str | None) -> bytes:
        """
        Return a profile of what a tenant of the server knows now; *tenant* is needed where it serves several.

        Raises:
            ConfigError: it serves no such tenant, or several; the message lists them.
            JumpstartError: the server does not answer, or is not ready.
        """
        response = self._send("POST", f"/capture/{quote(tenant, safe='')}" if tenant else "/capture")
        if response.status_code == 404:
            names = ", ".join(each["tenant"] for each in self.get("/status")["tenants"])
            asked = f"--tenant {tenant}: this server has" if tenant else "name a tenant with --tenant; this server has"
            raise ConfigError(f"{asked} {names}")
        return self._whole(response, "/capture").content

    def shadow(self, fraction: float, tenant: str | None) -> float:
        """
        Have the server shadow this *fraction* of a tenant's requests from now on; return what it does.

        Raises:
            ConfigError: it serves no such tenant, or several.
            JumpstartError: the server does not answer.
        """
        path = f"/shadow/fraction/{quote(tenant, safe='')}" if tenant else "/shadow/fraction"
        response = self._send("POST", f"{path}?fraction={fraction}")
        if response.status_code == 404:
            raise ConfigError(f"--tenant: {response.text.strip()}")
        found: float = self._whole(response, path).json()["fraction"]
        return found

    def _request(self, method: str, path: str) -> httpx.Response:
        return self._whole(self._send(method, path), path)

    def _whole(self, response: httpx.Response, path: str) -> httpx.Response:
        if response.status_code != 200:
            raise JumpstartError(f"{self.address}{path}: {response.status_code}: {response.text.strip()}")
        return response

    def _send(self, method: str, path: str) -> httpx.Response:
        import httpx

        if self.address.path:
            transport = httpx.HTTPTransport(uds=self.address.path)
            base = "http://admin"
        else:
            transport = httpx.HTTPTransport()
            base = f"http://{self.address}"
        try:
            with httpx.Client(transport=transport, base_url=base, timeout=self._timeout_s) as client:
                return client.request(method, path)
        except httpx.HTTPError as error:
            raise JumpstartError(f"the admin address {self.address} does not answer: {error}") from None


def _describe_servers(sockets: Sequence[Path]) -> list[str]:
    """One line for each server: what it is, where known, and how to choose it."""
    asked = sockets[:CHOICES_DESCRIBED]
    with ThreadPoolExecutor(len(asked)) as pool:
        words = list(pool.map(_describe_server, asked)) + ["not asked"] * (len(sockets) - len(asked))
    return [f"  {text}: --admin unix:{path}" for text, path in zip(words, sockets, strict=True)]


def _describe_server(path: Path) -> str:
    try:
        document = AdminClient(Address(path=str(path)), CHOICE_TIMEOUT).get("/status")
        served = [f"{each['target']} at {', '.join(each['addresses'])}" for each in document["tenants"]]
        return f"pid {document['pid']}, {'; '.join(served)}"
    except (JumpstartError, ValueError, KeyError, TypeError):  # it ends just now, hangs, or is no server of ours
        return "does not answer"

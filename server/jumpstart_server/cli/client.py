"""Talks to the admin address of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

from jumpstart.errors import ConfigError, JumpstartError
from jumpstart.paths import HostPaths
from jumpstart_server.addresses import Address, parse_address

TIMEOUT = 60.0  # seconds; a capture asks every worker for all it knows


class AdminClient:
    """One server's admin pages."""

    def __init__(self, address: Address) -> None:
        self.address = address

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
        choices = "\n".join(f"  --admin unix:{path}" for path in living)
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

    def capture(self) -> bytes:
        """Return a profile of what the server knows now."""
        return self._request("POST", "/capture").content

    def _request(self, method: str, path: str) -> httpx.Response:
        response = self._send(method, path)
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
            with httpx.Client(transport=transport, base_url=base, timeout=TIMEOUT) as client:
                return client.request(method, path)
        except httpx.HTTPError as error:
            raise JumpstartError(f"the admin address {self.address} does not answer: {error}") from None

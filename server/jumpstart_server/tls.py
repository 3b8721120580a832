"""TLS of our own: one certificate, one key."""

from __future__ import annotations

import ssl

from jumpstart.errors import ConfigError


def server_context(
    certfile: str, keyfile: str, *, options: tuple[str, str] = ("--ssl-certfile", "--ssl-keyfile")
) -> ssl.SSLContext:
    """
    A context that serves with the certificate chain of *certfile* and its key, which is in *keyfile* or beside it.

    Args:
        options: where the two stand, for the error.

    Raises:
        ConfigError: they cannot be read, are no PEM, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile or None, password=lambda: "")
    except (OSError, ValueError) as error:
        files = f"{options[0]} {certfile}" + (f" and {options[1]} {keyfile}" if keyfile else "")
        hint = "both must be readable PEM files that belong together" if keyfile else f"name its key with {options[1]}"
        raise ConfigError(f"{files}: cannot be used: {error}; {hint}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context

"""TLS of our own: one certificate, one key."""

from __future__ import annotations

import ssl

from jumpstart.errors import ConfigError


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """
    A context that serves with the certificate chain of *certfile* and its key, which is in *keyfile* or beside it.

    Raises:
        ConfigError: they cannot be read, are no PEM, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile or None, password=lambda: "")
    except (OSError, ValueError) as error:
        files = f"--ssl-certfile {certfile}" + (f" and --ssl-keyfile {keyfile}" if keyfile else "")
        hint = "both must be readable PEM files that belong together" if keyfile else "name its key with --ssl-keyfile"
        raise ConfigError(f"{files}: cannot be used: {error}; {hint}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context

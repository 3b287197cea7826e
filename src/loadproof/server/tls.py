"""TLS: the server's certificate, checked before anything else starts."""

from __future__ import annotations

import ssl

from loadproof.server.settings import ServerConfig, ServerConfigError


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What TLS is served with, None without a certificate; raises :class:`ServerConfigError`."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _refuse_password)
    except (OSError, ValueError) as error:
        key = f" with ssl_keyfile {config.ssl_keyfile}" if config.ssl_keyfile else ""
        raise ServerConfigError(f"ssl_certfile {config.ssl_certfile}{key}: {_reason(error)}") from error
    return context


def _refuse_password() -> str:
    """Without it, OpenSSL would ask at the terminal."""
    raise ServerConfigError("the key is encrypted; give one that is not")


def _reason(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(getattr(error, "strerror", None) or error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is another certificate's"
    return f"no certificate chain and key in PEM form ({error.reason or 'not understood'})"

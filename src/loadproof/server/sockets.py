"""The sockets that a server listens on, taken before its model is loaded: a port in use is told at once."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from collections.abc import Iterable
from typing import Any

from loadproof.server.settings import ServerConfig

_REASONS = {
    errno.EADDRINUSE: "is in use",
    errno.EADDRNOTAVAIL: "is not an address of this machine",
    errno.EACCES: "may not be listened on by this user",
}


# "localhost" has an IPv6 address on machines without IPv6, too.
_LACKING = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


_MOST_FILES = 65536
_EVERYWHERE = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104 - names, to be compared with


class AddressError(OSError):
    """An address that the server can't listen on, in words."""


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of ``host``, which don't listen yet; port 0 is one free port for all.

    Raises :class:`AddressError`.
    """
    bound: list[socket.socket] = []
    try:
        lacking: OSError | None = None
        for family, address in _addresses(host, port):
            if port == 0 and bound:
                address = (address[0], bound[0].getsockname()[1], *address[2:])
            try:
                bound.append(_bound(family, address))
            except OSError as error:
                if error.errno not in _LACKING:
                    raise
                lacking = error
        if lacking is not None and not bound:
            raise lacking
    except OSError as error:
        close_all(bound)
        raise _address_error(host, port, error) from error
    return bound


def listen(bound: Iterable[socket.socket], config: ServerConfig, backlog: int) -> None:
    """Let connections come, so many waiting to be accepted.

    Raises :class:`AddressError` where another process has come first.
    """
    try:
        for one in bound:
            one.listen(backlog)
    except OSError as error:
        raise _address_error(config.host, config.port, error) from error


def allow_connections() -> None:
    """Have the process open as many files as the system lets it: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close sockets; those that are closed are passed over."""
    for one in sockets:
        one.close()


def url_of(listening: socket.socket, config: ServerConfig) -> str:
    """Where a browser on this machine finds what listens on a socket."""
    name = "localhost" if config.host in _EVERYWHERE else config.host.strip("[]")
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"


def _address_error(host: str, port: int, error: OSError) -> AddressError:
    reason = _REASONS.get(error.errno or 0)
    if reason is None or isinstance(error, socket.gaierror):
        return AddressError(f"can't listen on {host}, port {port}: {error.strerror or error}")
    what = f"address {host}" if error.errno == errno.EADDRNOTAVAIL else f"port {port} of {host}"
    hint = "; choose another with --port" if error.errno != errno.EADDRNOTAVAIL else ""
    return AddressError(f"{what} {reason}{hint}")


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Where a name leads, each address once."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "not a name that a machine can have") from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that has just ended leaves connections behind that would hold the port for a minute.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" is IPv6 alone, as "0.0.0.0" is IPv4: "localhost" is both, by two sockets.
            with contextlib.suppress(OSError):
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made

"""Where a server listens. The launcher's check before the start and the server itself bind in the same way."""

import socket

EVERYWHERE = ("", "*", "::", "[::]")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host`: a name, or an address (of IPv6 with or without brackets).

    "", "*" and "::" mean all addresses of IPv6 and IPv4, 0.0.0.0 all of IPv4. Raises OSError, or UnicodeError for an
    impossible name.
    """
    if host in EVERYWHERE:
        if not socket.has_dualstack_ipv6():
            return _bound(socket.AF_INET, ("0.0.0.0", port))
        return _bound(socket.AF_INET6, ("::", port), both=True)
    family, *_, address = socket.getaddrinfo(
        without_brackets(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return _bound(family, address)


def without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def netloc(host: str, port: int) -> str:
    """Return `host` and `port` as they stand in a URL."""
    host = without_brackets(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound(family: int, address: tuple[object, ...], *, both: bool = False) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound

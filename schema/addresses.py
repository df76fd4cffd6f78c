"""Network addresses of this machine."""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"
"""Loopback address of this machine."""


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and loopback IP addresses.

    Other names are never loopback, because they can resolve to anything.
    """
    # `ip_address` accepts no names.
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Before Python 3.13 an IPv4-mapped address (::ffff:127.0.0.1) is not loopback by itself.
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)

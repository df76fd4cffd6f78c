"""Ray clusters that the user lists outside of any graph: addresses, tokens and permissions.

A graph can come from anywhere, so it names an entry of this list and never an address: a program that answers at that
address as a cluster can run code in this process.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .refs import IN_PROCESS, LOCAL, PathMap, WorkersError, path_maps

HIGHEST_PORT = 65535
REQUIRED, OPTIONAL = {"address": str}, {"token_file": str, "remote_machines": bool, "path_map": list}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One entry of the list.

    Args:
        address: `host:port` of a running Ray cluster.
        token_file: path of the file with its token, as written in the list; empty for a loopback cluster without one.
        remote_machines: permission for workers to listen on addresses that other machines can reach.
        paths: map of local folders to folders on the machines of the cluster.
    """

    address: str
    token_file: str = ""
    remote_machines: bool = False
    paths: tuple[PathMap, ...] = ()


BUILTIN_CLUSTERS = {LOCAL: Cluster(address=LOCAL), IN_PROCESS: Cluster(address=IN_PROCESS)}
"""Built-in entries: this machine."""


def read_clusters(text: str, source: str) -> dict[str, Cluster]:
    """Parse a JSON list of clusters and return it by name, after the built-in entries.

    Raises WorkersError, which names `source`, for anything that is not such a list.
    """
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise WorkersError(f"{source} is not JSON ({err}): write {{}} into it for an empty list") from err
    if not isinstance(listed, dict):
        raise WorkersError(f'{source} is not a list of clusters: write {{"name": {{"address": "host:port"}}}}')
    return {**BUILTIN_CLUSTERS, **{name: _cluster(name, entry, source) for name, entry in listed.items()}}


def cluster_named(name: object, clusters: Mapping[str, Cluster], source: str) -> Cluster:
    """Return the entry called `name`. Raises WorkersError, which lists the known names."""
    if not isinstance(name, str) or name not in clusters:
        raise WorkersError(
            f"the cluster is {name!r}, and there are {', '.join(clusters)}: choose one of them, or add an entry of "
            f"that name to {source}"
        )
    return clusters[name]


def check_address(address: str, *, beyond_loopback: bool, token_file: str) -> None:
    """Raise WorkersError for an invalid address, or a remote one without permission or token.

    `beyond_loopback` and `token_file` are refused for workers of this machine.
    """
    if address in BUILTIN_CLUSTERS:
        if beyond_loopback or token_file:
            raise WorkersError(
                f"workers at {address!r} listen on 127.0.0.1 only and generate their own token: set remote_machines "
                "and token_file only in the entry of a Ray cluster"
            )
        return
    host, _ = host_and_port(address)
    if is_loopback(host):
        return
    if not beyond_loopback:
        raise WorkersError(
            f"{address} is another machine: set remote_machines to true in its entry if workers may listen on "
            "addresses that other machines reach"
        )
    if not token_file:
        raise WorkersError(
            f"{address} is another machine: name the file with the token of its Ray as token_file in its entry. "
            "Without a token, everyone who reaches the cluster can run programs there"
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port`, and remove the brackets of an IPv6 host. Raises WorkersError for anything else."""
    host, colon, port = address.rpartition(":")
    # The length is checked before int(): Python refuses to convert thousands of digits.
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(HIGHEST_PORT))
    if not colon or not host or not is_number or not 0 < int(port) <= HIGHEST_PORT:
        raise WorkersError(f"the address is {address!r}: write host:port of a Ray cluster, like 192.168.1.5:6379")
    if any(letter.isspace() or letter in "/@" for letter in host):
        raise WorkersError(f"the address is {address!r}: write host:port alone, without a scheme, a user or a path")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if any(letter in "[]" for letter in bare) or (":" in bare) != (bare != host):
        raise WorkersError(f"the address is {address!r}: write an IPv6 address in brackets, like [::1]:6379")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and loopback IP addresses. Other names can resolve to anything, so they are not."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Before Python 3.13 an IPv4-mapped address (::ffff:127.0.0.1) is not loopback by itself.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _cluster(name: str, entry: Any, source: str) -> Cluster:
    where = f"the entry {name!r} of {source}"
    if not name.strip() or name in BUILTIN_CLUSTERS:
        raise WorkersError(f"{where} cannot have that name: use a name other than {' and '.join(BUILTIN_CLUSTERS)}")
    kinds: dict[str, type] = {**REQUIRED, **OPTIONAL}
    if not isinstance(entry, dict) or not REQUIRED.keys() <= entry.keys() <= kinds.keys():
        raise WorkersError(f"{where} must have {', '.join(REQUIRED)} and may have {', '.join(OPTIONAL)}, nothing else")
    for key, value in entry.items():
        if not isinstance(value, kinds[key]):
            raise WorkersError(f"{where}: {key} is {value!r}, and must be a {kinds[key].__name__}")
        if isinstance(value, str) and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value):
            raise WorkersError(f"{where}: {key} is {value!r}: remove the characters that no file name can have")
    settings = dict(entry)
    lines = settings.pop("path_map", [])
    if not all(isinstance(line, str) for line in lines):
        raise WorkersError(f'{where}: path_map is a list of lines like "/models -> /mnt/models"')
    try:
        cluster = Cluster(**settings, paths=path_maps("\n".join(lines)))
        host_and_port(cluster.address)
        check_address(cluster.address, beyond_loopback=cluster.remote_machines, token_file=cluster.token_file)
    except WorkersError as err:
        raise WorkersError(f"{where}: {err}") from err
    return cluster

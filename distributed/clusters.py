"""Ray clusters from the user's own list: addresses, tokens and permissions.

A graph can come from anywhere. It names an entry of this list and never an address, because a
program at this address can pose as a cluster and run code in this process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..schema import is_loopback
from ..schema.refs import IN_PROCESS, LOCAL, WorkersError, WorkersRef, path_maps

HIGHEST_PORT = 65535
REQUIRED = {"address": str}
OPTIONAL = {"token_file": str, "remote_machines": bool, "path_map": list}


BUILTIN_CLUSTERS = {name: WorkersRef(count=1, address=name) for name in (LOCAL, IN_PROCESS)}
"""Built-in entries: a worker on this machine."""


def read_clusters(text: str, source: str) -> dict[str, WorkersRef]:
    """Parse a JSON list of clusters and return one worker of each by name, after the built-in ones.

    Token files keep their paths from the list.

    Raises WorkersError with `source` in its message for any other text.
    """
    try:
        listed = json.loads(text)
    # json raises RecursionError for deeply nested lists.
    except (ValueError, RecursionError) as err:
        raise WorkersError(
            f"{source} is not JSON ({err}): write {{}} into it for an empty list"
        ) from err
    if not isinstance(listed, dict):
        raise WorkersError(
            f'{source} is not a list of clusters: write {{"name": {{"address": "host:port"}}}}'
        )
    entries = {name: _cluster(name, entry, source) for name, entry in listed.items()}
    return BUILTIN_CLUSTERS | entries


def cluster_named(name: object, clusters: Mapping[str, WorkersRef], source: str) -> WorkersRef:
    """Return the entry called `name`. Raises WorkersError with a list of the known names."""
    # A graph may hold any JSON value here. A list, for example, cannot be a key.
    if not isinstance(name, str) or name not in clusters:
        raise WorkersError(
            f"the cluster is {name!r}, and there are {', '.join(clusters)}: choose one of them, or "
            f"add an entry of that name to {source}"
        )
    return clusters[name]


def check_address(ref: WorkersRef) -> None:
    """Raise WorkersError for an invalid address, or a remote one without permission or token.

    Workers on this machine accept neither `beyond_loopback` nor `token_file`.
    """
    address = ref.address
    if address in BUILTIN_CLUSTERS:
        if ref.beyond_loopback or ref.token_file:
            raise WorkersError(
                f"workers at {address!r} listen on 127.0.0.1 only and generate their own token: "
                "set remote_machines and token_file only in the entry of a Ray cluster"
            )
        return
    host, _ = host_and_port(address)
    if is_loopback(host):
        return
    if not ref.beyond_loopback:
        raise WorkersError(
            f"{address} is another machine: set remote_machines to true in its entry if workers "
            "may listen on addresses that other machines reach"
        )
    if not ref.token_file:
        raise WorkersError(
            f"{address} is another machine: name the file with the token of its Ray as token_file "
            "in its entry. Without a token, everyone who reaches the cluster can run programs there"
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port`, without the brackets around an IPv6 host.

    Raises WorkersError for anything else.
    """
    host, colon, port = address.rpartition(":")
    # Compare the length before int(): Python refuses to convert thousands of digits.
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(HIGHEST_PORT))
    if not colon or not host or not is_number or not 0 < int(port) <= HIGHEST_PORT:
        raise WorkersError(
            f"the address is {address!r}: write host:port of a Ray cluster, like 192.168.1.5:6379"
        )
    if any(letter.isspace() or letter in "/@" for letter in host):
        raise WorkersError(
            f"the address is {address!r}: write host:port alone, without a scheme, a user or a path"
        )
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if any(letter in "[]" for letter in bare) or (":" in bare) != (bare != host):
        raise WorkersError(
            f"the address is {address!r}: write an IPv6 address in brackets, like [::1]:6379"
        )
    return bare, int(port)


def _cluster(name: str, entry: Any, source: str) -> WorkersRef:
    where = f"the entry {name!r} of {source}"
    if not name.strip() or name in BUILTIN_CLUSTERS:
        raise WorkersError(
            f"{where} cannot have that name: use a name other than {' and '.join(BUILTIN_CLUSTERS)}"
        )
    kinds: dict[str, type] = {**REQUIRED, **OPTIONAL}
    if not isinstance(entry, dict) or not REQUIRED.keys() <= entry.keys() <= kinds.keys():
        raise WorkersError(
            f"{where} must have {', '.join(REQUIRED)} and may have {', '.join(OPTIONAL)}, nothing "
            "else"
        )
    for key, value in entry.items():
        if not isinstance(value, kinds[key]):
            raise WorkersError(f"{where}: {key} is {value!r}, and must be a {kinds[key].__name__}")
        # JSON can hold NUL and lone surrogates. File functions would refuse them later, without the
        # name of the entry.
        if isinstance(value, str) and any(
            letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value
        ):
            raise WorkersError(
                f"{where}: {key} is {value!r}: remove the characters that no file name can have"
            )
    lines = entry.get("path_map", [])
    if not all(isinstance(line, str) for line in lines):
        raise WorkersError(f'{where}: path_map is a list of lines like "/models -> /mnt/models"')
    try:
        ref = WorkersRef(
            count=1,
            address=entry["address"],
            token_file=entry.get("token_file", ""),
            paths=path_maps("\n".join(lines)),
            beyond_loopback=entry.get("remote_machines", False),
        )
        # `check_address` accepts the built-in addresses, but no entry may have one.
        host_and_port(ref.address)
        check_address(ref)
    except WorkersError as err:
        raise WorkersError(f"{where}: {err}") from err
    return ref

"""Servers for one batch: checks that they are distinct, run, and make the same video from a row.

All differences are found before anything is queued. A silent server is checked when it responds.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, combinations

from ...host.embedded import Prompt
from ...schema.text import format_count
from ..backend import class_faults
from ..errors import SetupError, UnreachableError, UnsuitableError
from ..rows.rows import Row, apply_row
from ..spec import BatchSpec
from .server_backend import ANY_FILE, ServerBackend, ServerReport

MAX_LINES = 8
"""Maximum number of missing files to list per server."""

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class UsedChoice:
    """A value that the rows use for an input with choices."""

    class_type: str
    name: str
    value: str | int | float

    def __str__(self) -> str:
        return f"{self.class_type}.{self.name} '{self.value}'"

    def on(self, report: ServerReport) -> bool:
        """Return True if a server offers this choice, or any value."""
        options = _options(report, self.class_type, self.name)
        return options is None or self.value in options


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirements for every server in a batch."""

    classes: Mapping[str, str]
    """Class by workflow node."""
    wanstream: str | None = None
    """This pack's version; None: the servers do not have it, or none responds."""
    url: str = ""
    """The server with this version."""
    choices: tuple[UsedChoice, ...] = ()
    instances: Mapping[str, str] = field(default_factory=dict)
    """Address of each responding server, by the id of its process."""

    def faults(self, report: ServerReport) -> list[str]:
        """Return why a server cannot run the batch, a line per reason."""
        missing = class_faults(self.classes, report.sockets)
        if missing:
            return [
                f"the workflow cannot run on {report.url} (ComfyUI {report.comfyui}):",
                *missing,
            ]
        faults = []
        twin = self.instances.get(report.instance or "", report.url)
        if twin != report.url:
            faults.append(f"{report.url} and {twin} are one server")
        if None not in {report.wanstream, self.wanstream} and report.wanstream != self.wanstream:
            faults += [
                f"{report.url} has WanStream {report.wanstream}, and {self.url} has "
                f"{self.wanstream}: install the same version on both"
            ]
        lacking = [choice for choice in self.choices if not choice.on(report)]
        if lacking:
            faults += [
                f"{report.url} lacks {format_count(len(lacking), 'choice')} of the rows that "
                "another server has: add what is missing, or leave this server out",
                *map(str, lacking[:MAX_LINES]),
            ]
        if len(lacking) > MAX_LINES:
            faults.append(f"and {len(lacking) - MAX_LINES} more")
        return faults


def _options(report: ServerReport, kind: str, name: str) -> Sequence[object] | None:
    """Return an input's choices on a server; None if it takes any value or any saved file."""
    described = report.sockets.get(kind, {}).get(name)
    if described is None or described.io_type != "COMBO" or ANY_FILE.get(kind) == name:
        return None
    options = described.options.get("options")
    return options if isinstance(options, list | tuple) else None


def endpoints(url: str) -> frozenset[tuple[str, int, str]]:
    """Return the addresses, ports and paths behind an URL.

    The name itself if it cannot be resolved.
    """
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _PORTS.get(parts.scheme, 0)
    try:
        found = {
            str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        found = {host}
    return frozenset((_plain(address), port, parts.path.rstrip("/")) for address in found)


def _plain(address: str) -> str:
    """Return an IPv4 address in IPv6 notation as IPv4."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def same_server(urls: Sequence[str], instances: Sequence[str | None]) -> bool:
    """Return True if two servers are one, by their process ids or by their URLs."""
    if all(instances):
        return instances[0] == instances[1]
    first, second = map(endpoints, urls)
    return not first.isdisjoint(second)


def _report(backend: ServerBackend) -> ServerReport | UnreachableError:
    try:
        return backend.describe()
    except UnreachableError as err:
        return err


def _check_distinct(
    found: Sequence[tuple[str, ServerBackend, ServerReport | UnreachableError]],
) -> None:
    """Raise SetupError for a duplicate server."""
    for (first, one, a), (second, two, b) in combinations(found, 2):
        # Instead of a report, there may be an UnreachableError without `instance`.
        instances = [getattr(each, "instance", None) for each in (a, b)]
        # Ids are not enough: one address may have several, behind a proxy that chooses a server for
        # each request.
        if one.address == two.address or same_server([first, second], instances):
            raise SetupError(
                f"--server {first} and --server {second} are one server: give each server once"
            )


def _requirements(
    workflow: Prompt, reports: Sequence[ServerReport], prompts: Iterable[Prompt] = ()
) -> Requirements:
    """Return the first server's version, and the choices in these prompts that any server offers.

    Raises UnsuitableError for servers without them, or without nodes in the workflow.
    """
    choices: dict[UsedChoice, None] = {}
    for node in chain.from_iterable(prompt.values() for prompt in prompts):
        kind = node.get("class_type", "")
        for name, value in node.get("inputs", {}).items():
            if isinstance(value, str | int | float) and any(
                _options(report, kind, name) is not None for report in reports
            ):
                choices[UsedChoice(class_type=kind, name=name, value=value)] = None
    first = next((report for report in reports if report.wanstream is not None), reports[0])
    needed = Requirements(
        classes={node: str(each.get("class_type")) for node, each in workflow.items()},
        wanstream=first.wanstream,
        url=first.url,
        choices=tuple(choice for choice in choices if any(map(choice.on, reports))),
        instances={each.instance: each.url for each in reports if each.instance is not None},
    )
    faults = [*chain.from_iterable(map(needed.faults, reports))]
    if faults:
        raise UnsuitableError("\n".join(faults))
    return needed


def _version_notes(reports: Iterable[ServerReport]) -> list[str]:
    versions = {report.comfyui: report.url for report in reports}
    if len(versions) == 1:
        return []
    listed = ", ".join(f"{version} at {url}" for version, url in versions.items())
    return [
        f"the servers have different versions of ComfyUI, with which videos may differ: {listed}"
    ]


def server_spec(
    urls: Sequence[str], rows: Sequence[Row], workflow: Prompt, lanes: int
) -> BatchSpec:
    """Return a batch for distinct servers that have everything the rows need.

    At least one has to respond. Responding ones are the first backends. The others are checked for
    the same later, as all are after an outage.

    Raises ValueError.
    """
    backends = [ServerBackend(url) for url in urls]
    if len(backends) == 1:
        backends[0].connect(workflow)
        return BatchSpec.checked(rows, workflow, backends, lanes)
    # Side by side: a silent one costs some seconds.
    with ThreadPoolExecutor(len(backends)) as pool:
        found = [*pool.map(_report, backends)]
    _check_distinct([*zip(urls, backends, found, strict=True)])
    reports = [each for each in found if isinstance(each, ServerReport)]
    answers = zip(backends, found, strict=True)
    silent = {backend: each for backend, each in answers if isinstance(each, UnreachableError)}
    errors = [*map(str, silent.values())]
    if not reports:
        raise SetupError(
            "\n".join(["none of the servers responds; is ComfyUI running there?", *errors])
        )
    _requirements(workflow, reports)
    # The first backend checks the rows, so it must respond.
    backends.sort(key=lambda backend: backend in silent)
    spec = BatchSpec.checked(rows, workflow, backends, lanes)
    usable = [row for row in spec.rows if row.fault is None]
    needed = _requirements(
        workflow, reports, [apply_row(workflow, row, spec.sockets) for row in usable]
    )
    for backend in backends:
        backend.faults_of_server = needed.faults
    notes = [f"{error}; it gets rows when it responds" for error in errors]
    return replace(
        spec,
        silent=frozenset(backend.name for backend in silent),
        notes=(*notes, *_version_notes(reports)),
    )

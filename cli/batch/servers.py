"""Servers of one batch: the checks that they are different ones, run, and make the same video of a row.

All differences are found before anything is queued. A server that does not respond then is checked when it does.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations

from ...host.embedded import Prompt
from ...schema import format_count
from ..arguments import ArgumentError
from ..inputs import Sockets
from .backend import UnreachableError, UnsuitableError, class_faults
from .server_backend import ANY_FILE, ServerBackend, ServerReport

MAX_LINES = 8
"""Maximum number of missing files that a message lists for a server."""

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A value that the rows use for an input with choices."""

    class_type: str
    name: str
    value: str | int | float


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Properties that every server of a batch needs."""

    classes: Mapping[str, str]
    """Class by node of the workflow."""
    wanstream: str | None = None
    """Version of this pack; None: the servers do not have it, or none responds."""
    url: str = ""
    """The server with that version."""
    choices: tuple[Choice, ...] = ()
    instances: Mapping[str, str] = field(default_factory=dict)
    """Address by id of the process of each server that responds."""

    def faults(self, report: ServerReport) -> list[str]:
        """Return the reasons why a server cannot run the batch, a line each."""
        if missing := class_faults(self.classes, report.sockets):
            return [f"the workflow cannot run on {report.url} (ComfyUI {report.comfyui}):", *missing]
        faults = []
        twin = self.instances.get(report.instance or "", report.url)
        if twin != report.url:
            faults.append(f"{report.url} and {twin} are one server")
        if None not in {report.wanstream, self.wanstream} and report.wanstream != self.wanstream:
            faults += [
                f"{report.url} has WanStream {report.wanstream}, and {self.url} has {self.wanstream}: install the same "
                "version on both"
            ]
        lacking = [choice for choice in self.choices if not has_choice(report.sockets, choice)]
        if lacking:
            faults += [
                f"{report.url} lacks {format_count(len(lacking), 'choice')} of the rows that another server has: add "
                "what is missing, or leave this server out",
                *_listed(lacking),
            ]
        return faults


def _listed(choices: Sequence[Choice]) -> list[str]:
    lines = [f"{choice.class_type}.{choice.name} '{choice.value}'" for choice in choices[:MAX_LINES]]
    return lines + ([f"and {len(choices) - MAX_LINES} more"] if len(choices) > MAX_LINES else [])


def has_choice(sockets: Sockets, choice: Choice) -> bool:
    """Return True if a server offers this choice, or any value."""
    options = _options(sockets, choice.class_type, choice.name)
    return options is None or choice.value in options


def choices_of(prompts: Iterable[Prompt], sockets: Sockets) -> list[Choice]:
    """Return the choices that workflows use, without those of inputs that take any saved file."""
    found: dict[Choice, None] = {}
    for prompt in prompts:
        for node in prompt.values():
            kind = node.get("class_type", "")
            for name, value in node.get("inputs", {}).items():
                if isinstance(value, str | int | float) and _options(sockets, kind, name) is not None:
                    found[Choice(class_type=kind, name=name, value=value)] = None
    return [*found]


def _options(sockets: Sockets, kind: str, name: str) -> Sequence[object] | None:
    described = sockets.get(kind, {}).get(name)
    if described is None or described.io_type != "COMBO" or ANY_FILE.get(kind) == name:
        return None
    options = described.options.get("options")
    return options if isinstance(options, list | tuple) else None


def endpoints(url: str) -> frozenset[tuple[str, int, str]]:
    """Return the addresses, ports and paths that an URL stands for; the name itself if it cannot be resolved."""
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = {host}
    return frozenset((_plain(address), port, parts.path.rstrip("/")) for address in found)


def _plain(address: str) -> str:
    """Return an IPv4 address that is written as an IPv6 one as such."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def same_server(first: ServerReport | str, second: ServerReport | str) -> bool:
    """Return True for two reports, or URLs of servers that do not respond, of one server."""
    ids = [each.instance if isinstance(each, ServerReport) else None for each in (first, second)]
    if all(ids):
        return ids[0] == ids[1]
    urls = [each.url if isinstance(each, ServerReport) else each for each in (first, second)]
    return not endpoints(urls[0]).isdisjoint(endpoints(urls[1]))


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Servers of a batch, those that respond first, and notes for the user."""

    backends: tuple[ServerBackend, ...]
    silent: frozenset[str] = frozenset()
    """Names of those that do not respond."""
    reports: tuple[ServerReport, ...] = field(default=())
    notes: tuple[str, ...] = ()


def connect_all(urls: Sequence[str], workflow: Prompt) -> Servers:
    """Return the servers at these addresses. Raises ValueError for one that is given twice, or cannot run the workflow.

    At least one has to respond.
    """
    backends = [ServerBackend(url) for url in urls]
    if len(backends) == 1:
        backends[0].connect(workflow)
        return Servers(backends=tuple(backends))
    # Side by side: one that does not respond costs some seconds.
    with ThreadPoolExecutor(len(backends)) as pool:
        found = [*pool.map(_report, backends)]
    for (first, one, a), (second, two, b) in combinations(zip(urls, backends, found, strict=True), 2):
        # Ids are not enough: a proxy that chooses a server for each request has several at one address.
        if one.address == two.address or same_server(
            first if isinstance(a, Exception) else a, second if isinstance(b, Exception) else b
        ):
            raise ArgumentError(f"--server {first} and --server {second} are one server: give each server once")
    reports = [each for each in found if isinstance(each, ServerReport)]
    errors = [each for each in found if isinstance(each, Exception)]
    if not reports:
        raise ArgumentError("\n".join(["none of the servers responds; is ComfyUI running there?", *map(str, errors)]))
    needed = requirements(workflow, reports)
    if faults := [line for report in reports for line in needed.faults(report)]:
        raise UnsuitableError("\n".join(faults))
    versions = {report.comfyui: report.url for report in reports}
    notes = [f"{err}; it gets rows when it responds" for err in errors]
    if len(versions) > 1:
        listed = ", ".join(f"{version} at {url}" for version, url in versions.items())
        notes.append(f"the servers have different versions of ComfyUI, with which videos may differ: {listed}")
    pairs = sorted(zip(backends, found, strict=True), key=lambda pair: isinstance(pair[1], Exception))
    silent = frozenset(backend.name for backend, each in pairs if isinstance(each, Exception))
    return Servers(
        backends=tuple(backend for backend, _ in pairs), silent=silent, reports=tuple(reports), notes=tuple(notes)
    )


def requirements(workflow: Prompt, reports: Sequence[ServerReport], prompts: Iterable[Prompt] = ()) -> Requirements:
    """Return the requirements of these workflows: the version of the first server, and choices that any server has."""
    choices = {
        choice: None
        for report in reports
        for choice in choices_of(prompts, report.sockets)
        if any(has_choice(each.sockets, choice) for each in reports)
    }
    first = next((report for report in reports if report.wanstream is not None), reports[0])
    return Requirements(
        classes={node: str(each.get("class_type")) for node, each in workflow.items()},
        wanstream=first.wanstream,
        url=first.url,
        choices=tuple(choices),
        instances={report.instance: report.url for report in reports if report.instance is not None},
    )


def require(servers: Servers, workflow: Prompt, prompts: Sequence[Prompt]) -> None:
    """Check that the servers have the files of all rows, now and after each outage. Raises UnsuitableError."""
    needed = requirements(workflow, servers.reports, prompts)
    if faults := [line for report in servers.reports for line in needed.faults(report)]:
        raise UnsuitableError("\n".join(faults))
    for backend in servers.backends:
        backend.faults_of_server = needed.faults


def _report(backend: ServerBackend) -> ServerReport | UnreachableError:
    try:
        return backend.describe()
    except UnreachableError as err:
        return err

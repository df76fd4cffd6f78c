"""Wires between workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wanstream.plan import Machine
from wanstream.plan.gpus import expected_machine
from wanstream.plan.links import LINKS, UnknownLinkError, expected_links, known_links


def test_every_figure_says_where_it_is_from() -> None:
    for name, links in LINKS.items():
        assert known_links(name) is links
        assert "assumed" in links.origin
        assert links.peer_bytes_per_s >= 1e9
    assert LINKS["nvlink"].peer_bytes_per_s > 10 * LINKS["pcie4"].peer_bytes_per_s
    assert LINKS["pcie5"].peer_bytes_per_s == pytest.approx(2 * LINKS["pcie4"].peer_bytes_per_s)
    assert [name for name, links in LINKS.items() if links.shares_bus] == ["pcie4", "pcie5"]


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownLinkError, match="no figures for links 'pcie3'; there are some for pcie4, pcie5, nvlink"):
        known_links("pcie3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peer_bytes_per_s": 0.0}, "peer_bytes_per_s of NVLink 4 is 0.0, it must be a number above 0"),
        ({"network_bytes_per_s": float("inf")}, "network_bytes_per_s of NVLink 4 is inf"),
        ({"ram_bytes_per_s": float("nan")}, "ram_bytes_per_s of NVLink 4 is nan"),
        ({"workers_per_machine": 0}, "workers_per_machine is 0, it must be 1 or more"),
        ({"latency_s": -1.0}, "latency_s is -1.0, it must be 0 or more"),
    ],
)
def test_figures_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LINKS["nvlink"], **changes)


def test_links_are_expected_of_the_bus_that_was_found(rate_cpu: Callable[..., Machine]) -> None:
    card = expected_machine("RTX 5090", ram_bytes=10**11, disk_bytes_per_s=1e9)
    found = expected_links(card, workers_per_machine=2)
    assert found.workers_per_machine == 2
    assert found.shares_bus
    assert found.peer_bytes_per_s == pytest.approx(LINKS["pcie5"].peer_bytes_per_s)
    assert found.ram_bytes_per_s == LINKS["pcie5"].ram_bytes_per_s
    assert expected_links(replace(card, h2d_bytes_per_s=12e9), workers_per_machine=4).peer_bytes_per_s == 6e9
    assert expected_links(rate_cpu(), workers_per_machine=3) == replace(LINKS["loopback"], workers_per_machine=3)

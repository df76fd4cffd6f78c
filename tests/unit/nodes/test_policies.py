"""Outputs of the policy nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanstream.nodes.offload import (
    WanStreamAutoOffload,
    WanStreamBlockSwap,
    WanStreamLayerwise,
    policy_node,
)
from wanstream.plan import AutoOffload, Budgets
from wanstream.schema import OffloadPolicy

FILE, RAM = {"weights_source": "disk"}, {"weights_source": "RAM"}


def _policy(node: Any, **inputs: Any) -> Any:
    (policy,) = node.execute(**inputs).args
    return policy


@pytest.mark.parametrize(
    ("given", "source", "ram_blocks", "chunk_tokens"),
    [
        (FILE, "file", None, None),  # as in workflows saved before the later inputs existed
        (RAM, "pinned", None, None),
        ({**RAM, "ram_blocks": 80, "chunk_tokens": 0}, "pinned", None, None),
        ({**RAM, "ram_blocks": 79}, "pinned", 79, None),
        ({**RAM, "ram_blocks": 0}, "pinned", 0, None),
        ({**FILE, "ram_blocks": 12}, "file", None, None),
        ({**FILE, "chunk_tokens": 8192}, "file", None, 8192),
        ({**RAM, "ram_blocks": 12, "chunk_tokens": 1024}, "pinned", 12, 1024),
    ],
)
def test_what_is_said_about_ram_and_tokens(
    given: dict[str, Any], source: str, ram_blocks: int | None, chunk_tokens: int | None
) -> None:
    for policy, kind in (
        (_policy(WanStreamLayerwise, prefetch_blocks=2, **given), "layerwise"),
        (_policy(WanStreamBlockSwap, blocks_to_swap=3, prefetch_blocks=2, **given), "block_swap"),
    ):
        assert (policy.kind, policy.prefetch_blocks, policy.blocks_to_swap) == (
            kind,
            2,
            3 * (kind == "block_swap"),
        )
        assert (policy.source, policy.ram_blocks) == (source, ram_blocks)
        assert policy.chunk_tokens == chunk_tokens


def test_old_workflows_mean_what_they_meant() -> None:
    assert _policy(WanStreamLayerwise, prefetch_blocks=1, **FILE) == OffloadPolicy.layerwise(1)
    swap = _policy(WanStreamBlockSwap, blocks_to_swap=20, prefetch_blocks=1, **RAM)
    assert swap == OffloadPolicy.block_swap(20, 1, source="pinned")


@pytest.mark.parametrize(
    ("vram", "ram", "budgets"),
    [
        (0.0, 0.0, Budgets()),
        (8.0, 0.0, Budgets(vram_bytes=8 * 10**9)),
        (0.0, 24.5, Budgets(ram_bytes=24_500_000_000)),
        (1.5, 16.0, Budgets(vram_bytes=1_500_000_000, ram_bytes=16 * 10**9)),
    ],
)
def test_a_budget_of_0_leaves_it_to_the_planner(vram: float, ram: float, budgets: Budgets) -> None:
    found = _policy(WanStreamAutoOffload, vram_budget_gb=vram, ram_budget_gb=ram)
    assert found == AutoOffload(budgets=budgets)


@pytest.mark.parametrize(
    "policy",
    [
        OffloadPolicy.layerwise(2),
        replace(OffloadPolicy.layerwise(1, source="pinned"), ram_blocks=12, chunk_tokens=1024),
        OffloadPolicy.block_swap(3, 0),
        AutoOffload(),
        WanStreamAutoOffload.execute(vram_budget_gb=4.1, ram_budget_gb=0.0).args[0],
        AutoOffload(budgets=Budgets(vram_bytes=8 * 10**9, ram_bytes=24_500_000_000)),
    ],
)
def test_the_node_for_a_policy_makes_that_policy(policy: Any) -> None:
    nodes = (WanStreamLayerwise, WanStreamBlockSwap, WanStreamAutoOffload)
    found = policy_node(policy)
    assert found is not None
    (node,) = (each for each in nodes if each.define_schema().node_id == found["type"])
    assert _policy(node, **found["values"]) == policy
    assert found["values"].get("vram_budget_gb", 4.1) in (0.0, 4.1, 8.0), "as on the widget"
    assert policy_node(OffloadPolicy.resident()) is None, "no node keeps both experts"

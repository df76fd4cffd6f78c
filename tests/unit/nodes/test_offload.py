"""Outputs of the policy nodes."""

from dataclasses import replace

import pytest

from wanstream.nodes import offload
from wanstream.plan import AutoOffload, Budgets
from wanstream.schema import OffloadPolicy

RAM = {"weights_source": "RAM"}


def _policy(node, **inputs):
    (policy,) = node.execute(**inputs).args
    return policy


@pytest.mark.parametrize(
    ("given", "source", "ram_blocks", "chunk_tokens"),
    [
        # As in workflows saved before the later inputs existed.
        ({"weights_source": "disk"}, "file", None, None),
        ({**RAM, "ram_blocks": 80, "chunk_tokens": 0}, "pinned", None, None),
        ({**RAM, "ram_blocks": 79}, "pinned", 79, None),
        ({**RAM, "ram_blocks": 0}, "pinned", 0, None),
        ({**RAM, "ram_blocks": 12, "chunk_tokens": 1024}, "pinned", 12, 1024),
    ],
)
def test_ram_and_token_inputs(given, source, ram_blocks, chunk_tokens):
    more = {"ram_blocks": ram_blocks, "chunk_tokens": chunk_tokens}
    expected = replace(OffloadPolicy.layerwise(2, source=source), **more)
    assert _policy(offload.WanStreamLayerwise, prefetch_blocks=2, **given) == expected
    expected = replace(OffloadPolicy.block_swap(3, 2, source=source), **more)
    swap = _policy(offload.WanStreamBlockSwap, blocks_to_swap=3, prefetch_blocks=2, **given)
    assert swap == expected


def test_budget_of_0_leaves_it_to_the_planner():
    for vram, ram, budgets in (
        (0.0, 0.0, {}),
        (8.0, 0.0, {"vram_bytes": 8 * 10**9}),
        (1.5, 24.5, {"vram_bytes": 1_500_000_000, "ram_bytes": 24_500_000_000}),
    ):
        found = _policy(offload.WanStreamAutoOffload, vram_budget_gb=vram, ram_budget_gb=ram)
        assert found == AutoOffload(budgets=Budgets(**budgets))


@pytest.mark.parametrize(
    "policy",
    [
        OffloadPolicy.layerwise(2),
        replace(OffloadPolicy.layerwise(1, source="pinned"), ram_blocks=12, chunk_tokens=1024),
        OffloadPolicy.block_swap(3, 0),
        AutoOffload(),
        AutoOffload(budgets=Budgets(vram_bytes=4_100_000_000, ram_bytes=24_500_000_000)),
    ],
)
def test_node_for_a_policy_makes_that_policy(policy):
    nodes = (offload.WanStreamLayerwise, offload.WanStreamBlockSwap, offload.WanStreamAutoOffload)
    found = offload.policy_node(policy)
    (node,) = (each for each in nodes if each.define_schema().node_id == found["type"])
    assert _policy(node, **found["values"]) == policy
    assert found["values"].get("vram_budget_gb", 4.1) in (0.0, 4.1), "as on the widget"
    assert offload.policy_node(OffloadPolicy.resident()) is None, "no node keeps both experts"

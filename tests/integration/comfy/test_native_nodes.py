"""Native model loaders in a real ComfyUI: inputs as in the loaders there, and templates."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.comfy

TWINS = {
    "WanStreamLoadDiffusionModel": ("UNETLoader", ["policy", "share_visits"]),
    "WanStreamLoadCheckpoint": ("CheckpointLoaderSimple", ["policy", "share_visits"]),
    "WanStreamLoadCLIP": ("CLIPLoader", ["device", "policy"]),
    "WanStreamDualCLIP": ("DualCLIPLoader", ["device", "policy"]),
    "WanStreamTripleCLIP": ("TripleCLIPLoader", ["policy"]),
    "WanStreamQuadrupleCLIP": ("QuadrupleCLIPLoader", ["policy"]),
}


@pytest.mark.parametrize("name", TWINS)
def test_loaders_have_the_inputs_of_comfyuis(server, name):
    """A graph stays valid when the loader class is exchanged, as in each template of ComfyUI."""
    twin, optional = TWINS[name]
    shown = server.get("/object_info")
    own = shown[twin]
    ours = shown[name]
    assert [*ours["input"]["required"]] == [*own["input"]["required"]]
    assert [*ours["input"]["optional"]] == optional
    assert ours["output"] == own["output"]
    for choice in own["input"]["required"].keys() & {"type", "weight_dtype"}:
        assert _choices(ours, choice) == _choices(own, choice)


def test_the_loader_lists_the_files_that_it_reads(server):
    shown = server.get("/object_info")
    own, ours = (
        _choices(shown[name], "unet_name") for name in ("UNETLoader", "WanStreamLoadDiffusionModel")
    )
    readable = [name for name in own if name.endswith(".safetensors")]
    assert [name for name in ours if not name.endswith(".gguf")] == readable != []


def _choices(info: dict[str, Any], name: str) -> list[str]:
    """An input's choices in `/object_info`, where older nodes list them in place of the type."""
    kind, *options = info["input"]["required"][name]
    return list(kind if isinstance(kind, list) else options[0]["options"])

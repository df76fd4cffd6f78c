"""Loader of native models in a real ComfyUI: the schema of its own loader, and its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanstream.tools.comfyui import Server

pytestmark = pytest.mark.comfy

LOADED = """
from functools import partial
from installed_pack import load_pack

load_pack()
import comfy.sample, comfy.sd, torch
from native_families import FAMILIES, given_configuration
from wanstream.host.comfy import adapter
from wanstream.nodes.loaders import WanStreamLoadDiffusionModel, WanStreamStreamModel
from wanstream.plan import AutoOffload, OffloadPolicy

limits = {"smallest_block": 0, "smallest_model": 0}
adapter.load_native = partial(adapter.load_native, **limits)
adapter.stream_model = partial(adapter.stream_model, **limits)
family, folder = FAMILIES["flux"], arguments[0]
folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [folder]
family.write(f"{folder}/flux1-dev.safetensors", "fp16")

def sampled(model):
    positive, negative = family.conditioning()
    latent = family.latent()
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(3))
    settings = (2, 3.0, "euler", "simple", positive, negative, latent)
    return comfy.sample.sample(model, noise, *settings, disable_pbar=True, seed=3)

def loaded(**policy):
    execute = WanStreamLoadDiffusionModel.execute
    return execute(unet_name="flux1-dev.safetensors", weight_dtype="default", **policy).args[0]

def streamed(**policy):
    return WanStreamStreamModel.execute(model=own, **policy).args[0]

def refusal(make):
    try:
        make(policy=OffloadPolicy.block_swap(99))
    except ValueError as err:
        return str(err)

with torch.inference_mode(), given_configuration(family):
    own = comfy.sd.load_diffusion_model(f"{folder}/flux1-dev.safetensors", model_options={})
    native = sampled(own)
    policies = {
        "none": {},
        "auto": {"policy": AutoOffload()},
        "swap": {"policy": OffloadPolicy.block_swap(5, prefetch_blocks=2)},
    }
    models = {
        f"{make.__name__}, {name}": make(**policy)
        for make in (loaded, streamed)
        for name, policy in policies.items()
    }
    answer = {
        "bytes": {name: model.model_size() for name, model in models.items()},  # of the policies: none is loaded yet
        "equal": {name: torch.equal(sampled(model), native) for name, model in models.items()},
        "blocks": {name: model.weights.block_counts["model"] for name, model in models.items()},
        "refusals": [refusal(make) for make in (loaded, streamed)],
    }
"""


def test_the_nodes_give_the_results_of_comfyuis_own_loader_and_refuse_a_wrong_policy_at_once(
    in_comfyui: Callable[..., Any], tmp_path: Path
) -> None:
    found = in_comfyui(LOADED, str(tmp_path))
    models = [f"{node}, {policy}" for node in ("loaded", "streamed") for policy in ("none", "auto", "swap")]
    assert found["equal"] == dict.fromkeys(models, True)
    (blocks,) = {*found["blocks"].values()}
    assert blocks > 5
    for node in ("loaded", "streamed"):
        none, auto, swap = (found["bytes"][f"{node}, {policy}"] for policy in ("none", "auto", "swap"))
        assert none == auto < swap
    for refusal in found["refusals"]:
        assert "blocks_to_swap is 99" in refusal
        assert f"only {blocks} blocks" in refusal


def test_inputs_choices_and_output_are_those_of_comfyuis_own_loader(server: Server) -> None:
    """So that a graph stays valid when the class of its loader is exchanged."""
    shown = server.get("/object_info")
    own, ours = shown["UNETLoader"], shown["WanStreamLoadDiffusionModel"]
    assert [*ours["input"]["required"]] == [*own["input"]["required"]]
    assert [*ours["input"]["optional"]] == ["policy"]
    assert ours["output"] == own["output"] == ["MODEL"]
    assert _choices(ours, "weight_dtype") == _choices(own, "weight_dtype")
    readable = [name for name in _choices(own, "unet_name") if name.endswith(".safetensors")]
    assert _choices(ours, "unet_name") == readable != []


def _choices(info: dict[str, Any], name: str) -> list[str]:
    """The choices of an input in `/object_info`: nodes of the older kind list them in the place of the type."""
    kind, *options = info["input"]["required"][name]
    return list(kind if isinstance(kind, list) else options[0]["options"])

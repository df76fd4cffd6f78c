"""Our experts in a ComfyUI that computes on a non-CUDA device.

The device is the checked one, with streams and without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

RUN = """
import comfy.model_management as mm
import torch
from installed_pack import load_pack
load_pack()
from pathlib import Path
from wanstream.devices.clock import DeviceError
from wanstream.host.comfy.adapter.comfy_host import ComfyHost
from wanstream.sampling import DenoiseRequest, denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.checked_device import checked_machine

high, low = map(Path, arguments)
ref = ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")
noise = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
text = torch.randn(1, 5, 4096, generator=torch.Generator().manual_seed(1))
mm.get_free_memory = lambda dev=None, torch_free_too=False: (2**33, 0) if torch_free_too else 2**33


def run(device):
    mm.get_torch_device = lambda: device
    host = ComfyHost()
    loaded = host.models.load_experts(ref, OffloadPolicy.layerwise(1), working_bytes=0)
    request = DenoiseRequest(noise, text, steps=4, switch_step=2, solver="euler")
    latents = denoise(
        loaded.pair, request, policy=loaded.policy, device=host.memory.device()
    ).latents.cpu()
    held = loaded.pair.loaded_bytes
    host.open_experts.free()
    mm.unload_all_models()
    return latents, held


expected, _ = run(torch.device("cpu"))
answer = {}
for streams in (True, False):
    with checked_machine(streams=streams) as machine:
        # As ComfyUI names a device: with an index, but "mps" without.
        latents, held = run(torch.device("checked", 0) if streams else torch.device("checked"))
        peak = machine.devices[0].peak_allocated
    answer[f"streams {streams}"] = [torch.equal(latents, expected), 0 < held <= peak]
try:
    run(torch.device("meta"))
except DeviceError as err:
    answer["refused"] = str(err)
"""


def test_experts_run_on_the_device_of_comfyui(
    in_comfyui: Callable[..., Any], tiny_expert_file: Callable[..., Path]
) -> None:
    high, low = (tiny_expert_file(seed=seed, layers=3, heads=1, ffn_dim=256) for seed in (1, 2))
    found = in_comfyui(RUN, str(high), str(low))
    assert found.pop("refused").startswith(
        "meta is not supported: use cpu or one of cuda, xpu, mps (ComfyUI: start it"
    )
    assert found == {"streams True": [True, True], "streams False": [True, True]}

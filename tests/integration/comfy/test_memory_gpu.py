"""Our experts and a native model on a real device, with ComfyUI's memory flags and dynamic VRAM."""

import pytest

from wanstream.tests.integration.comfy import servers
from wanstream.tests.support.host.shipped import node
from wanstream.tools.comfyui import running_server

pytestmark = [pytest.mark.gpu, pytest.mark.comfy, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = [
    (),
    ("--disable-dynamic-vram",),
    ("--highvram",),
    ("--lowvram",),
    ("--novram",),
    ("--disable-smart-memory",),
    ("--reserve-vram", "2"),
]
KEPT_BYTES = 64 * 2**20
"""Device bytes kept by libraries after first use."""

LARGE = {"width": 128, "height": 128, "length": 9}
NATIVE = servers.wan_item(native=True, seed=1, **LARGE)
SWAP = {"blocks_to_swap": 2, "prefetch_blocks": 1, "weights_source": "RAM"}


def _ours(seed):
    prompt = servers.wan_item(native=False, seed=seed, **LARGE)
    prompt["policy"] = node("WanStreamBlockSwap", **SWAP)
    prompt["sampler"]["inputs"]["policy"] = ["policy", 0]
    return prompt


def _latent(server):
    return server.run(_ours(1))["outputs"]["held"]["latent"]


def _taking(prompt, name, leave):
    """Take all but some device bytes before the sampler, whose latent input has this name."""
    taken = node("TestTakeDevice", leave=leave, latent=["latent", 0])
    sampler = prompt["sampler"]
    sampler = {**sampler, "inputs": {**sampler["inputs"], name: ["taken", 0]}}
    return {**prompt, "taken": taken, "sampler": sampler}


@pytest.fixture(scope="module")
def on_gpu(comfyui):
    """ComfyUI, if its Python finds a CUDA device."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    if not servers.python_runs(comfyui, code):
        pytest.skip("ComfyUI's Python finds no CUDA device")
    return comfyui


@pytest.fixture
def life(request, on_gpu, sample_models, tmp_path):
    """A server on the GPU with the parameter's flags, this pack and the test model."""
    base = servers.make_base(tmp_path / "base", "memory.py")
    (base / "models").symlink_to(sample_models, target_is_directory=True)
    with running_server(on_gpu, base, *request.param, cpu=False) as server:
        yield server


def _active(server):
    """Device memory bytes in torch tensors."""
    (device, *_) = server.get("/system_stats")["devices"]
    return int(device["torch_vram_total"] - device["torch_vram_free"])


@pytest.mark.parametrize(
    "life", FLAGS, indirect=True, ids=lambda flags: "_".join(flags) or "default"
)
def test_we_and_native_models_take_turns(life):
    first = _latent(life)
    life.run(NATIVE)
    assert _latent(life) == first
    servers.free_until(life, lambda: _active(life) <= KEPT_BYTES)
    assert "the experts are unloaded" in servers.said(life)
    assert _latent(life) == first


@pytest.mark.parametrize(
    "life", [(), ("--disable-dynamic-vram",)], indirect=True, ids=["dynamic", "legacy"]
)
def test_a_vae_that_finds_no_room_evicts_us(life):
    """Another allocation leaves one gigabyte, less than ComfyUI requires for computing."""
    first = _latent(life)
    before = servers.said(life).count("freed ")
    life.run(_taking(NATIVE, "latent_image", 2**30))
    assert servers.said(life).count("freed ") > before
    assert _latent(life) == first


@pytest.mark.parametrize("life", [()], indirect=True, ids=["default"])
def test_the_next_item_works_after_one_that_ran_out_of_memory(life):
    first = _latent(life)
    error = servers.error_of(life.wait(life.queue(_taking(_ours(2), "latent", 2**20))))
    assert "OutOfMemoryError" in error["exception_type"]
    assert _latent(life) == first

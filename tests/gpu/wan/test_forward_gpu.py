"""Streamed forward passes on a device, equal to the forward of the whole model there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from gguf import GGMLQuantizationType

from wanstream.block_kernels import INDUCTOR, Kernels
from wanstream.offload.formats.decode import decode_tensor
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.formats.quantise import FP8, quantise_rows, work_memory
from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.testing.quantised import q4_k_m, random_groups, save_expert_gguf
from wanstream.tests.support.rounding import difference
from wanstream.tests.support.sampling.runs import LAYERWISE, normal
from wanstream.tests.support.wan.opened_experts import FIRST_TIME, plain_velocity, streamed
from wanstream.tests.support.wan.quantised_files import round_to_fp8_rows
from wanstream.wan import Lane
from wanstream.wan.experts.open import open_experts, open_single_model
from wanstream.wan.image_encoder import clip_pixels, open_image_encoder

COMPUTED = pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16])
SOURCES = pytest.mark.parametrize("source", ["file", "pinned"])


def lane_on(gpu, *latents, text=5, **parts):
    shape = latents or (1, 16, 2, 4, 6)
    on_device = [normal(*each, seed=1).to(gpu.device) for each in (shape, (1, text, 4096))]
    return Lane(latents=on_device[0], text=on_device[1], **parts)


def streamed_on(gpu, pair, lane, **policy):
    """Return the velocity from the high-noise expert, with layerwise streaming."""
    policy = replace(LAYERWISE, **policy)
    return streamed(pair, policy, lane, device=gpu.device)[0]


@pytest.mark.parametrize("kernels", [Kernels(), Kernels(compiler=INDUCTOR)], ids=str)
@pytest.mark.parametrize("chunk", [None, 64])
def test_timesteps_per_frame(gpu, kernels, chunk, tiny_expert_folder):
    if kernels.compiler is not None:
        gpu.need_kernels("torch.compile")
    folder = tiny_expert_folder(in_channels=48, layers=3)
    freedom = (0.0, 1.0, 1.0, 0.5)
    lane = lane_on(gpu, 1, 48, 4, 16, 16, timestep_scales=freedom)
    model = WanTransformer3DModel.from_pretrained(folder).requires_grad_(False)
    times = (torch.tensor(freedom) * FIRST_TIME).repeat_interleave(64)[None]
    with open_single_model(folder, compute_dtype=torch.float32) as pair:
        pair.kernels = kernels
        found = streamed_on(gpu, pair, lane, chunk_tokens=chunk)
    assert difference(found, plain_velocity(model.to(gpu.device), lane, times)) < 1e-3


@pytest.mark.parametrize("chunk", [None, 256])
def test_an_image_branch(gpu, chunk, tiny_expert_folder):
    folder = tiny_expert_folder(in_channels=36, image_dim=80)
    lane = lane_on(gpu, 1, 36, 3, 16, 24, text=512, image=normal(1, 17, 80, seed=3).to(gpu.device))
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    with open_single_model(folder) as pair:
        found = streamed_on(gpu, pair, lane, chunk_tokens=chunk)
    assert difference(found.float(), plain_velocity(model.to(gpu.device), lane).float()) < 1e-2


def check_streamed(gpu, path, model, source="file", **how):
    """Compare two runs with the whole model to the bit."""
    lane = lane_on(gpu)
    with open_experts(path, path, compute_dtype=torch.float32, **how) as pair:
        pair.kernels = Kernels(math="exact")
        for _ in range(2):
            found = streamed_on(gpu, pair, lane, source=source)
        assert torch.equal(found, plain_velocity(model.to(gpu.device), lane))
        assert pair.loaded_bytes <= pair.device_bytes(replace(LAYERWISE, source=source))


@pytest.mark.parametrize("layout", ["scaled_fp8", "comfy_quant"])
def test_fp8_files(gpu, layout, tiny_expert_file, make_tiny_expert):
    path = tiny_expert_file(fp8=layout, dtype=torch.float16)
    check_streamed(gpu, path, make_tiny_expert(dequantised_from=torch.float16))


@SOURCES
def test_fp8_storage(gpu, source, tiny_expert_file, make_tiny_expert):
    # On the CPU: a GPU divides by a number by multiplying with its reciprocal.
    model = round_to_fp8_rows(make_tiny_expert())
    check_streamed(gpu, tiny_expert_file(), model, source, storage="fp8")


@SOURCES
def test_gguf_files(gpu, source, make_tiny_expert, tmp_path):
    path = tmp_path / "expert.gguf"
    check_streamed(gpu, path, save_expert_gguf(make_tiny_expert(), path, types=q4_k_m), source)


@COMPUTED
def test_fp8_rows_have_the_bits_of_the_cpu(gpu, computed):
    values = torch.randn(700, 5120).bfloat16()
    scales = torch.empty(700, 1)
    stored = torch.empty(values.shape, dtype=FP8)
    quantise_rows(values, stored, scales, work_memory(5120))
    on_cpu = torch.empty(values.shape, dtype=computed)
    on_gpu = torch.empty_like(on_cpu, device=gpu.device)
    decode_tensor(stored, on_cpu, scale=scales)
    decode_tensor(stored.to(gpu.device), on_gpu, scale=scales.to(gpu.device))
    assert torch.equal(on_gpu.cpu(), on_cpu)


def groups_of(name: str) -> torch.Tensor:
    kind = GGMLQuantizationType[name]
    return torch.from_numpy(random_groups(kind, 40_000, np.random.default_rng(0), scale=0.01))


@COMPUTED
@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_gguf_groups_have_the_bits_of_the_cpu(gpu, name, computed):
    packing = QUANT_FORMATS[name]
    groups = groups_of(name)
    on_cpu = torch.empty(len(groups), packing.values, dtype=computed)
    on_gpu = torch.empty_like(on_cpu, device=gpu.device)
    decode_tensor(groups, on_cpu, packing=packing)
    decode_tensor(groups.to(gpu.device), on_gpu, packing=packing)
    assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_decoding_waits_for_nothing(gpu, name):
    """The stream is still busy with earlier work when the last chunk has been issued."""
    packing = QUANT_FORMATS[name]
    groups = groups_of(name).to(gpu.device)
    values = torch.empty(len(groups), packing.values, dtype=torch.bfloat16, device=gpu.device)
    decode_tensor(groups, values, packing=packing)  # kernels are loaded on their first use
    gpu.runtime.current_stream().synchronize()
    gpu.delay(500)
    before = gpu.runtime.event()
    before.record(gpu.runtime.current_stream())
    decode_tensor(groups, values, packing=packing)
    assert not before.query()


@pytest.mark.parametrize("failing", [2, 3, 5])
def test_embedder_stays_locked_until_its_copies_end(gpu, failing, tiny_expert_folder):
    device = gpu.need_fake("an allocation fails").devices[0]
    with open_single_model(tiny_expert_folder()) as pair:
        models = pair.engine(LAYERWISE, gpu.device).models
        models["high"]
        gpu.delay()
        device.fail_at = device.allocations + failing
        with pytest.raises(torch.OutOfMemoryError):
            models.bare["high"].condition_embedder.time_rows([FIRST_TIME])


def test_the_image_encoder(gpu, tmp_path):
    encoder = make_image_encoder(seed=1, image_size=28)
    images = torch.rand(1, 40, 56, 3)
    save_image_encoder(encoder, tmp_path / "clip.safetensors", dtype=torch.float32)
    opened = open_image_encoder(tmp_path / "clip.safetensors")
    seen = opened.encode(images, device=gpu.device).penultimate_hidden_states
    with torch.no_grad():
        states = encoder(pixel_values=clip_pixels(images, 28), output_hidden_states=True)
    assert seen.device.type == "cpu"
    assert difference(seen, states.hidden_states[-2]) < 1e-2

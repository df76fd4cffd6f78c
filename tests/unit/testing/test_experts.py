"""Sample experts: written weights equal to the generated ones in every format, model behaviour."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file


def velocity(model, *, latents_seed=0, timestep=900.0, text_seed=0):
    def normal(seed, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    latents = normal(latents_seed, 1, model.config.in_channels, 3, 8, 8)
    text = torch.cat([normal(100 + text_seed, 1, 12, 4096), torch.zeros(1, 500, 4096)], dim=1)
    with torch.no_grad():
        return model(latents, torch.tensor([timestep]), text, return_dict=False)[0]


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.slow  # writes whole models
@pytest.mark.parametrize("shape", [{}, {"in_channels": 36}, {"layers": 40, "heads": 1}], ids=str)
def test_output_depends_on_every_input_and_block(make_tiny_expert, shape):
    model = make_tiny_expert(**shape)
    reference = velocity(model)

    assert reference.isfinite().all()
    assert 0.5 < reference.std() < 2.0
    assert difference(velocity(model, timestep=899.0), reference) > 0.05
    assert difference(velocity(model, text_seed=1), reference) > 0.05
    assert difference(velocity(model, latents_seed=1), reference) > 0.05
    assert difference(velocity(make_tiny_expert(seed=1, **shape)), reference) > 0.5
    for block in (0, len(model.blocks) // 2, len(model.blocks) - 1):
        without = make_tiny_expert(**shape)
        without.blocks[block].ffn.net[2].weight.zero_()
        assert difference(velocity(without), reference) > 0.01


def test_seed_determines_the_weights(make_tiny_expert):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (make_tiny_expert(seed=3).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


HALF = (torch.float16, 4, "model.diffusion_model.")
CASES = [(torch.float32, 1, ""), HALF, (torch.bfloat16, 1, "")]


@pytest.mark.parametrize(("dtype", "shards", "prefix"), CASES, ids=str)
def test_folders_and_files_have_the_made_weights(
    tiny_expert_folder, tiny_expert_file, make_tiny_expert, dtype, shards, prefix
):
    expected = make_tiny_expert().state_dict()
    folder = tiny_expert_folder(dtype=dtype, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) >= shards
    assert (folder / "diffusion_pytorch_model.safetensors.index.json").exists() == (shards > 1)
    for name, tensor in WanTransformer3DModel.from_pretrained(folder).state_dict().items():
        assert torch.equal(tensor, expected[name].to(dtype).float()), name
    tensors = load_file(tiny_expert_file(dtype=dtype, prefix=prefix))
    assert all(name.startswith(prefix) for name in tensors)
    converted = convert_wan_transformer_to_diffusers(tensors)
    assert converted.keys() == expected.keys()
    for name, tensor in converted.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name].to(dtype)), name


@pytest.fixture(scope="module")
def dequantised(make_tiny_expert):
    return make_tiny_expert(dequantised_from=torch.float16).state_dict()


def test_fp8_file_is_the_dequantised_model(tiny_expert_file, dequantised, fp8_layout):
    path = tiny_expert_file(dtype=torch.float16, fp8=fp8_layout)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        marked = "_quantization_metadata" in file.metadata()
    marked |= "scaled_fp8" in tensors or any(name.endswith(".comfy_quant") for name in tensors)
    assert marked

    extra = (".scale_weight", ".weight_scale", ".scale_input", ".comfy_quant", "scaled_fp8")
    stored = {name: tensor for name, tensor in tensors.items() if not name.endswith(extra)}
    for name, tensor in stored.items():
        linear = name.startswith("blocks.") and tensor.ndim == 2
        assert tensor.dtype == (torch.float8_e4m3fn if linear else torch.float16), name
        layer = name.removesuffix(".weight")
        scale = tensors.get(f"{layer}.scale_weight", tensors.get(f"{layer}.weight_scale"))
        stored[name] = tensor.float() if scale is None else tensor.float() * scale

    for name, tensor in convert_wan_transformer_to_diffusers(stored).items():
        assert torch.equal(tensor, dequantised[name]), name


def test_fp8_is_a_visible_but_small_error(make_tiny_expert):
    rounded = velocity(make_tiny_expert(dequantised_from=torch.float32))
    assert 1e-3 < difference(rounded, velocity(make_tiny_expert())) < 0.1

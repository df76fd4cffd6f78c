"""Single models in every file format: detection, streamed forwards, predicted memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from wanstream.block_kernels import Kernels
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.testing.quantised import save_expert_gguf
from wanstream.tests.support.quantised_files import matrices
from wanstream.wan import ExpertPair, Lane, forward_lanes
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.meta_model import embedder_part
from wanstream.wan.experts.open import ExpertsRegistry, open_experts, open_single_model
from wanstream.wan.lora.file import open_lora

IMAGE = {"in_channels": 36, "image_dim": 80}
MODELS: dict[str, dict[str, int]] = {
    "T2V": {},
    "T2V of 3 heads": {"heads": 3, "layers": 3},
    "I2V": IMAGE,
}
EACH = pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
POLICY = OffloadPolicy.block_swap(2, 1)

Folder = Callable[..., Path]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _lane(pair: ExpertPair) -> Lane:
    image = (
        None
        if pair.high.config.image_dim is None
        else _normal(1, 17, pair.high.config.image_dim, seed=3)
    )
    # diffusers treats all rows before the last 512 as the image.
    text = _normal(1, 7 if image is None else 512, 4096, seed=2)
    return Lane(
        latents=_normal(1, pair.high.config.in_channels, 2, 4, 6, seed=1), text=text, image=image
    )


def _streamed(pair: ExpertPair, lane: Lane, policy: OffloadPolicy = POLICY) -> torch.Tensor:
    engine = pair.engine(policy, "cpu")
    with torch.inference_mode(), engine.run(step_visits(["high"] * 2, engine.block_counts)) as run:
        for step in range(2):
            (velocity,) = forward_lanes(
                engine.models["high"],
                [lane],
                torch.tensor([937.5]),
                lambda block, at=step: run.visit(at, "high", block),
            )
    return velocity


def _reference(model: WanTransformer3DModel, lane: Lane) -> torch.Tensor:
    dtype = model.patch_embedding.weight.dtype
    image = None if lane.image is None else lane.image.to(dtype)
    with torch.inference_mode():
        velocity: torch.Tensor = model(
            lane.latents.to(dtype),
            torch.tensor([937.5]),
            lane.text.to(dtype),
            image,
            return_dict=False,
        )[0]
    return velocity


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_diffusers_computes(
    shape: dict[str, int], dtype: torch.dtype, tiny_expert_folder: Folder
) -> None:
    model = WanTransformer3DModel.from_pretrained(
        tiny_expert_folder(**shape), torch_dtype=dtype
    ).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # aligned as our views are
    with open_single_model(tiny_expert_folder(**shape), compute_dtype=dtype) as pair:
        pair.kernels = Kernels(math="exact")
        lane = _lane(pair)
        assert torch.equal(_streamed(pair, lane), _reference(model, lane))


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        *(("native", shape) for shape in MODELS.values()),
        *((form, IMAGE) for form in ("prefixed", "fp8", "gguf")),
        *((form, {}) for form in ("gguf", "pipeline", "shards")),
    ],
)
def test_it_is_known_in_every_form(
    shape: dict[str, int],
    form: str,
    tiny_expert_file: Folder,
    tiny_expert_folder: Folder,
    tmp_path: Path,
) -> None:
    """Detect the model by its tensors. An exact file gives the same bits as the folder."""
    if form == "gguf":
        path = tmp_path / "wan.gguf"
        save_expert_gguf(
            WanTransformer3DModel.from_pretrained(tiny_expert_folder(**shape)),
            path,
            types=matrices("F32"),
        )
    elif form == "pipeline":
        path = tmp_path / "pipeline"
        path.mkdir()
        (path / "transformer").symlink_to(tiny_expert_folder(**shape))
    elif form == "shards":
        path = tiny_expert_folder(**shape, shards=3)
    elif form == "prefixed":
        path = tiny_expert_file(**shape, prefix="model.diffusion_model.")
    else:
        path = tiny_expert_file(**shape, fp8="scaled_fp8" if form == "fp8" else None)
    folder = open_single_model(tiny_expert_folder(**shape), compute_dtype=torch.float32)
    with folder, open_single_model(path, compute_dtype=torch.float32) as pair:
        assert pair.is_single
        assert pair.experts == {"high": pair.high}
        assert pair.high.config == folder.high.config
        assert pair.high.config.image_dim == shape.get("image_dim")
        lane = _lane(pair)
        found, expected = _streamed(pair, lane), _streamed(folder, lane)
        if form == "fp8":
            assert 0 < (found - expected).norm() / expected.norm() < 0.2
        else:
            assert torch.equal(found, expected)


@EACH
def test_memory_is_that_of_one(shape: dict[str, int], tiny_expert_folder: Folder) -> None:
    folder = tiny_expert_folder(**shape)
    with open_single_model(folder, compute_dtype=torch.float32) as pair:
        predicted = pair.device_bytes(POLICY, device="cpu")
        engine = pair.engine(POLICY, "cpu")
        engine.allocate_buffers()
        assert list(engine.models) == ["high"]
        assert engine.models["high"] is not None  # loads the resident parameters
        assert pair.loaded_bytes == predicted


def test_a_pair_takes_twice_what_stays(tiny_expert_folder: Folder) -> None:
    folder = tiny_expert_folder()
    with open_single_model(folder) as one, open_experts(folder, folder) as two:
        assert two.device_bytes(OffloadPolicy.resident(), device="cpu") == 2 * one.device_bytes(
            OffloadPolicy.resident(), device="cpu"
        )
        assert two.host_resident_bytes == one.host_resident_bytes


def test_the_image_branch_stays_on_the_device(tiny_expert_folder: Folder) -> None:
    with open_single_model(tiny_expert_folder(**IMAGE)) as pair:
        branch = [name for name in pair.high.weights if ".image_embedder." in name]
        assert len(branch) == 8
        assert {embedder_part(name) for name in branch} == {None}
        assert embedder_part("condition_embedder.text_embedder.linear_1.weight") == "text"


def test_a_lora_changes_the_image_branch(tiny_expert_folder: Folder, tmp_path: Path) -> None:
    """A LoRA changes a streamed weight in a block and a resident one outside."""
    folder = tiny_expert_folder(**IMAGE)
    tensors = {
        "diffusion_model.blocks.1.cross_attn.v_img.lora_down.weight": _normal(4, 256, seed=5),
        "diffusion_model.blocks.1.cross_attn.v_img.lora_up.weight": _normal(256, 4, seed=6),
        "diffusion_model.img_emb.proj.3.diff": 0.1 * _normal(256, 80, seed=7),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    model = WanTransformer3DModel.from_pretrained(folder).requires_grad_(False)
    down, up, difference = tensors.values()
    model.blocks[1].attn2.add_v_proj.weight += up @ down
    model.condition_embedder.image_embedder.ff.net[2].weight += difference
    with open_single_model(folder, compute_dtype=torch.float32) as pair:
        lane = _lane(pair)
        before = _streamed(pair, lane)
        pair.set_loras(high=[(open_lora(tmp_path / "lora.safetensors"), 1.0)], low=[])
        found, expected = _streamed(pair, lane), _reference(model, lane)
        assert (found - expected).norm() / expected.norm() < 1e-5
        assert (before - expected).norm() / expected.norm() > 1e-3
        pair.set_loras(high=[], low=[])
        assert torch.equal(_streamed(pair, lane), before)


def test_a_ref_names_one_expert(tiny_expert_folder: Folder) -> None:
    registry = ExpertsRegistry()
    ref = ExpertsRef(high_noise=tiny_expert_folder(), single=True)
    pair = registry.get(ref)
    assert pair.is_single
    assert registry.get(ExpertsRef(high_noise=ref.high_noise, single=True)) is pair
    assert not registry.get(
        ExpertsRef(high_noise=ref.high_noise, low_noise=ref.high_noise)
    ).is_single
    registry.free()


def _without(source: Path, target: Path, *starts: str) -> Path:
    tensors = {
        key: tensor for key, tensor in load_file(source).items() if not key.startswith(starts)
    }
    save_file(tensors, target)
    return target


BLOCKS = tuple(
    f"blocks.{block}.cross_attn.{name}"
    for block in range(4)
    for name in ("k_img", "v_img", "norm_k_img")
)
MISSING = {
    "all of it": (
        ("img_emb.", *BLOCKS),
        r"has no image branch .*img_emb.proj.1.weight.* which Wan2.1 I2V needs",
    ),
    "the embedder": (("img_emb.",), r"natively img_emb.proj.1.weight\) is missing"),
    "a norm of it": (
        ("img_emb.proj.4.bias",),
        r"natively img_emb.proj.4.bias\) \[256\] is missing",
    ),
    "of the blocks": (
        BLOCKS,
        r"natively blocks.0.cross_attn.k_img.weight\) \[256, 256\] is missing, one of 20",
    ),
    "of one block": ((BLOCKS[3],), r"natively blocks.1.cross_attn.k_img.weight\) .* is missing"),
}


@pytest.mark.parametrize(("starts", "message"), MISSING.values(), ids=MISSING)
def test_an_image_branch_that_is_missing_is_told(
    starts: tuple[str, ...], message: str, tiny_expert_file: Folder, tmp_path: Path
) -> None:
    path = _without(tiny_expert_file(**IMAGE), tmp_path / "i2v.safetensors", *starts)
    with pytest.raises(CheckpointError, match=message):
        open_single_model(path)


def test_what_is_no_single_expert_is_refused(
    tiny_expert_folder: Folder, tiny_expert_file: Folder, tmp_path: Path
) -> None:
    for name in ("transformer", "transformer_2"):
        (tmp_path / name).symlink_to(tiny_expert_folder())
    with pytest.raises(CheckpointError, match="holds two transformers"):
        open_single_model(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_single_model(tmp_path / "nothing")
    image = tiny_expert_file(**IMAGE)
    with pytest.raises(CheckpointError, match=r"has an image branch, .* open it as a single model"):
        open_experts(image, image)
    for settings in ({"compute_dtype": torch.float64}, {"storage": "fp4"}):
        with pytest.raises(ValueError, match=r"compute_dtype is|storage is"):
            open_single_model(tiny_expert_folder(), **settings)  # type: ignore[arg-type]


def test_a_lora_for_late_steps_alone_is_refused(
    tiny_expert_folder: Folder, lora_file: Callable[..., Path]
) -> None:
    path: Any = lora_file()
    registry = ExpertsRegistry()
    ref = ExpertsRef(high_noise=tiny_expert_folder(), single=True, loras=(LoraRef(low_noise=path),))
    with pytest.raises(
        ValueError,
        match=r"is one expert, which runs every step: give .* as the LoRA of the high-noise",
    ):
        registry.get(ref)
    registry.free()

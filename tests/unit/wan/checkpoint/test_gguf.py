"""Experts in GGUF files: every layout, streamed against plain models with the decoded values."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from wanstream.offload.formats.decode import decode_tensor
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import read_tensors
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.quantised import q4_k_m, save_expert_gguf
from wanstream.tests.support.quantised_files import matrices
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.open import is_merged, open_expert
from wanstream.wan.experts.open import open_experts

PREFIX = "model.diffusion_model."
STEPS = ["high", "high", "low"]
TYPES = {
    **{name: matrices(name) for name in ("F32", "F16", "BF16", *QUANT_FORMATS)},
    "Q4_K_M": q4_k_m,
    "everything BF16": lambda name: "BF16",
    "Q8_0, others F16": matrices("Q8_0", others="F16"),
}


@pytest.fixture(scope="module")
def gguf_expert(tmp_path_factory, make_tiny_expert):
    """`gguf_expert(types="Q4_K_M", seed=0, ...)`: a path, and the fp32 model with its values."""

    @functools.cache
    def write(*, types="Q4_K_M", seed=0, in_channels=16, **how):
        path = tmp_path_factory.mktemp("gguf") / "expert.gguf"
        model = make_tiny_expert(seed=seed, in_channels=in_channels)
        return path, save_expert_gguf(model, path, types=TYPES[types], seed=seed, **how)

    return write


@pytest.fixture
def edited(gguf_expert, tmp_path):
    """`edited(changes, architecture="wan")`: a Q8_0 file with these tensors replaced.

    A tensor is an array, an array and its type, or None for none. Keys are native.
    """

    def write(changes=None, architecture="wan"):
        path = tmp_path / "edited.gguf"
        writer = GGUFWriter(path, architecture or "wan")
        if architecture is None:
            writer.kv_data[0].clear()
        shape = GGUFReader(gguf_expert(types="Q8_0")[0]).get_field(
            "comfy.gguf.orig_shape.patch_embedding.weight"
        )
        if "patch_embedding.weight" not in (changes or {}):
            writer.add_array("comfy.gguf.orig_shape.patch_embedding.weight", shape.contents())
        stored = {
            t.name: (np.array(t.data), t.tensor_type)
            for t in GGUFReader(gguf_expert(types="Q8_0")[0]).tensors
        }
        for name, tensor in {**stored, **(changes or {})}.items():
            if tensor is not None:
                array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
                writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="module")
def lane():
    generator = torch.Generator().manual_seed(0)
    return Lane(
        latents=torch.randn(1, 16, 2, 4, 6, generator=generator),
        text=torch.randn(1, 5, 4096, generator=generator),
    )


def held(expert):
    """Return an opened expert's parameters in fp32."""
    values = {}
    for name, stored in read_tensors(expert.weights).items():
        values[name] = torch.empty(expert.weights[name].shape)
        decode_tensor(stored, values[name], packing=expert.weights[name].packing)
    return values


def assert_holds(expert, model):
    values, expected = held(expert), model.state_dict()
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


def zeros(*shape):
    return np.zeros(shape, dtype=np.float32)


class TestOpened:
    @pytest.mark.parametrize("types", TYPES)
    def test_every_type_holds_what_the_package_says(self, gguf_expert, types):
        path, model = gguf_expert(types=types)
        expert = open_expert(path)
        assert_holds(expert, model)
        assert expert.scales == {}
        assert (expert.config.family, expert.config.num_layers, expert.config.ffn_dim) == (
            "t2v",
            4,
            512,
        )

    @pytest.mark.parametrize(("in_channels", "prefix"), [(16, ""), (36, PREFIX)])
    @pytest.mark.parametrize("patches", ["shape field", "five dimensions", "merged"])
    def test_every_way_to_write_five_dimensions(self, gguf_expert, patches, prefix, in_channels):
        path, model = gguf_expert(patches=patches, prefix=prefix, in_channels=in_channels)
        expert = open_expert(path)
        assert expert.weights["patch_embedding.weight"].shape == (256, in_channels, 1, 2, 2)
        assert_holds(expert, model)

    @pytest.mark.parametrize("architecture", ["wan", "pig", "cow", None])
    def test_architectures(self, edited, gguf_expert, architecture):
        assert_holds(open_expert(edited(architecture=architecture)), gguf_expert(types="Q8_0")[1])

    def test_leading_ones_may_be_gone(self, edited, gguf_expert):
        """ggml counts dimensions from the other end and so drops leading ones in files."""
        model = gguf_expert(types="Q8_0")[1]
        tables = {
            f"blocks.{i}.modulation": block.scale_shift_table
            for i, block in enumerate(model.blocks)
        }
        tables["head.modulation"] = model.scale_shift_table
        path = edited({name: table.detach().numpy()[0] for name, table in tables.items()})
        expert = open_expert(path)
        assert expert.weights["blocks.0.scale_shift_table"].shape == (1, 6, 256)
        assert_holds(expert, model)

    @pytest.mark.parametrize(
        "shape", [(256 * 16, 2, 2), (256, 16, 2, 2), (256, 64), (4096, 1, 2, 2), (256 * 64,)]
    )
    def test_merged_patch_embeddings(self, edited, gguf_expert, shape):
        model = gguf_expert(types="Q8_0")[1]
        weight = model.patch_embedding.weight.detach().numpy().reshape(shape)
        assert_holds(open_expert(edited({"patch_embedding.weight": weight})), model)

    @pytest.mark.parametrize(
        ("stored", "original", "merged"),
        [
            ((6, 5), (1, 6, 5), True),
            ((30,), (1, 6, 5), True),
            ((6, 5), (6, 5), True),
            ((5, 6), (6, 5), False),
            ((3, 10), (6, 5), False),
            ((6, 5, 1), (6, 5), True),
            ((4096, 1, 2, 2), (256, 16, 1, 2, 2), True),
            ((16, 256, 1, 2, 2), (256, 16, 1, 2, 2), False),
            ((2, 2, 16, 256), (256, 16, 1, 2, 2), False),
            ((256, 16, 4), (256, 16, 1, 2, 2), True),
            ((256, 16, 2), (256, 16, 1, 2, 2), False),
            ((256,), (256, 16), False),
            ((256, 16), (256,), False),
            ((), (1,), True),
            ((0, 3), (0, 3), True),
            ((0,), (0, 3), False),
            ((0, 5), (6, 5), False),
        ],
    )
    def test_merged_shapes(self, stored, original, merged):
        assert is_merged(stored, original) is merged


WRONG = [
    ({"head.head.weight": None}, r"proj_out.weight \(natively head.head.weight\) is missing"),
    ({"patch_embedding.weight": None}, "patch_embedding.weight is missing"),
    (
        {"patch_embedding.bias": None, "patch_embedding.weight": zeros(256, 64)},
        r"patch_embedding.weight is \[256, 64\]",
    ),
    ({"patch_embedding.weight": zeros(256, 63)}, r"patch_embedding.weight is \[256, 63\]; 5 sizes"),
    ({"patch_embedding.weight": zeros(64, 256)}, r"patch_embedding.weight is \[64, 256\]; 5 sizes"),
    ({"patch_embedding.weight": zeros(256, 24, 1, 2, 2)}, "24 channels"),
    ({"blocks.1.norm3.bias": zeros(255)}, r"blocks.1.norm3.bias is \[255\]; \[256\] is expected"),
    (
        {"blocks.1.ffn.0.weight": zeros(256, 512)},
        r"blocks.1.ffn.0.weight is \[256, 512\]; \[512, 256\] is expected",
    ),
    (
        {"blocks.1.modulation": zeros(5, 256)},
        r"blocks.1.modulation is \[5, 256\]; \[1, 6, 256\] is expected",
    ),
    (
        {"blocks.1.norm3.bias": np.zeros(256, dtype=np.int32)},
        "blocks.1.norm3.bias is torch.int32; weights are",
    ),
    ({"blocks.1.norm3.bias": np.zeros(256)}, "blocks.1.norm3.bias is torch.float64; weights are"),
    ({"img_emb.proj.0.weight": zeros(3)}, r"natively img_emb.proj.1.weight\) is missing"),
    ({"something.else": zeros(3)}, r"something.else \[3\] does not belong"),
    ({f"{PREFIX}head.head.bias": zeros(64)}, "head.head.bias means the same parameter"),
    (
        {
            "blocks.1.self_attn.q.weight": (
                np.zeros((256, 66), dtype=np.uint8),
                GGMLQuantizationType.IQ2_XXS,
            )
        },
        "blocks.1.self_attn.q.weight is stored as IQ2_XXS, which is not supported: use a file of "
        "F32, F16, BF16",
    ),
    (
        {
            "blocks.1.self_attn.q.weight": (
                np.zeros((256, 54), dtype=np.uint8),
                GGMLQuantizationType.TQ1_0,
            )
        },
        "blocks.1.self_attn.q.weight is stored as TQ1_0",
    ),
]


class TestRefused:
    @pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
    def test_wrong_tensors(self, edited, changes, message):
        path = edited(changes)
        with pytest.raises(ValueError, match=message) as error:
            open_expert(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize("architecture", ["llama", "flux", "hyvid", "Wan"])
    def test_other_architectures(self, edited, architecture):
        with pytest.raises(CheckpointError, match=f"is a GGUF of '{architecture}', not of 'wan'"):
            open_expert(edited(architecture=architecture))

    def test_truncated_file(self, gguf_expert, tmp_path):
        whole = gguf_expert()[0].read_bytes()
        (tmp_path / "expert.gguf").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(
            ValueError,
            match=rf"is truncated: has {len(whole) // 2} of \d+ bytes; download it again",
        ):
            open_expert(tmp_path / "expert.gguf")

    def test_safetensors_under_the_name_of_gguf(self, tiny_expert_file, tmp_path):
        (tmp_path / "expert.gguf").write_bytes(tiny_expert_file().read_bytes())
        with pytest.raises(ValueError, match="not a GGUF file but safetensors"):
            open_expert(tmp_path / "expert.gguf")

    def test_pairs_that_do_not_belong_together(self, gguf_expert):
        with pytest.raises(CheckpointError, match=r"is I2V, but the high-noise expert .* is T2V"):
            open_experts(gguf_expert()[0], gguf_expert(in_channels=36)[0])


def plain_velocities(models, lane, dtype):
    """Return whole models' velocities, step by step."""
    velocities = []
    for step, expert in enumerate(STEPS):
        model, timestep = models[expert], torch.tensor([990.0 - step])
        velocities.append(
            model(lane.latents.to(dtype), timestep, lane.text.to(dtype), return_dict=False)[0]
        )
    return velocities


def in_compute_dtype(model, dtype):
    """Convert as from_pretrained does, which keeps some parameters in fp32."""
    islands = set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not islands & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model


def streamed(pair, policy, lane, steps=STEPS):
    engine = pair.engine(policy, "cpu")
    velocities = []
    with torch.inference_mode(), engine.run(step_visits(steps, engine.block_counts)) as run:
        for step, expert in enumerate(steps):
            visit = lambda block, at=(step, expert): run.visit(*at, block)  # noqa: E731
            velocities += forward_lanes(
                engine.models[expert], [lane], torch.tensor([990.0 - step]), visit
            )
    return velocities


class TestStreamed:
    @pytest.mark.slow  # whole models
    @pytest.mark.usefixtures("exact_blocks")
    @pytest.mark.parametrize(
        "policy",
        [OffloadPolicy.layerwise(1), OffloadPolicy.block_swap(2, 1, source="pinned")],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_mixed_pair_equals_plain_models(
        self, gguf_expert, make_tiny_expert, tiny_expert_folder, lane, dtype, policy
    ):
        """High-noise expert in bf16, low-noise file with three packings and two plain types."""
        low, model = gguf_expert(seed=2)
        high = tiny_expert_folder(seed=1, dtype=torch.bfloat16)
        whole = make_tiny_expert(seed=1)
        for parameter in whole.parameters():
            parameter.data = parameter.data.bfloat16().float()
        models = {"high": whole, "low": make_tiny_expert(seed=2)}
        models["low"].load_state_dict(model.state_dict())
        expected = plain_velocities(
            {name: in_compute_dtype(m, dtype) for name, m in models.items()}, lane, dtype
        )
        with open_experts(high, low, compute_dtype=dtype) as pair:
            for _ in range(2):
                assert all(map(torch.equal, streamed(pair, policy, lane), expected))

    def test_device_memory_is_that_of_the_compute_dtype(self, gguf_expert, lane):
        policy, path = OffloadPolicy.layerwise(1), gguf_expert(types="Q4_K")[0]
        with open_experts(path, path, compute_dtype=torch.bfloat16) as pair:
            streamed(pair, policy, lane)
            planned = pair.device_bytes(policy, device="cpu")
            assert pair.loaded_bytes == planned

    def test_bytes_read_are_those_of_the_file(self, gguf_expert, lane):
        path = gguf_expert(types="Q4_K")[0]
        with open_experts(path, path) as pair:
            engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
            weights = pair.high.weights.values()
            matrix = next(tensor for tensor in weights if tensor.shape == (512, 256))
            assert matrix.nbytes == 512 * 144
            streamed(pair, OffloadPolicy.layerwise(1), lane, ["high", "low"])
            in_blocks = 4 * (8 * 256 * 256 + 2 * 256 * 512) // 256 * 144
            assert engine.models.non_block_bytes == 2 * (
                sum(tensor.nbytes for tensor in weights) - in_blocks
            )

    def test_a_file_that_changes_under_the_engine(self, make_tiny_expert, tmp_path, lane):
        path = tmp_path / "expert.gguf"
        save_expert_gguf(make_tiny_expert(), path, types=matrices("Q8_0"))
        with open_experts(path, path) as pair:
            engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
            assert all(
                math.prod(engine.models[name].proj_out.weight.shape) for name in ("high", "low")
            )
            assert pair.is_current()
            path.write_bytes(path.read_bytes() + bytes(32))
            assert not pair.is_current()
            with pytest.raises(SourceError, match="the file was changed after it was opened"):
                streamed(pair, OffloadPolicy.layerwise(1), lane)

    @pytest.mark.parametrize(("types", "same"), [("Q4_K_M", True), ("BF16", False)])
    def test_fp8_storage_changes_only_what_is_not_packed(self, gguf_expert, lane, types, same):
        path = gguf_expert(types=types)[0]
        with open_experts(path, path) as plain, open_experts(path, path, storage="fp8") as kept:
            assert (kept.block_bytes.stored == plain.block_bytes.stored) is same
            both = [streamed(pair, OffloadPolicy.layerwise(1), lane) for pair in (plain, kept)]
            assert all(map(torch.equal, *both)) is same

"""Opening of pairs and single models: registry, file formats, predicted memory, refused files."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from wanstream.block_kernels import Kernels
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.testing.quantised import save_expert_gguf
from wanstream.tests.support.rounding import distance
from wanstream.tests.support.sampling.runs import normal
from wanstream.tests.support.wan.opened_experts import (
    FIRST_TIME,
    RESIDENT,
    SWAP,
    assert_holds,
    plain_velocity,
    streamed,
    whole_model,
)
from wanstream.tests.support.wan.quantised_files import matrices
from wanstream.wan import ExpertPair, Lane, open_lora
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.meta_model import embedder_part
from wanstream.wan.experts.open import ExpertsRegistry, open_experts, open_pair, open_single_model


@pytest.fixture
def log():
    return []


@pytest.fixture
def registry(log):
    """A registry of stand-ins for open pairs."""

    def open_pair(ref):
        if ref.high_noise == Path("bad"):
            raise OSError("bad file")
        log.append(f"open {ref.high_noise}")
        return SimpleNamespace(
            ref=ref,
            is_current=lambda: ref.high_noise != Path("changing"),
            loras_are_current=lambda: True,
            close=lambda: log.append(f"close {ref.high_noise}"),
        )

    return ExpertsRegistry(open_pair)


def _ref(name: str, dtype: str = "bfloat16") -> ExpertsRef:
    return ExpertsRef(high_noise=Path(name), compute_dtype=dtype)


def test_replaced_files_are_opened_again(registry, log):
    registry.get(_ref("changing"))
    registry.get(_ref("changing"))
    assert log == ["open changing", "close changing", "open changing"]


A = _ref("a")


@pytest.mark.parametrize("other", [_ref("b"), _ref("a", "float32"), replace(A, storage="fp8")])
def test_another_pair_closes_the_former_one_first(registry, log, other):
    registry.get(_ref("a"))
    assert registry.get(other).ref == other
    assert log == ["open a", "close a", f"open {other.high_noise}"]


def test_storage_of_the_reference_is_used(tiny_expert_file):
    ref = ExpertsRef(high_noise=tiny_expert_file(), low_noise=tiny_expert_file())
    registry = ExpertsRegistry(open_pair)
    for storage in ("as stored", "fp8"):
        assert registry.get(replace(ref, storage=storage)).block_bytes.quantised_to == storage
    registry.free()


def test_free_and_failures_close_and_the_next_get_opens(registry, log):
    registry.free()
    registry.get(_ref("a"))
    registry.free()
    registry.free()
    registry.get(_ref("a"))
    assert log == ["open a", "close a", "open a"]
    with pytest.raises(OSError, match="bad file"):
        registry.get(_ref("bad"))
    registry.free()
    assert log[3:] == ["close a"]
    registry.get(_ref("a"))
    assert log[4:] == ["open a"]


def test_threads_open_one_pair(registry, log):
    barrier = threading.Barrier(8)

    def get(_: int) -> None:
        barrier.wait()
        registry.get(_ref("a"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(get, range(8)))
    assert log == ["open a"]


def test_missing_experts_are_refused(tiny_expert_file, tiny_expert_folder, tmp_path):
    for high in (tiny_expert_file(), tiny_expert_folder()):
        with pytest.raises(CheckpointError, match="is one expert: give the low-noise expert too"):
            open_experts(high)
    with pytest.raises((OSError, ValueError), match=r"absent.*does not exist"):
        open_experts(tmp_path / "absent")
    (tmp_path / "transformer").mkdir()
    with pytest.raises(CheckpointError, match="has no transformer_2"):
        open_experts(tmp_path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"in_channels": 36}, r"is I2V, but the high-noise expert .* is T2V"),
        ({"layers": 3}, "num_layers is 3 .* 4"),
        ({"heads": 1}, "heads is 1 .* 2"),
        ({"ffn_dim": 256}, "ffn_dim is 256"),
    ],
)
def test_unequal_experts_are_refused(tiny_expert_file, shape, message):
    with pytest.raises(CheckpointError, match=message):
        open_experts(tiny_expert_file(), tiny_expert_file(**shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_dtype": torch.float64}, "compute_dtype"),
        ({"compute_dtype": torch.int8}, "compute_dtype"),
        ({"storage": "int8"}, "storage is 'int8'; .* 'as stored' or 'fp8' or 'int8 ConvRot'"),
        (
            {"arithmetic": "x"},
            "arithmetic is 'x'; .* 'decoded' or 'as stored' or 'int8' or 'fp8'",
        ),
    ],
)
def test_other_options_are_refused(tiny_expert_file, options, message):
    with pytest.raises(ValueError, match=message):
        open_experts(tiny_expert_file(), tiny_expert_file(), **options)


T2V: dict[str, int] = {}
IMAGE = {"in_channels": 36, "image_dim": 80}
TI2V = {"in_channels": 48, "layers": 3}


def _lane(pair: ExpertPair) -> Lane:
    config = pair.high.config
    image = None if config.image_dim is None else normal(1, 17, config.image_dim, seed=3)
    # diffusers treats all rows before the last 512 as the image.
    text = normal(1, 7 if image is None else 512, 4096, seed=2)
    return Lane(latents=normal(1, config.in_channels, 2, 4, 6, seed=1), text=text, image=image)


def _velocity(pair: ExpertPair) -> torch.Tensor:
    """Return the velocity of the second step."""
    return streamed(pair, SWAP, _lane(pair), steps=["high", "high"])[1]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [({"heads": 3, "layers": 3}, torch.bfloat16), (IMAGE, torch.float32), (TI2V, torch.bfloat16)],
    ids=["T2V of 3 heads", "I2V", "TI2V-5B"],
)
def test_equals_diffusers(shape, dtype, tiny_expert_folder):
    folder = tiny_expert_folder(**shape)
    model = whole_model(folder, dtype)
    with open_single_model(folder, compute_dtype=dtype) as pair:
        pair.kernels = Kernels(math="exact")
        expected = plain_velocity(model, _lane(pair), FIRST_TIME - 1)
        assert torch.equal(_velocity(pair), expected)


@pytest.fixture
def in_form(tiny_expert_file, tiny_expert_folder, tmp_path):
    """`in_form(form, shape)`: a tiny model in this form."""

    def write(form: str, shape: dict[str, int]) -> Path:
        folder = tiny_expert_folder(**shape)
        if form == "gguf":
            model = WanTransformer3DModel.from_pretrained(folder)
            save_expert_gguf(model, tmp_path / "wan.gguf", types=matrices("F32"))
            return tmp_path / "wan.gguf"
        if form == "pipeline":
            (tmp_path / "transformer").symlink_to(folder)
            return tmp_path
        if form == "shards":
            return tiny_expert_folder(**shape, shards=3)
        prefix = "model.diffusion_model." if form == "prefixed" else ""
        return tiny_expert_file(**shape, prefix=prefix, fp8="scaled_fp8" if form == "fp8" else None)

    return write


FORMS = {"native": TI2V, "pipeline": T2V, "shards": TI2V}
FORMS |= dict.fromkeys(("prefixed", "fp8", "gguf"), IMAGE)


@pytest.mark.parametrize(("form", "shape"), FORMS.items(), ids=FORMS)
def test_every_form_is_known(shape, form, tiny_expert_folder, in_form):
    """Detect the model by tensors. An exact file has the values of the folder."""
    folder = open_single_model(tiny_expert_folder(**shape), compute_dtype=torch.float32)
    with folder, open_single_model(in_form(form, shape), compute_dtype=torch.float32) as pair:
        assert pair.is_single
        assert pair.experts == {"high": pair.high}
        config = pair.high.config
        assert config == folder.high.config
        assert config.image_dim == shape.get("image_dim")
        assert (config.family == "ti2v") == (shape is TI2V)
        if form != "fp8":
            assert_holds(pair.high, folder.high)


@pytest.mark.parametrize("shape", [T2V, IMAGE, TI2V], ids=["T2V", "I2V", "TI2V-5B"])
def test_memory_is_that_of_one(shape, tiny_expert_folder):
    with open_single_model(tiny_expert_folder(**shape), compute_dtype=torch.float32) as pair:
        predicted = pair.device_bytes(SWAP, device="cpu")
        engine = pair.engine(SWAP, "cpu")
        engine.allocate_buffers()
        assert list(engine.models) == ["high"]
        assert engine.models["high"] is not None  # loads the resident parameters
        assert pair.loaded_bytes == predicted


def test_pair_takes_twice_what_stays(tiny_expert_folder):
    folder = tiny_expert_folder()
    with open_single_model(folder) as one, open_experts(folder, folder) as two:
        single = one.device_bytes(RESIDENT, device="cpu")
        assert two.device_bytes(RESIDENT, device="cpu") == 2 * single
        assert two.host_resident_bytes == one.host_resident_bytes


def test_image_branch_stays_on_the_device(tiny_expert_folder):
    with open_single_model(tiny_expert_folder(**IMAGE)) as pair:
        branch = [name for name in pair.high.weights if ".image_embedder." in name]
        assert len(branch) == 8
        assert {embedder_part(name) for name in branch} == {None}
        assert embedder_part("condition_embedder.text_embedder.linear_1.weight") == "text"


def test_lora_changes_an_image_branch(tiny_expert_folder, tmp_path):
    folder = tiny_expert_folder(**IMAGE)
    layer = "diffusion_model.blocks.1.cross_attn.v_img"
    down = normal(4, 256, seed=5)
    up = normal(256, 4, seed=6)
    added = 0.1 * normal(256, 80, seed=7)
    tensors = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
    tensors["diffusion_model.img_emb.proj.3.diff"] = added
    save_file(tensors, tmp_path / "lora.safetensors")
    model = whole_model(folder)
    model.blocks[1].attn2.add_v_proj.weight += up @ down
    model.condition_embedder.image_embedder.ff.net[2].weight += added
    with open_single_model(folder, compute_dtype=torch.float32) as pair:
        before = _velocity(pair)
        pair.set_loras(high=[(open_lora(tmp_path / "lora.safetensors"), 1.0)], low=[])
        found = _velocity(pair)
        expected = plain_velocity(model, _lane(pair), FIRST_TIME - 1)
        assert distance(found, expected) < 1e-5
        assert distance(before, expected) > 1e-3
        pair.set_loras(high=[], low=[])
        assert torch.equal(_velocity(pair), before)


def test_ref_names_one_expert(tiny_expert_folder, lora_file):
    registry = ExpertsRegistry()
    path = tiny_expert_folder()
    pair = registry.get(ExpertsRef(high_noise=path, single=True))
    assert pair.is_single
    assert registry.get(ExpertsRef(high_noise=path, single=True)) is pair
    assert not registry.get(ExpertsRef(high_noise=path, low_noise=path)).is_single
    late = ExpertsRef(high_noise=path, single=True, loras=(LoraRef(low_noise=lora_file()),))
    said = "is one expert, which runs every step: give .* as the LoRA of the high-noise"
    with pytest.raises(ValueError, match=said):
        registry.get(late)
    registry.free()


IN_BLOCKS = ("k_img", "v_img", "norm_k_img")
BLOCKS = tuple(f"blocks.{n}.cross_attn.{name}" for n in range(4) for name in IN_BLOCKS)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (("img_emb.", *BLOCKS), "has no image branch .*img_emb.proj.1.weight.* Wan2.1 I2V needs"),
        (("img_emb.",), r"natively img_emb.proj.1.weight\) is missing"),
        (("img_emb.proj.4.bias",), r"natively img_emb.proj.4.bias\) \[256\] is missing"),
        (BLOCKS, r"blocks.0.cross_attn.k_img.weight\) \[256, 256\] is missing, one of 20"),
        ((BLOCKS[3],), r"natively blocks.1.cross_attn.k_img.weight\) .* is missing"),
    ],
)
def test_missing_part_of_an_image_branch_is_refused(starts, message, changed_expert):
    path = changed_expert(lambda all: {key: None for key in all if key.startswith(starts)}, **IMAGE)
    with pytest.raises(CheckpointError, match=message):
        open_single_model(path)


def test_no_single_model_is_refused(tiny_expert_folder, tmp_path):
    for name in ("transformer", "transformer_2"):
        (tmp_path / name).symlink_to(tiny_expert_folder())
    with pytest.raises(CheckpointError, match="holds two transformers"):
        open_single_model(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_single_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (IMAGE, "has an image branch, .* open it as a single model"),
        (TI2V, r"is Wan2.2 TI2V-5B \(48 channels\), .* open it as a single model"),
    ],
)
def test_single_model_in_a_pair_is_refused(shape, message, tiny_expert_file):
    ours = tiny_expert_file(**shape)
    other = tiny_expert_file()
    for pair in [(ours, ours)] if shape is IMAGE else [(ours, ours), (ours, other), (other, ours)]:
        with pytest.raises(CheckpointError, match=message):
            open_experts(*pair)


PINNED = OffloadPolicy.layerwise(1, source="pinned")


@pytest.fixture
def ref(tiny_expert_file, tmp_path):
    """Experts for tests to change."""
    high, low = (
        shutil.copy(tiny_expert_file(seed=seed), tmp_path / f"{seed}.safetensors")
        for seed in (1, 2)
    )
    return ExpertsRef(high_noise=high, low_noise=low)


@pytest.fixture
def lora(lora_file):
    return LoraRef(high_noise=lora_file(seed=3), low_noise=lora_file(seed=4))


@pytest.fixture
def opened():
    """The function of the registry `with_loras` that opens pairs."""
    return Mock(wraps=open_pair)


@pytest.fixture
def with_loras(opened):
    registry = ExpertsRegistry(opened)
    yield registry
    registry.free()


@pytest.fixture
def run(with_loras, lane):
    """`run(ref, *loras)` returns both experts' velocities for one step."""

    def run(ref, *loras):
        pair = with_loras.get(replace(ref, loras=loras))
        return torch.cat(streamed(pair, PINNED, lane, steps=("high", "low")))

    return run


def replace_file(path, other):
    shutil.copy(other, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def test_other_loras_open_no_other_pair(run, opened, ref, lora):
    plain = run(ref)
    weaker = replace(lora, strength_high=0.5)
    only_low = replace(lora, high_noise=None)
    stacks = ((lora,), (weaker,), (only_low,), (lora, weaker))
    results = [plain, *(run(ref, *each) for each in stacks)]
    for one, other in combinations(results, 2):
        assert not torch.equal(one, other)
    assert torch.equal(results[3][0], plain[0]), "the high-noise expert has no LoRA"
    assert torch.equal(run(ref), plain)
    opened.assert_called_once_with(ref)


def test_reopened_pair_and_replaced_lora_are_current(run, with_loras, opened, ref, lora):
    first = run(ref, lora)
    with_loras.free()
    assert torch.equal(run(ref, lora), first)
    replace_file(ref.high_noise, ref.high_noise)
    assert torch.equal(run(ref, lora), first)
    assert opened.call_count == 3
    expected = run(ref, replace(lora, high_noise=lora.low_noise))
    run(ref, lora)
    replace_file(lora.high_noise, lora.low_noise)
    assert torch.equal(run(ref, lora), expected)
    assert opened.call_count == 3


def test_unusable_lora_leaves_the_pair_as_it_was(run, opened, ref, lora):
    before = run(ref, lora)
    bad = lora.low_noise.with_name("bad.safetensors")
    bad.write_text("no LoRA")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad.safetensors: is not a safetensors file"):
            run(ref, lora, LoraRef(low_noise=bad))
    assert torch.equal(run(ref, lora), before)
    lora.low_noise.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        run(ref, lora)
    assert opened.call_count == 1

"""Prefixes, whole checkpoints, unused tensors: the bare file's values, refusals with a key."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wanstream.testing import TinyShape, make_expert, save_expert_folder
from wanstream.tests.support.quantised_files import save_shards
from wanstream.wan.checkpoint.files import INDEX, WEIGHTS, CheckpointError
from wanstream.wan.checkpoint.open import Expert, open_expert

from .test_checkpoint import dequantised

Tensors = dict[str, torch.Tensor]
Write = Callable[..., Path]
SMALL = {"layers": 1, "heads": 1, "ffn_dim": 128, "text_dim": 64}
LAYER = "blocks.0.self_attn.q"

PREFIXES = [
    *(
        "diffusion_model.",
        "model.",
        "net.",
        "video_model.",
        "model.model.",
        "transformer.",
        "unet.",
    ),
    *(
        "model.diffusion_model.",
        "module.",
        "module.model.diffusion_model.",
        "pipe.dit.",
        "high_noise_model.",
    ),
    *("model_ema.", "model_ema.diffusion_model.", "module.model_ema.module."),
]
WRAPPED = {
    "_orig_mod.": "_orig_mod.{}",
    "module._orig_mod.": "module._orig_mod.{}",
    "compiled blocks": "blocks.0._orig_mod.{}",
}
OTHERS = [
    *("model.model_sampling.sigmas", "v_pred", "model_ema.diffusion_model.blocks.0.ffn.0.weight"),
    *("vae.encoder.conv1.weight", "first_stage_model.decoder.middle.0.residual.0.gamma"),
    *("text_encoders.umt5xxl.shared.weight", "text_encoders.umt5xxl.blocks.0.ffn.0.weight"),
    *("cond_stage_model.shared.weight", "conditioner.embedders.0.model.patch_embedding.weight"),
]


@pytest.fixture
def changed(tiny_expert_file: Write, tmp_path: Path) -> Callable[..., tuple[Path, Expert]]:
    """`changed(rename, more={}, metadata=None, **file)`: a file, and the opened original.

    The file is a tiny one with other keys.
    """

    def write(
        rename: Callable[[str], str],
        more: Mapping[str, torch.Tensor] = {},
        layers: str = "",
        **file: object,
    ) -> tuple[Path, Expert]:
        source, path = tiny_expert_file(**SMALL, **file), tmp_path / "changed.safetensors"
        with safe_open(source, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
        if "_quantization_metadata" in metadata:
            named = json.loads(metadata["_quantization_metadata"])["layers"]
            metadata["_quantization_metadata"] = json.dumps(
                {"layers": {layers + name: f for name, f in named.items()}}
            )
        save_file(
            {rename(key): tensor for key, tensor in load_file(source).items()} | dict(more),
            path,
            metadata,
        )
        return path, open_expert(source)

    return write


def assert_equal(path: Path, original: Expert) -> Expert:
    expert = open_expert(path)
    values, expected = dequantised(expert), dequantised(original)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name
    assert expert.config == original.config
    return expert


@pytest.mark.parametrize(
    ("prefix", "fp8"), list(zip(PREFIXES, itertools.cycle([None, "scaled_fp8", "comfy_quant"])))
)
def test_any_prefix_of_a_whole_model(changed: Write, prefix: str, fp8: str | None) -> None:
    assert_equal(*changed(lambda key: prefix + key, fp8=fp8))


@pytest.mark.parametrize("layers", ["", "model.diffusion_model.", "diffusion_model.", "other."])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
def test_layers_in_the_header_may_have_another_prefix_than_the_keys(
    changed: Write, prefix: str, layers: str
) -> None:
    assert_equal(*changed(lambda key: prefix + key, layers=layers, fp8="metadata"))


@pytest.mark.parametrize("form", WRAPPED.values(), ids=WRAPPED)
def test_parts_of_wrapped_modules(changed: Write, form: str) -> None:
    start = form.removesuffix("{}") if form.startswith("blocks") else ""
    inner = start.replace("_orig_mod.", "")

    def rename(key: str) -> str:
        return form.format(key.removeprefix(inner)) if key.startswith(inner) else key

    assert_equal(*changed(rename, fp8="scaled_fp8"))


@pytest.mark.parametrize(
    ("outer", "marker"),
    [("", ""), ("", "model.diffusion_model."), ("module.", "model.diffusion_model.")],
)
def test_a_whole_checkpoint_gives_its_diffusion_model(
    changed: Write, outer: str, marker: str
) -> None:
    def rename(key: str) -> str:
        return outer + (marker if key == "scaled_fp8" else "model.diffusion_model.") + key

    others = {outer + key: torch.zeros(3, dtype=torch.int8) for key in OTHERS}
    expert = assert_equal(*changed(rename, others, fp8="scaled_fp8"))
    assert expert.notes == (
        "changed.safetensors: 9 tensors that this model does not use are ignored: "
        f"{', '.join(sorted(others)[:3])} and 6 more",
    )


@pytest.mark.parametrize("in_index", ["", "model.", "transformer."])
@pytest.mark.parametrize("in_shards", ["", "model.", "model.diffusion_model."])
def test_shards_and_their_index(tmp_path: Path, in_shards: str, in_index: str) -> None:
    model = make_expert(TinyShape(**SMALL), seed=0)
    save_shards(model, tmp_path / "plain", dtype=torch.float32, shards=3)
    folder = shutil.copytree(tmp_path / "plain", tmp_path / "prefixed")
    for shard in folder.glob("*.safetensors"):
        save_file({in_shards + key: tensor for key, tensor in load_file(shard).items()}, shard)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {in_index + key: shard for key, shard in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    assert_equal(folder, open_expert(tmp_path / "plain"))


UNUSED = {
    "blocks.0.cross_attn.norm_q_img.weight": (128,),
    "blocks.0.attn2.norm_added_q.weight": (128,),
    "blocks.0.cross_attn.norm_k_img.weight": (128,),
    "model_type.Wan2_2-T2V-A14B-HIGH": (1,),
    "__index_timestep_zero__": (0,),
    "__x0__": (0,),
    "freqs": (1024, 64),
    "freqs_cis": (4,),
    "rope.freqs_cos": (4, 4),
    "rotary_emb.inv_freq": (4,),
    "v_pred": (0,),
    "ztsnr": (0,),
    "edm_vpred.sigma_max": (1,),
    "model_sampling.sigmas": (1000,),
    "denoiser.sigmas": (1000,),
    "alphas_cumprod": (1000,),
    "model_ema.decay": (1,),
    "model_ema.blocks.0.ffn.0.weight": (2, 2),
    "model_ema.patch_embedding.weight": (2, 2),
}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    "names", [[name] for name in UNUSED] + [list(UNUSED)], ids=lambda names: names[-1]
)
def test_tensors_without_a_use_are_ignored_with_one_note(
    changed: Write, caplog: pytest.LogCaptureFixture, names: list[str], prefix: str
) -> None:
    path, original = changed(
        lambda key: prefix + key,
        {prefix + name: torch.ones(UNUSED[name]) for name in names},
        fp8="scaled_fp8",
    )
    with caplog.at_level("INFO", "wanstream.checkpoint"):
        [note] = assert_equal(path, original).notes
    assert [record.getMessage() for record in caplog.records] == [note]
    assert note.startswith(
        f"changed.safetensors: {len(names)} tensors that this model does not use are ignored: "
    )
    assert sum(prefix + name in note for name in names) == min(3, len(names))


def test_norms_of_an_image_branch(tmp_path: Path) -> None:
    """The key norm is used, and the query norm is not, in one file and in shards."""
    model = make_expert(TinyShape(**SMALL, in_channels=36, image_dim=64), seed=0)
    save_expert_folder(model, tmp_path / "plain", dtype=torch.float32)
    save_shards(model, tmp_path / "shards", dtype=torch.float32, shards=3)
    folder = shutil.copytree(tmp_path / "plain", tmp_path / "one")
    more = {f"blocks.{number}.attn2.norm_added_q.weight": torch.ones(256) for number in range(1)}
    save_file({**load_file(folder / WEIGHTS), **more}, folder / WEIGHTS)
    index = json.loads((tmp_path / "shards" / INDEX).read_text())
    shard = next(iter(index["weight_map"].values()))
    save_file({**load_file(tmp_path / "shards" / shard), **more}, tmp_path / "shards" / shard)
    index["weight_map"] |= dict.fromkeys(more, shard)
    (tmp_path / "shards" / INDEX).write_text(json.dumps(index))
    for path in (folder, tmp_path / "shards"):
        assert (
            assert_equal(path, open_expert(tmp_path / "plain")).notes[0].count("norm_added_q") == 1
        )


REFUSED: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (
        lambda all: {f"model.{key}": each for key, each in all.items() if "blocks." in key},
        "a part of a Wan transf",
    ),
    (
        lambda all: {f"net.{k}": each for k, each in all.items() if k != "patch_embedding.weight"},
        "patch_embedding.we",
    ),
    (
        lambda all: {f"net.{key}": each for key, each in all.items() if key != "head.head.bias"},
        "head.head.bias",
    ),
    (
        lambda all: {
            f"{p}{key}": each.clone() for key, each in all.items() for p in ("high.", "low.")
        },
        "holds 2 diffusion models, under the prefixes 'high.' and 'low.'",
    ),
    (
        lambda all: {**all, "_orig_mod.head.head.bias": torch.ones(64)},
        "holds head.head.bias twice, as .*_orig_mod",
    ),
    (lambda all: {**all, "logit_scale": torch.ones(1)}, r"logit_scale \[1\] does not belong"),
    (lambda all: {**all, "epoch": torch.ones(1)}, r"epoch \[1\] does not belong"),
    (
        lambda all: {**all, "vae.conv1.weight": torch.ones(1)},
        r"vae.conv1.weight \[1\] does not belong",
    ),
    (
        lambda all: {
            **{f"model.{key}": each for key, each in all.items()},
            "stranger.weight": torch.ones(1),
        },
        r"stranger.weight \[1\] does not belong",
    ),
    (
        lambda all: {
            f"diffusion_model.{LAYER}.lora_{each}.weight": torch.ones(4, 4)
            for each in ("down", "up")
        },
        "is a LoRA: it holds blocks.0.self_attn.q.lora_down.weight; choose it in Wan LoRA",
    ),
    (
        lambda all: {f"transformer.{LAYER}.lora_{each}.weight": torch.ones(4, 4) for each in "AB"},
        "is a LoRA: it holds .*lora_A.weight",
    ),
    (
        lambda all: (
            all
            | {f"{LAYER}.{each}": torch.ones(4, 4) for each in ("lora_down", "qweight", "wscales")}
        ),
        r"is quantised as SVDQuant \(nunchaku\)",
    ),
    (
        lambda all: {f"lora_unet_{LAYER}.lokr_w1".replace(".", "_"): torch.ones(4, 4)},
        "is a LoRA: it holds lora_unet_",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_other_files_are_refused_by_name(
    tiny_expert_file: Write, tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    path = tmp_path / "refused.safetensors"
    save_file(change(load_file(tiny_expert_file(**SMALL))), path)
    with pytest.raises(CheckpointError, match=message) as error:
        open_expert(path)
    assert path.name in str(error.value)


SHARDS = (
    "diffusion_pytorch_model.{}-0000{}-of-00002.safetensors",
    "diffusion_pytorch_model-0000{1}-of-00002.{0}.safetensors",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_expert_folder(
        make_expert(TinyShape(**SMALL), seed=0), tmp_path / "plain", dtype=torch.float32
    )
    return shutil.copytree(tmp_path / "plain", tmp_path / "variant")


@pytest.mark.parametrize(
    "name",
    [f"diffusion_pytorch_model.{variant}.safetensors" for variant in ("bf16", "fp16", "non_ema")]
    + ["model.safetensors", "wan2.2_high.safetensors"],
)
def test_the_only_file_of_a_folder_is_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    assert_equal(folder, open_expert(folder.with_name("plain")))


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    "index", [f"{WEIGHTS}.index.fp16.json", "diffusion_pytorch_model.fp16.safetensors.index.json"]
)
def test_the_only_index_of_a_folder_is_opened(folder: Path, index: str, shard: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {key: shard.format("fp16", 1 + key.startswith("blocks.")) for key in tensors}
    for name in set(places.values()):
        save_file(
            {key: tensor for key, tensor in tensors.items() if places[key] == name}, folder / name
        )
    (folder / index).write_text(json.dumps({"weight_map": places}))
    assert_equal(folder, open_expert(folder.with_name("plain")))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a.bf16.safetensors", "b.fp16.safetensors"],
            f"holds a.bf16.safetensors and b.fp16.safetensors: .* to {WEIGHTS}",
        ),
        ([f"{INDEX}.bak"], f"holds neither {WEIGHTS} nor {INDEX}"),
        (
            ["x-00001-of-00002.safetensors"],
            f"holds x-00001-of-00002.safetensors, one of 1 shards, .*{INDEX} is missing",
        ),
        (["pytorch_model.bin"], "holds pickles"),
    ],
)
def test_a_folder_without_one_choice_is_refused(
    folder: Path, names: list[str], message: str
) -> None:
    (folder / WEIGHTS).unlink()
    for name in names:
        (folder / name).touch()
    with pytest.raises(CheckpointError, match=message):
        open_expert(folder)

"""LoRA files opened by header: matched parameters, scales and refusals."""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wanstream.offload.formats.chunk_size import CHUNK_VALUES
from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.transfers.weight_patch import WeightPatch, write_sum
from wanstream.testing.model import FAMILIES
from wanstream.wan.checkpoint.detect import WanConfig
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.lora.apply import LoraFactors, combine_patches
from wanstream.wan.lora.changes import Change
from wanstream.wan.lora.file import LoraFile, open_lora
from wanstream.wan.lora.fit import fit_lora
from wanstream.wan.lora.keys import LYCORIS_ROLES

Q = "diffusion_model.blocks.1.self_attn.q"


@pytest.fixture
def config():
    """Return the tiny experts' config."""
    return WanConfig(
        num_attention_heads=2,
        num_layers=4,
        ffn_dim=512,
        in_channels=16,
        out_channels=16,
        text_dim=4096,
        freq_dim=256,
        patch_size=(1, 2, 2),
    )


def layer(rows=256, columns=256, *, rank=4, name=Q):
    return {
        f"{name}.lora_down.weight": torch.ones(rank, columns),
        f"{name}.lora_up.weight": torch.ones(rows, rank),
    }


def products(lora: LoraFile) -> dict[str, Change]:
    return {
        name: change
        for name, changes in lora.changes.items()
        for change in changes
        if change.is_product
    }


def differences(lora: LoraFile) -> dict[str, Change]:
    return {
        name: change
        for name, changes in lora.changes.items()
        for change in changes
        if change.is_difference
    }


class TestOpened:
    def test_what_a_lightning_lora_holds(self, lora_file):
        path = lora_file()
        lora = open_lora(str(path))
        assert lora.path == path
        assert len(products(lora)) == 4 * 10
        assert products(lora)["blocks.1.attn1.to_q.weight"] == Change(
            first=(f"{Q}.lora_up.weight", f"{Q}.lora_down.weight"), scale=0.5
        )
        assert differences(lora)["blocks.0.attn1.to_q.bias"] == Change(
            first=("diffusion_model.blocks.0.self_attn.q.diff_b",), scale=1.0
        )
        assert lora.unmatched == ()
        assert {key for key in load_file(path) if not key.endswith(".alpha")} == set(lora.tensors)

    @pytest.mark.parametrize(
        ("alpha", "scale"),
        [(None, 1.0), (4.0, 1.0), (1.0, 0.25), (8.0, 2.0), (0.0, 0.0), (-4.0, -1.0)],
    )
    @pytest.mark.parametrize("shape", [(), (1,)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_scale_is_alpha_by_rank(self, lora_file, alpha, scale, shape, dtype):
        alphas = {} if alpha is None else {f"{Q}.alpha": torch.full(shape, alpha).to(dtype)}
        lora = open_lora(lora_file(layer() | alphas))
        assert products(lora)["blocks.1.attn1.to_q.weight"].scale == scale

    def test_layers_may_have_different_ranks(self, lora_file):
        other = "diffusion_model.blocks.1.self_attn.k"
        alphas = {f"{Q}.alpha": torch.tensor(4.0), f"{other}.alpha": torch.tensor(4.0)}
        lora = open_lora(lora_file(layer(rank=2) | layer(rank=16, name=other) | alphas))
        assert [low.scale for low in products(lora).values()] == [0.25, 2.0]

    def test_the_bias_of_up_is_scaled_like_up(self, lora_file):
        tensors = {
            "transformer.blocks.1.attn1.to_q.lora_A.weight": torch.ones(4, 256),
            "transformer.blocks.1.attn1.to_q.lora_B.weight": torch.ones(256, 4),
            "transformer.blocks.1.attn1.to_q.lora_B.bias": torch.ones(256),
            "transformer.blocks.1.attn1.to_q.alpha": torch.tensor(2.0),
        }
        assert differences(open_lora(lora_file(tensors)))["blocks.1.attn1.to_q.bias"].scale == 0.5

    def test_only_the_header_and_the_alphas_are_read(self, lora_file, lightning):
        """A non-finite factor is refused when it is read."""
        tensors = lightning()
        tensors[f"{Q}.lora_up.weight"][:] = float("nan")
        assert products(open_lora(lora_file(tensors)))["blocks.1.attn1.to_q.weight"].scale == 0.5

    def test_identity_and_currency(self, lora_file):
        path = lora_file()
        lora = open_lora(path)
        assert (
            open_lora(path.parent / ".." / path.parent.name / path.name).identity == lora.identity
        )
        assert hash(lora.identity) == hash(open_lora(path).identity)
        assert lora.is_current()
        lora_file(seed=1, biases=False).replace(path)
        assert not lora.is_current()
        assert open_lora(path).identity != lora.identity
        path.unlink()
        assert not lora.is_current()


class TestUnmatched:
    OTHERS = (
        "diffusion_model.blocks.0.audio_attn.k.lora_down.weight",
        "diffusion_model.blocks.0.audio_attn.k.lora_up.weight",
        "diffusion_model.blocks.0.audio_attn.norm_k.diff",
        "diffusion_model.audio_emb.proj.1.diff_b",
    )
    LAYERS = (
        "diffusion_model.audio_emb.proj.1",
        *("diffusion_model.blocks.0.audio_attn.k", "diffusion_model.blocks.0.audio_attn.norm_k"),
    )

    def test_keys_of_no_parameter_are_listed_once_and_the_rest_counts(
        self, lora_file, lightning, caplog
    ):
        tensors = lightning() | {key: torch.ones(4, 4) for key in self.OTHERS}
        with caplog.at_level(logging.WARNING, logger="wanstream.lora"):
            path = lora_file(tensors)
            lora = open_lora(path)
            assert open_lora(path) is lora  # a graph opens it in its check too: one line in the log
        assert set(lora.unmatched) == set(self.OTHERS)
        assert len(products(lora)) == 4 * 10
        [record] = caplog.records
        assert record.name == "wanstream.lora"
        message = record.getMessage()
        assert (message,) == lora.warnings
        assert message.startswith(
            "lora_0.safetensors is used in part: 3 of 43 layers do not belong to a Wan expert"
        )
        assert message.endswith("are left out: " + ", ".join(self.LAYERS))

    @pytest.mark.parametrize(
        "key", ["diffusion_model.blocks.2.self_attn.q.alpha", "anything", f"{Q}.diff_m"]
    )
    def test_what_changes_nothing_is_listed(self, lora_file, key):
        lora = open_lora(lora_file(layer() | {key: torch.ones(())}))
        assert (lora.unmatched, lora.warnings) == ((key,), ()), "one number is no layer"

    @pytest.mark.parametrize("key", ["anything", f"{Q}.diff_m"])
    def test_a_layer_or_a_part_of_one_is_counted(self, lora_file, key):
        lora = open_lora(lora_file(layer() | {key: torch.ones(2)}))
        assert lora.unmatched == (key,)
        assert (
            f"1 of 2 layers do not belong to a Wan expert and are left out: {key}"
            in lora.warnings[0]
        )

    def test_nothing_is_said_about_a_file_that_fits(self, lora_file, caplog):
        open_lora(lora_file())
        assert caplog.records == []


REFUSED = {
    "mixed ranks": (
        {f"{Q}.lora_down.weight": (8, 256), f"{Q}.lora_up.weight": (256, 4)},
        rf"mixed ranks: {Q}.lora_up.weight \[256, 4\] has rank 4, {Q}.lora_down.weight \[8, 256\] "
        r"has rank 8",
    ),
    "no up": ({f"{Q}.lora_down.weight": (4, 256)}, rf"{Q}.lora_down.weight has no up factor"),
    "no down": ({f"{Q}.lora_B.weight": (256, 4)}, rf"{Q}.lora_B.weight has no down factor"),
    "vectors": (
        {f"{Q}.lora_down.weight": (256,), f"{Q}.lora_up.weight": (256, 1)},
        r"lora_up.weight is \[256, 1\] and .*lora_down.weight is \[256\]: matrices are expected",
    ),
    "no rank": (
        {f"{Q}.lora_down.weight": (0, 256), f"{Q}.lora_up.weight": (256, 0)},
        r"is \[0, 256\]: matrices are expected",
    ),
    "two spellings": (
        {f"{Q}.diff": (256, 256), "transformer.blocks.1.attn1.to_q.diff": (256, 256)},
        r"self_attn.q.diff and transformer.blocks.1.attn1.to_q.diff mean the same: give one file "
        r"for each expert",
    ),
    "both experts": (
        {f"transformer{n}.blocks.1.attn1.to_q.lora_A.weight": (4, 256) for n in ("", "_2")},
        r"mean the same: give one file for each expert",
    ),
    "two bias changes": (
        {"blocks.1.attn1.to_q.diff_b": (256,), "blocks.1.attn1.to_q.lora_B.bias": (256,)},
        r"to_q.diff_b and blocks.1.attn1.to_q.lora_B.bias mean the same",
    ),
    "alphas": (
        {f"{Q}.lora_down.weight": (4, 256), f"{Q}.lora_up.weight": (256, 4), f"{Q}.alpha": (4,)},
        r"alpha is \[4\]; an alpha is one number",
    ),
    "nothing": ({}, "holds no tensors"),
    "Flux": (
        {"lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (9216, 4)},
        r"none of its 1 keys belongs to a Wan expert \(lora_unet_double_blocks_0_img_attn_qkv.*\): "
        "it was probably made for Flux or HunyuanVideo",
    ),
    "SDXL": (
        {"lora_unet_down_blocks_1_attentions_0_proj_in.lora_down.weight": (4, 640)},
        "probably made for Stable Diffusion or SDXL",
    ),
    "text encoder": (
        {"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": (4, 768)},
        "probably made for a text encoder",
    ),
    "Qwen": (
        {"transformer_blocks.0.attn.to_q.lora_A.weight": (4, 3072)},
        "probably made for Qwen-Image",
    ),
    "unknown": (
        {"layers.0.q.lora_A.weight": (4, 8), "b": (1,)},
        r"none of its 2 keys .* made for another model",
    ),
    "an expert": (
        {"blocks.0.self_attn.q.weight": (256, 256)},
        "it holds whole weights: choose it as an expert",
    ),
    "DoRA": (
        {f"{Q}.dora_scale": (256, 1)},
        rf"{Q}.dora_scale is the magnitude of a DoRA without the factors",
    ),
    **{
        f"{role} alone": (
            {f"{Q}.{role}": (4, 4)},
            rf"is a {name} with a part missing: {Q}.{role} needs {role[:4]}_",
        )
        for role in LYCORIS_ROLES
        for name in ["LoKr" if role.startswith("lokr") else "LoHa"]
    },
    "half a LoKr": (
        {f"{Q}.lokr_w1": (16, 16), f"{Q}.lokr_w2_a": (16, 4)},
        r"needs lokr_w2 or lokr_w2_a and lokr_w2_b and lokr_t2 or lokr_w2_a and lokr_w2_b of the "
        r"same layer",
    ),
    "a LoKr and a LoRA": (
        {
            f"{Q}.lokr_w1": (16, 16),
            f"{Q}.lokr_w2": (16, 16),
            f"{Q}.lora_A": (4, 256),
            f"{Q}.lora_B": (256, 4),
        },
        rf"has two algorithms for one layer: {Q}.lora_B and {Q}.lokr_w1",
    ),
    "two sizes in a LoHa": (
        {
            f"{Q}.hada_{w}_{f}": shape
            for w, n in (("w1", 256), ("w2", 128))
            for f, shape in (("a", (n, 4)), ("b", (4, 8)))
        },
        r"belong to matrices of \[256, 8\] and \[128, 8\]",
    ),
    "ranks of a LoHa": (
        {
            f"{Q}.hada_w1_a": (256, 4),
            f"{Q}.hada_w1_b": (3, 8),
            f"{Q}.hada_w2_a": (256, 4),
            f"{Q}.hada_w2_b": (4, 8),
        },
        "mixed ranks",
    ),
    "a core that does not fit": (
        {
            f"{Q}.lokr_w1": (4, 4),
            f"{Q}.lokr_w2_a": (2, 64),
            f"{Q}.lokr_w2_b": (3, 64),
            f"{Q}.lokr_t2": (3, 2),
        },
        r"lokr_t2 is \[3, 2\]; \[2, 3, ...\] is expected",
    ),
    "a magnitude that does not fit": (
        {f"{Q}.lora_A": (4, 256), f"{Q}.lora_B": (256, 4), f"{Q}.dora_scale": (255, 1)},
        r"dora_scale is \[255, 1\]; a magnitude for each of 256 rows or 256 columns",
    ),
    "an unknown prefix": (
        {"foo.blocks.1.self_attn.q.lora_A": (4, 256), "foo.blocks.1.self_attn.q.lora_B": (256, 4)},
        r"unknown prefix 'foo.' before blocks.1.self_attn.q: rename its keys without it",
    ),
    "an unknown flat prefix": (
        {"lora_unet_foo_blocks_1_ffn_0.lora_A": (4, 256)},
        "unknown prefix 'lora_unet_foo_'",
    ),
    "Stand-In": (
        {"diffusion_model.blocks.0.self_attn.q_loras.down.weight": (4, 256)},
        "probably made for Stand-In",
    ),
    "other model with a layer of ours": (
        {
            "single_transformer_blocks.0.attn.to_q.lora_A.weight": (4, 256),
            "transformer.proj_out.diff_b": (64,),
        },
        "probably made for Flux",
    ),
    "OFT": ({f"{Q}.oft_blocks": (4, 8, 8)}, r"is an OFT"),
    "reshape": (
        {"diffusion_model.patch_embedding.reshape_weight": (5,)},
        "gives a weight another shape",
    ),
}


class TestRefused:
    @pytest.mark.parametrize(("shapes", "message"), REFUSED.values(), ids=REFUSED)
    def test_by_name(self, lora_file, shapes, message):
        path = lora_file({key: torch.zeros(shape) for key, shape in shapes.items()})
        with pytest.raises(CheckpointError, match=message) as error:
            open_lora(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
    def test_alpha_that_is_no_number(self, lora_file, alpha):
        with pytest.raises(CheckpointError, match=rf"{Q}.alpha is (nan|inf)"):
            open_lora(lora_file(layer() | {f"{Q}.alpha": torch.tensor(alpha)}))

    def test_whole_numbers(self, lora_file):
        tensors = {key: tensor.to(torch.int8) for key, tensor in layer().items()}
        with pytest.raises(CheckpointError, match=r"is torch.int8; .* floating-point"):
            open_lora(lora_file(tensors))

    def test_what_is_no_safetensors_file(self, lora_file, tmp_path):
        whole, short, text = (
            lora_file(),
            tmp_path / "short.safetensors",
            tmp_path / "text.safetensors",
        )
        short.write_bytes(whole.read_bytes()[:-1])
        text.write_text("no LoRA")
        pickled = tmp_path / "pickle.safetensors"
        pickled.write_bytes(pickle.dumps({"a": 1}))
        for path, message in (
            (short, "is truncated"),
            (text, "is not a safetensors file"),
            (pickled, "pickle"),
            (tmp_path / "absent.safetensors", "cannot be read"),
            (tmp_path, "cannot be read"),
        ):
            with pytest.raises(CheckpointFileError, match=message):
                open_lora(path)


class TestSettingsInTheHeader:
    def open(self, lora_file, settings):
        text = settings if isinstance(settings, str) else json.dumps(settings)
        return open_lora(
            lora_file(style="diffusers", biases=False, metadata={"lora_adapter_metadata": text})
        )

    @pytest.mark.parametrize(
        ("settings", "scale", "first"),
        [
            ({}, 1.0, 1.0),
            ({"r": 4, "lora_alpha": 8}, 2.0, 2.0),
            ({"transformer.r": 4, "transformer.lora_alpha": 8}, 2.0, 2.0),
            ({"lora_alpha": 8, "use_rslora": True}, 4.0, 4.0),
            ({"lora_alpha": 8, "alpha_pattern": {"blocks.0.attn1.to_q": 2}}, 2.0, 0.5),
            ({"alpha_pattern": {"blocks.0.attn1.to_q": 2}}, 1.0, 0.5),
        ],
    )
    def test_scale(self, lora_file, settings, scale, first):
        lora = self.open(lora_file, settings)
        scales = {name: low.scale for name, low in products(lora).items()}
        assert scales.pop("blocks.0.attn1.to_q.weight") == first
        assert set(scales.values()) == {scale}

    def test_alphas_of_tensors_count_first(self, lora_file):
        metadata = {"lora_adapter_metadata": json.dumps({"lora_alpha": 400})}
        lora = open_lora(lora_file(metadata=metadata))
        assert {low.scale for low in products(lora).values()} == {0.5}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ("{", "lora_adapter_metadata is not JSON"),
            ("[" * 100_000, "lora_adapter_metadata is not JSON"),
            ('{"lora_alpha": 1' + "0" * 5000 + "}", "lora_adapter_metadata is not JSON"),
            ('{"lora_alpha": 1' + "0" * 400 + "}", "lora_alpha is 10000"),
            ([], "lora_adapter_metadata is not a JSON object"),
            ({"use_dora": True}, r"is a DoRA by its settings \(use_dora\), but has no magnitudes"),
            ({"lora_alpha": True}, "lora_alpha is True"),
            ({"lora_alpha": "eight"}, "lora_alpha is 'eight'; a number is expected"),
            ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
            ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\]"),
            ({"alpha_pattern": {"blocks.0.attn1.to_q": None}}, "blocks.0.attn1.to_q is None"),
            (
                {"alpha_pattern": {"(a+)+": 1}},
                "only names of layers and simple expressions are read",
            ),
        ],
    )
    def test_refused(self, lora_file, settings, message):
        with pytest.raises(CheckpointError, match=message):
            self.open(lora_file, settings)


class TestFit:
    K_IMG = "diffusion_model.blocks.0.cross_attn.k_img"

    def test_changes_of_an_image_branch_are_left_out_where_there_is_none(
        self, lora_file, lightning, config, caplog
    ):
        image = {
            f"{self.K_IMG}.lora_down.weight": torch.ones(4, 256),
            f"{self.K_IMG}.lora_up.weight": torch.ones(256, 4),
        }
        lora = open_lora(
            lora_file(
                lightning() | image | {"diffusion_model.img_emb.proj.4.diff_b": torch.ones(256)}
            )
        )
        assert len(products(lora)) == 4 * 10 + 1
        with caplog.at_level(logging.INFO, logger="wanstream.lora"):
            left = fit_lora(lora, config)
        assert len(products(left)) == 4 * 10
        assert not any("image" in name or "add_" in name for name in left.changes)
        assert "2 parameters of an image branch (Wan2.1 I2V) are not used" in caplog.text
        assert ([caplog.text.count(note) for note in left.notes], left.warnings) == ([1], ())
        with_branch = replace(config, in_channels=36, image_dim=80)
        assert products(fit_lora(open_lora(lora_file(image)), with_branch))
        with pytest.raises(CheckpointError, match=r"changes the image branch of Wan2\.1 I2V alone"):
            fit_lora(open_lora(lora_file(image)), config)

    def test_the_tiny_expert(self, lora_file, config):
        lora = open_lora(lora_file())
        assert fit_lora(lora, config) is lora

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            (
                layer(1536, 1536),
                rf"{Q}.lora_up.weight and {Q}.lora_down.weight change a weight of \[1536, 1536\]; "
                r"blocks.1.attn1.to_q.weight \(natively blocks.1.self_attn.q.weight\) "
                r"of the expert is \[256, 256\]: this LoRA is for Wan2.1 1.3B",
            ),
            (layer(3072, 3072), r"\[3072, 3072\].*this LoRA is for Wan2.2 5B"),
            (layer(5120, 5120), r"\[5120, 5120\].*this LoRA is for a 14B model"),
            (layer(256, 255), r"\[256, 255\]; .* \[256, 256\]$"),
            (layer(255, 256), r"\[255, 256\]; .* \[256, 256\]$"),
            (
                {f"{Q}.diff_b": torch.ones(3072)},
                r"diff_b is \[3072\]; .* is \[256\]: this LoRA is for Wan2.2 5B",
            ),
            ({f"{Q}.diff": torch.ones(256, 1)}, r"diff is \[256, 1\]; .* is \[256, 256\]$"),
            (
                {"head.modulation.diff": torch.ones(2, 256)},
                r"diff is \[2, 256\]; .* is \[1, 2, 256\]$",
            ),
            (
                layer(name="diffusion_model.blocks.4.self_attn.q"),
                r"changes blocks.4.attn1.to_q.weight .*; the expert has 4 blocks, from 0 on",
            ),
            (
                layer(256, 48 * 4, name="patch_embedding"),
                r"change a weight of \[256, 192\]; patch_embedding.weight of the expert is \[256, "
                r"64\]",
            ),
            (layer(255, 36 * 4, name="patch_embedding"), r"\[255, 144\]; .* \[256, 64\]"),
        ],
    )
    def test_refused(self, lora_file, config, tensors, message):
        with pytest.raises(CheckpointError, match=message):
            fit_lora(open_lora(lora_file(tensors)), config)

    def test_the_factors_of_a_convolution(self, lora_file, config):
        tensors = {
            "patch_embedding.lora_down.weight": torch.ones(4, 16, 1, 2, 2),
            "patch_embedding.lora_up.weight": torch.ones(256, 4, 1, 1, 1),
        }
        assert "patch_embedding.weight" in products(fit_lora(open_lora(lora_file(tensors)), config))

    @pytest.mark.parametrize("channels", [16, 36])
    @pytest.mark.parametrize("kind", ["product", "difference", "both"])
    def test_the_latents_of_the_other_family_are_left_out(
        self, lora_file, config, caplog, channels, kind
    ):
        """A text-to-video LoRA works with image to video, as in ComfyUI."""
        other = 52 - channels
        tensors = layer()
        if kind != "difference":
            tensors |= layer(256, other * 4, name="patch_embedding")
        if kind != "product":
            tensors["patch_embedding.diff"] = torch.ones(256, other, 1, 2, 2)
        tensors["patch_embedding.diff_b"] = torch.ones(256)
        lora = open_lora(lora_file(tensors))
        caplog.set_level(logging.INFO, logger="wanstream.lora")
        found = fit_lora(lora, replace(config, in_channels=channels))
        assert set(products(found)) == {"blocks.1.attn1.to_q.weight"}
        assert set(differences(found)) == {"patch_embedding.bias"}
        [record] = caplog.records
        assert "its change of patch_embedding.weight is not used" in record.getMessage()
        assert fit_lora(lora, replace(config, in_channels=other)) is lora
        assert len(caplog.records) == 1


class TestCombined:
    def test_products_lie_side_by_side_and_differences_are_summed(self, lora_file):
        one = open_lora(
            lora_file(
                layer(rank=2) | {f"{Q}.alpha": torch.tensor(1.0), f"{Q}.diff": torch.ones(256, 256)}
            )
        )
        two = open_lora(lora_file(layer(rank=3) | {f"{Q}.diff": torch.ones(256, 256)}))
        patch = combine_patches(
            "blocks.1.attn1.to_q.weight", [(one, 4.0), (two, -1.0)], LoraFactors()
        )
        assert torch.equal(patch.up, torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0]).expand(256, 5))
        assert torch.equal(patch.down, torch.ones(5, 256))
        assert torch.equal(patch.full, torch.full((256, 256), 3.0))

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    )
    def test_what_is_scaled_is_fp32(self, lora_file, dtype):
        lora = open_lora(lora_file({key: tensor.to(dtype) for key, tensor in layer().items()}))
        patch = combine_patches("blocks.1.attn1.to_q.weight", [(lora, 0.5)], LoraFactors())
        assert (patch.up.dtype, patch.down.dtype, patch.full) == (torch.float32, dtype, None)
        assert torch.equal(patch.up, torch.full((256, 4), 0.5))

    def test_a_lora_that_does_not_change_the_parameter_is_not_read(self, lora_file):
        factors = LoraFactors()
        path = lora_file(layer(name="blocks.0.self_attn.k"))
        other = open_lora(path)
        path.unlink()
        lora = open_lora(lora_file(layer()))
        assert combine_patches(
            "blocks.1.attn1.to_q.weight", [(other, 1.0), (lora, 1.0)], factors
        ).up.shape == (256, 4)
        assert list(factors._tensors) == [lora.identity]
        factors.keep_only([other])
        assert not factors._tensors

    @pytest.mark.parametrize("shape", [(6,), (6, 4), (1, 6, 4), (6, 2, 1, 2, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_difference_is_added_in_the_shape_and_dtype_of_the_parameter_and_rounded_once(
        self, shape, dtype
    ):
        base = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        change = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        found = torch.empty_like(base)
        write_sum(base, WeightPatch(full=change), found)
        assert torch.equal(found, (base.float() + change).to(dtype))

    @pytest.mark.parametrize("columns", [40, CHUNK_VALUES // 7, CHUNK_VALUES + 1])
    def test_a_product_is_added_however_many_rows_are_done_at_once(self, columns):
        generator = torch.Generator().manual_seed(2)
        base, up, down = (
            torch.randn(shape, generator=generator)
            for shape in ((4, columns), (4, 3), (3, columns))
        )
        found = torch.empty_like(base)
        write_sum(base, WeightPatch(up=up, down=down), found)
        torch.testing.assert_close(found, base + up @ down)


def test_the_sample_loras_are_small(sample_models):
    files = list(Path(sample_models, "loras").iterdir())
    assert len(files) == 2 * sum(len(family.loras) for family in FAMILIES), "one for each expert"
    assert all(file.stat().st_size < 300_000 for file in files)

"""Single-file VAEs: equality with the `vae` folder, refused files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.testing.components import save_vae_file
from wanstream.testing.quantised import quantise
from wanstream.testing.weights import make_vae
from wanstream.wan.latents.space import WAN22
from wanstream.wan.vae.vae import VaeInputError, open_vae

WEIGHTS = "diffusion_pytorch_model.safetensors"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def vae_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vae") / "wan_2.1_vae.safetensors"
    save_vae_file(make_vae(seed=0), path)
    return path


@pytest.fixture
def changed(vae_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return `changed(edit)`, a copy with tensors changed in place by `edit`."""

    def change(edit: Callable[[Tensors], Any]) -> Path:
        tensors = load_file(vae_file)
        edit(tensors)
        save_file(tensors, tmp_path / "changed.safetensors")
        return tmp_path / "changed.safetensors"

    return change


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def encoded_and_decoded(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an encoded video and a decoded latent."""
    with open_vae(path) as vae:
        return (
            vae.encode(noise(5, 16, 24, 3).sigmoid(), device="cpu"),
            vae.decode(noise(2, 16, 2, 2, 3), device="cpu"),
        )


def assert_equal(path: Path, other: Path) -> None:
    for found, expected in zip(encoded_and_decoded(path), encoded_and_decoded(other), strict=True):
        assert torch.equal(found, expected)


class TestAgainstTheFolder:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_both_ways_equal_to_the_bit(
        self, changed: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
    ) -> None:
        def cast(tensors: Tensors) -> None:
            tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}

        vae = make_vae(seed=0)
        vae.save_pretrained(tmp_path / "vae")
        weights = {name: tensor.to(dtype) for name, tensor in vae.state_dict().items()}
        save_file(weights, tmp_path / "vae" / WEIGHTS, {"format": "pt"})

        assert_equal(changed(cast), tmp_path)

    def test_names_of_diffusers_in_a_single_file(self, vae_file: Path, tmp_path: Path) -> None:
        make_vae(seed=0).save_pretrained(tmp_path / "vae")

        assert_equal(tmp_path / "vae" / WEIGHTS, vae_file)

    def test_the_width_follows_from_shapes(self, tmp_path: Path) -> None:
        vae = make_vae(seed=0, base_dim=16)
        save_vae_file(vae, tmp_path / "vae.safetensors")
        vae.save_pretrained(tmp_path / "vae")

        assert json.loads((tmp_path / "vae" / "config.json").read_text())["base_dim"] == 16
        assert_equal(tmp_path / "vae.safetensors", tmp_path)


def renamed(prefix: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[prefix + key] = tensors.pop(key)

    return edit


def with_more(**more: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update(
        {key.replace("__", "."): tensor for key, tensor in more.items()}
    )


def head(channels: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update(
        {"decoder.head.2.weight": torch.zeros(channels, 8, 3, 3, 3)}
    )


def decoded(path: Path, channels: int = 16) -> torch.Tensor:
    with open_vae(path) as vae:
        return vae.decode(noise(1, channels, 2, 1, 2), device="cpu")


def assert_same_weights(path: Path, other: Path) -> None:
    with open_vae(path) as found, open_vae(other) as expected:
        own, others = (vae._load(torch.device("cpu")).state_dict() for vae in (found, expected))
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)


class TestFilesThatPeopleHave:
    PREFIXES = (
        *("model.", "vae.", "first_stage_model.", "_orig_mod.", "module.", "unknown."),
        *("model.vae.", "state_dict.vae.", "first_stage_model._orig_mod."),
    )

    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_a_prefix_is_removed(
        self, changed: Callable[..., Path], vae_file: Path, prefix: str
    ) -> None:
        assert_same_weights(changed(renamed(prefix)), vae_file)

    @pytest.mark.parametrize(
        ("edit", "ignored"),
        [
            (with_more(epoch=torch.zeros(1)), "1 tensors .*: epoch"),
            (
                with_more(optimizer__state__0__step=torch.zeros(1), global_step=torch.zeros(1)),
                "2 tensors .*global_step",
            ),
            (
                with_more(loss__discriminator__0__weight=torch.zeros(2), logvar=torch.zeros(())),
                "logvar",
            ),
            (
                lambda t: (
                    renamed("vae.")(t)
                    or with_more(model__diffusion_model__blocks__0__bias=torch.zeros(3))(t)
                ),
                r"blocks\.0\.bias",
            ),
        ],
    )
    def test_tensors_that_a_vae_does_not_use_are_ignored_with_a_line(
        self,
        changed: Callable[..., Path],
        vae_file: Path,
        edit: Callable[[Tensors], Any],
        ignored: str,
    ) -> None:
        path = changed(edit)
        assert_same_weights(path, vae_file)
        [note] = open_vae(path).notes
        assert re.search(f"changed.safetensors: .*{ignored}", note)

    @pytest.mark.parametrize(
        ("which", "dtype"),
        [
            ("all", torch.float8_e4m3fn),
            ("matrices", torch.float8_e5m2),
            ("one", torch.float64),
            ("one", torch.float8_e4m3fn),
        ],
        ids=str,
    )
    def test_other_precisions_are_converted_with_a_warning(
        self, changed: Callable[..., Path], tmp_path: Path, dtype: torch.dtype, which: str
    ) -> None:
        def cast(tensors: Tensors) -> None:
            for key, tensor in tensors.items():
                if which == "all" or (
                    tensor.ndim > 1 if which == "matrices" else key == "decoder.conv1.weight"
                ):
                    tensors[key] = tensor.to(dtype)

        path = changed(cast)
        with open_vae(path) as vae:
            (warning,) = vae.warnings
            assert str(dtype).removeprefix("torch.") in warning
            assert "wan_2.1_vae.safetensors" in warning
        save_file(
            {key: tensor.float() for key, tensor in load_file(path).items()},
            tmp_path / "plain.safetensors",
        )
        assert_same_weights(path, tmp_path / "plain.safetensors")

    def test_a_folder_is_named_by_its_weights(self, tmp_path: Path) -> None:
        make_vae(seed=0).save_pretrained(tmp_path / "vae")
        weights = {
            key: tensor.to(torch.float8_e4m3fn)
            for key, tensor in load_file(tmp_path / "vae" / WEIGHTS).items()
        }
        save_file(weights | {"epoch": torch.zeros(1)}, tmp_path / "vae" / WEIGHTS)
        with open_vae(tmp_path) as vae:
            assert [
                text.split(" holds")[0].split(":")[0] for text in (*vae.warnings, *vae.notes)
            ] == [WEIGHTS, WEIGHTS]

    def test_scales_are_applied(self, changed: Callable[..., Path], tmp_path: Path) -> None:
        plain: Tensors = {}

        def scale(tensors: Tensors) -> None:
            plain.update(tensors)
            values, factor = quantise(tensors["decoder.conv1.weight"])
            plain["decoder.conv1.weight"] = values.float() * factor
            tensors.update({"decoder.conv1.weight": values, "decoder.conv1.scale_weight": factor})
            tensors["scaled_fp8"] = torch.zeros(1, dtype=values.dtype)

        path = changed(scale)
        save_file(plain, tmp_path / "plain.safetensors")
        assert_same_weights(path, tmp_path / "plain.safetensors")

    @pytest.mark.parametrize(
        ("names", "dropped"),
        [
            ("native", "encoder"),
            ("native", "encoder and quant_conv"),
            ("diffusers", "encoder and quant_conv"),
            ("Wan2.2", "encoder and quant_conv"),
            ("Wan2.2 of diffusers", "encoder"),
        ],
    )
    def test_a_decoder_alone_decodes_and_does_not_encode(
        self, vae_file: Path, wan22_vae: Path, tmp_path: Path, names: str, dropped: str
    ) -> None:
        if names == "diffusers":
            make_vae(seed=0).save_pretrained(tmp_path / "vae")
        path = {
            "native": vae_file,
            "diffusers": tmp_path / "vae" / WEIGHTS,
            "Wan2.2": wan22_vae / "wan2.2_vae.safetensors",
            "Wan2.2 of diffusers": wan22_vae / "vae" / WEIGHTS,
        }[names]
        gone = ("encoder.", "conv1.", "quant_conv.") if "quant" in dropped else ("encoder.",)
        kept = {key: tensor for key, tensor in load_file(path).items() if not key.startswith(gone)}
        save_file(kept, tmp_path / "decoder.safetensors")
        channels = 48 if "2.2" in names else 16
        assert torch.equal(
            decoded(tmp_path / "decoder.safetensors", channels), decoded(path, channels)
        )
        with (
            open_vae(tmp_path / "decoder.safetensors") as vae,
            pytest.raises(VaeInputError, match="has no encoder"),
        ):
            vae.encode(torch.zeros(1, 32, 32, 3), device="cpu")


class TestWan22:
    def test_the_single_file_is_the_folder(self, wan22_vae: Path) -> None:
        with open_vae(wan22_vae / "wan2.2_vae.safetensors") as file, open_vae(wan22_vae) as folder:
            latents, video = noise(1, 48, 2, 2, 2), noise(1, 32, 32, 3).sigmoid()
            assert torch.equal(
                file.decode(latents, device="cpu"), folder.decode(latents, device="cpu")
            )
            assert torch.equal(file.encode(video, device="cpu"), folder.encode(video, device="cpu"))
            assert file.space == folder.space == WAN22

    def test_names_of_diffusers_in_a_single_file(self, wan22_vae: Path) -> None:
        with open_vae(wan22_vae / "vae" / WEIGHTS) as vae:
            assert vae.decode(noise(1, 48, 1, 2, 2), device="cpu").shape == (1, 1, 32, 32, 3)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda t: t.pop("decoder.head.2.weight"), r"decoder\.head\.2\.weight is missing"),
            (
                lambda t: t.pop("decoder.upsamples.1.upsamples.3.time_conv.bias"),
                r"decoder\.upsamples\.1\.upsamples\.3\.time_conv\.bias \[64\] is missing",
            ),
            (
                lambda t: t.update({"encoder.conv1.weight": torch.zeros(4, 3, 3, 3, 3)}),
                r"encoder\.conv1\.weight is \[4, 3, 3, 3, 3\]; the rest of the file requires \[4, "
                r"12, 3, 3, 3\]",
            ),
        ],
        ids=["no width", "one parameter", "the encoder of Wan2.1"],
    )
    def test_a_tensor_that_does_not_fit(
        self, wan22_vae: Path, tmp_path: Path, edit: Callable[[Tensors], Any], message: str
    ) -> None:
        tensors = load_file(wan22_vae / "wan2.2_vae.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "changed.safetensors")
        with pytest.raises(CheckpointFileError, match=message):
            open_vae(tmp_path / "changed.safetensors")


class TestBadFiles:
    def test_truncated(self, vae_file: Path, tmp_path: Path) -> None:
        (tmp_path / "vae.safetensors").write_bytes(vae_file.read_bytes()[:-1])
        with pytest.raises(CheckpointFileError, match=r"is truncated: has \d+ of \d+ bytes"):
            open_vae(tmp_path / "vae.safetensors")

    def test_a_pickle(self, tmp_path: Path) -> None:
        torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "Wan2.1_VAE.pth")
        with pytest.raises(CheckpointFileError, match="is a PyTorch pickle"):
            open_vae(tmp_path / "Wan2.1_VAE.pth")

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            (
                {
                    "decoder.up.0.block.0.conv1.weight": (128, 256, 3, 3),
                    "encoder.conv_in.weight": (128, 3, 3, 3),
                },
                r"of an image model \(decoder\.up\.0\.block\.0\.conv1\.weight \[128, 256, 3, 3\]\)",
            ),
            (
                {
                    "encoder.down_blocks.0.resnets.0.norm1.weight": (128,),
                    "decoder.up_blocks.0.resnets.0.norm1.weight": (512,),
                },
                "of an image model",
            ),
            (
                {"blocks.0.attn.q.weight": (8, 8)},
                r"is not a VAE of Wan: it has 1 tensors \(first: blocks.* \[8, 8\]\); use "
                r"wan_2\.1_vae\.safetensors \(Wan2\.1 and Wan2\.2 A14B\), or "
                r"wan2\.2_vae\.safetensors \(Wan2\.2 5B\)",
            ),
        ],
        ids=["SD and Flux", "SD of diffusers", "no VAE"],
    )
    def test_another_model(
        self, tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str
    ) -> None:
        made = {
            name: torch.zeros(1).expand(shape).to(torch.float8_e5m2)
            for name, shape in tensors.items()
        }
        save_file(
            {name: tensor.contiguous() for name, tensor in made.items()},
            tmp_path / "vae.safetensors",
        )
        with pytest.raises(CheckpointFileError, match=message):
            open_vae(tmp_path / "vae.safetensors")

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (
                lambda t: t.pop("decoder.head.0.gamma"),
                r"decoder\.head\.0\.gamma \[8, 1, 1, 1\] is missing",
            ),
            (lambda t: t.pop("encoder.conv1.weight"), r"encoder\.conv1\.weight is missing"),
            (
                lambda t: t.update({"encoder.conv1.weight": torch.zeros(16, 3, 3, 3)}),
                r"encoder\.conv1\.weight is \[16, 3, 3, 3\]; \[out, in, 3, 3, 3\] is expected",
            ),
            (
                lambda t: t.update({"conv2.weight": torch.zeros(48, 48, 1, 1, 1)}),
                r"conv2\.weight is \[48, 48, 1, 1, 1\]; the rest of the file requires \[16, 16, 1, "
                r"1, 1\]",
            ),
            (
                lambda t: t.update({"conv1.bias": t["conv1.bias"].to(torch.int8)}),
                r"conv1\.bias is torch\.int8; one of float32, float16, bfloat16, float64, .* is "
                r"expected",
            ),
            (
                lambda t: t.update({"_orig_mod.conv1.bias": t["conv1.bias"] + 1}),
                r"holds conv1\.bias twice, as .*_orig_mod",
            ),
            (
                lambda t: t.update(
                    {f"ema.{key}": tensor.clone() for key, tensor in list(t.items())}
                ),
                "2 models of one kind, under the prefixes .*'ema.'",
            ),
            (
                head(12),
                r"a VAE that doubles the size of the video.*decoder\.head\.2\.weight has 12 "
                r"channels.*: use wan_",
            ),
            (head(27), "a VAE that enlarges the video 3 times"),
            (head(5), r"head\.2\.weight has 5 channels; 3 are expected: use wan_2\.1_vae"),
            (
                lambda t: [t.pop(key) for key in list(t) if key.startswith("encoder.middle.")],
                r"encoder\.middle.* is missing",
            ),
            (
                lambda t: t.update({"decoder.upsamples.x.residual": torch.zeros(1)}),
                r"upsamples\.x\.residual does not belong",
            ),
            (
                lambda t: t.update({"encoder.norm_out.gamma": torch.zeros(1)}),
                r"encoder\..* means the same parameter as another key",
            ),
        ],
    )
    def test_a_tensor_that_does_not_fit(
        self, changed: Callable[..., Path], edit: Callable[[Tensors], Any], message: str
    ) -> None:
        with pytest.raises(CheckpointFileError, match=message):
            open_vae(changed(edit))

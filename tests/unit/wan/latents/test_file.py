"""Saved latents: what is written is read again, other files are refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wanstream.wan.latents.file import (
    DESCRIPTION,
    TENSOR,
    UNSCALED,
    LatentFileError,
    read_latent,
    write_latent,
)

SAMPLES = torch.arange(16 * 3 * 4 * 8.0).view(1, 16, 3, 4, 8)


def test_a_latent_comes_back_with_its_noise_level_and_its_description(tmp_path: Path) -> None:
    path = tmp_path / "x.latent"
    write_latent(path, SAMPLES, sigma=0.25, metadata={"prompt": {"1": {}}})
    stored = read_latent(path)
    assert torch.equal(stored.samples, SAMPLES)
    assert stored.sigma == 0.25
    assert json.loads(stored.metadata["prompt"]) == {"1": {}}
    assert json.loads(stored.metadata[DESCRIPTION]) == {
        "models": "Wan2.1 and Wan2.2 A14B",
        "videos": 1,
        "frames": 9,
        "width": 64,
        "height": 32,
        "sigma": 0.25,
    }


def test_the_size_of_another_model_is_in_its_pixels(tmp_path: Path) -> None:
    write_latent(tmp_path / "x.latent", torch.zeros(2, 48, 1, 4, 8))
    with safe_open(tmp_path / "x.latent", framework="pt") as file:
        described = json.loads(file.metadata()[DESCRIPTION])
    assert (described["models"], described["videos"], described["width"], described["height"]) == (
        *("Wan2.2 5B", 2),
        *(128, 64),
    )


def test_a_latent_of_comfyui_is_read_as_it_is(tmp_path: Path) -> None:
    save_file({TENSOR: SAMPLES.half(), UNSCALED: torch.empty(0)}, tmp_path / "x.latent")
    stored = read_latent(tmp_path / "x.latent")
    assert stored.samples.dtype == torch.float32
    assert torch.equal(stored.samples, SAMPLES.half().float())
    assert stored.sigma == 0


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no room"):
        write_latent(tmp_path / "x.latent", SAMPLES)
    assert not [*tmp_path.iterdir()]


def test_a_file_is_replaced_only_by_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.latent"
    write_latent(path, SAMPLES)

    def killed(part: Path, content: bytes) -> None:
        with part.open("wb") as file:
            file.write(content[:-4])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "write_bytes", killed)
        write_latent(path, SAMPLES + 1)
    assert torch.equal(read_latent(path).samples, SAMPLES)
    write_latent(path, SAMPLES + 1)
    assert torch.equal(read_latent(path).samples, SAMPLES + 1)
    assert [*tmp_path.iterdir()] == [path]


def _stored(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> Callable[[Path], object]:
    return lambda path: save_file({**tensors, UNSCALED: torch.empty(0)}, path, metadata=metadata)


def _cut(path: Path) -> None:
    write_latent(path, SAMPLES)
    path.write_bytes(path.read_bytes()[:-4])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "does not exist"),
    "folder": (lambda path: path.mkdir(), "is a folder: choose a file of Wan Save Latent"),
    "text": (lambda path: path.write_text("a video"), "is not a latent file, or is incomplete"),
    "cut": (_cut, "is not a latent file, or is incomplete"),
    "weights": (
        _stored({"head.weight": torch.zeros(2)}),
        "has no tensor latent_tensor, but head.weight",
    ),
    "scaled": (lambda path: save_file({TENSOR: SAMPLES}, path), "was saved by an old ComfyUI"),
    "image": (_stored({TENSOR: torch.zeros(1, 4, 8, 8)}), r"has a latent \[1, 4, 8, 8\]"),
    "other model": (
        _stored({TENSOR: torch.zeros(1, 12, 2, 8, 8)}),
        "latents of 12 channels: a VAE of Wan has 16",
    ),
    "empty": (_stored({TENSOR: torch.zeros(1, 16, 0, 8, 8)}), r"has a latent \[1, 16, 0, 8, 8\]"),
    "integers": (_stored({TENSOR: torch.zeros(1, 16, 2, 8, 8, dtype=torch.int32)}), "torch.int32"),
    "not finite": (_stored({TENSOR: SAMPLES / 0}), "NaN or infinity"),
    "no object": (_stored({TENSOR: SAMPLES}, {DESCRIPTION: "[]"}), "malformed metadata"),
    "no number": (
        _stored({TENSOR: SAMPLES}, {DESCRIPTION: '{"sigma": "much"}'}),
        "malformed metadata",
    ),
    "400 digits": (
        _stored({TENSOR: SAMPLES}, {DESCRIPTION: '{"sigma": ' + "9" * 400 + "}"}),
        "malformed metadata",
    ),
    "5000 digits": (
        _stored({TENSOR: SAMPLES}, {DESCRIPTION: '{"sigma": ' + "9" * 5000 + "}"}),
        "malformed metadata",
    ),
    "deep": (_stored({TENSOR: SAMPLES}, {DESCRIPTION: "[" * 100_000}), "malformed metadata"),
    "deep, inside": (
        _stored({TENSOR: SAMPLES}, {DESCRIPTION: '{"sigma":' + '{"a":' * 100_000}),
        "malformed metadata",
    ),
    "no JSON": (_stored({TENSOR: SAMPLES}, {DESCRIPTION: "{'sigma'"}), "malformed metadata"),
    "NaN": (_stored({TENSOR: SAMPLES}, {DESCRIPTION: '{"sigma": NaN}'}), "noise level nan"),
    "noise level": (_stored({TENSOR: SAMPLES}, {DESCRIPTION: '{"sigma": 1.5}'}), "noise level 1.5"),
}


@pytest.mark.parametrize(("write", "reason"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_latent_is_refused_by_its_path(
    tmp_path: Path, write: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "x.latent"
    write(path)
    with pytest.raises(LatentFileError, match=reason) as refused:
        read_latent(path)
    assert str(path) in str(refused.value)

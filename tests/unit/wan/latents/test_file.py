"""Saved latents: what is written is read again, other files are refused."""

from __future__ import annotations

import errno
import json
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


def test_latent_comes_back_with_noise_level_and_description(tmp_path):
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


def test_size_is_in_pixels_of_the_model(tmp_path):
    write_latent(tmp_path / "x.latent", torch.zeros(2, 48, 1, 4, 8))
    with safe_open(tmp_path / "x.latent", framework="pt") as file:
        described = json.loads(file.metadata()[DESCRIPTION])
    found = [described[name] for name in ("models", "videos", "width", "height")]
    assert found == ["Wan2.2 5B", 2, 128, 64]


def test_latent_of_comfyui_is_read(tmp_path):
    save_file({TENSOR: SAMPLES.half(), UNSCALED: torch.empty(0)}, tmp_path / "x.latent")
    stored = read_latent(tmp_path / "x.latent")
    assert stored.samples.dtype == torch.float32
    assert torch.equal(stored.samples, SAMPLES.half().float())
    assert stored.sigma == 0


def test_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no room"):
        write_latent(tmp_path / "x.latent", SAMPLES)
    assert not [*tmp_path.iterdir()]


def test_file_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
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


def _stored(tensor, description=None):
    tensors = {TENSOR: tensor, UNSCALED: torch.empty(0)}
    metadata = None if description is None else {DESCRIPTION: description}
    return lambda path: save_file(tensors, path, metadata)


def _cut(path: Path) -> None:
    write_latent(path, SAMPLES)
    path.write_bytes(path.read_bytes()[:-4])


DESCRIPTIONS = {
    "no object": "[]",
    "no number": '{"sigma": "much"}',
    "400 digits": '{"sigma": ' + "9" * 400 + "}",
    "5000 digits": '{"sigma": ' + "9" * 5000 + "}",
    "deep": "[" * 100_000,
    "no JSON": "{'sigma'",
}
WRONG = {
    "missing": (lambda path: None, "does not exist"),
    "folder": (lambda path: path.mkdir(), "is a folder: choose a file of Wan Save Latent"),
    "text": (lambda path: path.write_text("a video"), "is not a latent file, or is incomplete"),
    "cut": (_cut, "is not a latent file, or is incomplete"),
    "weights": (
        lambda path: save_file({"head.weight": torch.zeros(2), UNSCALED: torch.empty(0)}, path),
        "has no tensor latent_tensor, but head.weight",
    ),
    "scaled": (lambda path: save_file({TENSOR: SAMPLES}, path), "was saved by an old ComfyUI"),
    "image": (_stored(torch.zeros(1, 4, 8, 8)), r"has a latent \[1, 4, 8, 8\]"),
    "other model": (_stored(torch.zeros(1, 12, 2, 8, 8)), "12 channels: a VAE of Wan has 16"),
    "empty": (_stored(torch.zeros(1, 16, 0, 8, 8)), r"has a latent \[1, 16, 0, 8, 8\]"),
    "integers": (_stored(torch.zeros(1, 16, 2, 8, 8, dtype=torch.int32)), "torch.int32"),
    "not finite": (_stored(SAMPLES / 0), "NaN or infinity"),
    **{name: (_stored(SAMPLES, text), "malformed metadata") for name, text in DESCRIPTIONS.items()},
    "NaN": (_stored(SAMPLES, '{"sigma": NaN}'), "noise level nan"),
    "noise level": (_stored(SAMPLES, '{"sigma": 1.5}'), "noise level 1.5"),
}


@pytest.mark.parametrize(("write", "reason"), WRONG.values(), ids=WRONG)
def test_other_file_is_refused_by_its_path(tmp_path, write, reason):
    path = tmp_path / "x.latent"
    write(path)
    with pytest.raises(LatentFileError, match=reason) as refused:
        read_latent(path)
    assert str(path) in str(refused.value)

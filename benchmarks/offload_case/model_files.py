"""Expert files: random weights in sharded diffusers folders, written once, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from wanstream.testing.weights import TinyShape, expert_config, random_values

from .shapes import CaseShape

EXPERTS = ("high", "low")
COMPLETE = "complete.json"
NAME = "diffusion_pytorch_model"


def expert_folders(work: Path, shape: CaseShape, *, device: str = "cpu") -> dict[str, Path]:
    """Return the folder by expert.

    Write missing ones as `shape.shards` bf16 files, one shard in RAM at a time.
    """
    names = (
        dict.fromkeys(EXPERTS, EXPERTS[0])
        if shape.one_set
        else dict(zip(EXPERTS, EXPERTS, strict=True))
    )
    folders = {expert: work / "experts" / shape.key / name for expert, name in names.items()}
    for seed, folder in enumerate(dict.fromkeys(folders.values())):
        if not (folder / COMPLETE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write(
                shape.expert,
                folder,
                shards=shape.shards,
                generator=torch.Generator(device).manual_seed(seed),
            )
    return folders


def weight_files(folder: Path) -> list[Path]:
    """Return every weight file below `folder`."""
    return sorted(path for path in folder.rglob("*") if path.suffix in {".safetensors", ".dat"})


def _write(expert: TinyShape, folder: Path, *, shards: int, generator: torch.Generator) -> None:
    # Only names and shapes are needed, and the values would fill the RAM.
    with torch.device("meta"):
        model = WanTransformer3DModel(**expert_config(expert))
    model.save_config(folder)
    tensors = {name: tensor.shape for name, tensor in model.state_dict().items()}
    places: dict[str, str] = {}
    for number, names in enumerate(_shares(tensors, shards), start=1):
        file = f"{NAME}-{number:05d}-of-{shards:05d}.safetensors"
        values = {
            name: random_values(name, tensors[name], generator).bfloat16().cpu() for name in names
        }
        save_file(values, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    size = 2 * sum(shape.numel() for shape in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / f"{NAME}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # Written last, so that an interrupted folder is written again.
    (folder / COMPLETE).write_text(json.dumps({"bytes": size}), encoding="utf-8")


def _shares(tensors: dict[str, torch.Size], shards: int) -> Iterator[list[str]]:
    """Split the names, in order, into exactly `shards` parts with about equal size."""
    total = sum(shape.numel() for shape in tensors.values())
    parts: list[list[str]] = [[] for _ in range(shards)]
    before = 0
    for name, shape in tensors.items():
        # `before` equals `total` at an empty last tensor, and the number would be one too high.
        parts[min(before * shards // total, shards - 1)].append(name)
        before += shape.numel()
    assert all(parts), f"{shards} shards are too many for {len(tensors)} tensors"
    yield from parts

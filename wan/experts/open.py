"""Opens the pair of experts that Wan2.2 A14B is made of, or one expert in its place, by value."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from pathlib import Path

import torch

from ...devices import AUTO, ComputeDtype, resolved_dtype
from ...schema import Storage
from ..checkpoint.detect import IMAGE_LAYER
from ..checkpoint.files import CheckpointError
from ..checkpoint.key_names import both_names
from ..checkpoint.open import Expert, open_expert
from .pair import ExpertPair
from .storage import STORAGES, tell_what_stays

__all__ = ["COMPUTE_DTYPES", "ExpertPair", "open_experts", "open_one_expert"]

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def open_experts(
    high_noise: str | PathLike[str],
    low_noise: str | PathLike[str] | None = None,
    *,
    compute_dtype: ComputeDtype = AUTO,
    storage: Storage = "as stored",
    direct: bool | None = None,
    shared: bool = False,
) -> ExpertPair:
    """Open both experts without loading them: only the headers of their files are read.

    Args:
        high_noise: the expert of the early steps: a safetensors file (diffusers' or ComfyUI's keys; fp32, fp16, bf16,
            fp8 with scales or without) or a GGUF file, or a diffusers transformer folder. A diffusers pipeline folder
            stands for both experts.
        low_noise: the expert of the late steps, likewise.
        compute_dtype: bf16, fp16 or fp32; or "auto": `auto_dtype` of the GPU if there is one, otherwise of the CPU.
            Give `auto_dtype(device)` for another device. What diffusers keeps in fp32 stays in fp32 in any case.
        storage: "as stored", or "fp8": the matrices of the blocks are kept in RAM and moved in fp8 (e4m3fn) with one
            scale for each row, which halves both for a bf16 or fp16 file. They are quantised while they are read, and
            decoded on arrival. Matrices that are fp8 already or packed (GGUF) stay as they are.
        direct: read blocks past the page cache (O_DIRECT); None: where that pays.
        shared: other processes of this machine open the same experts: what a policy keeps in RAM is there once for all
            of them, and what it reads from files comes through the page cache unless `direct` says otherwise. Homes do
            not roll then.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor GGUF.
        CheckpointError: the tensors are not those of an A14B expert, or the two experts do not belong together.
        ValueError: another compute dtype or storage.
    """
    dtype = _checked(compute_dtype, storage)
    high_path, low_path = _expert_paths(Path(high_noise), None if low_noise is None else Path(low_noise))
    high, low = open_expert(high_path), open_expert(low_path)
    for expert in (high, low):
        _refuse_ti2v(expert)
    _check_pair(high, low)
    _refuse_image_branch(high)
    tell_what_stays((high, low), storage)
    return ExpertPair(high=high, low=low, compute_dtype=dtype, storage=storage, direct=direct, shared=shared)


def open_one_expert(
    path: str | PathLike[str],
    *,
    compute_dtype: ComputeDtype = AUTO,
    storage: Storage = "as stored",
    direct: bool | None = None,
    shared: bool = False,
) -> ExpertPair:
    """Open a model that is one expert, which runs every step: Wan2.1 T2V (1.3B and 14B) and I2V (14B), Wan2.2 TI2V-5B.

    It takes the place "high" of the pair, and a request has all of its steps there (`boundary_ratio` 0).

    Args:
        path: as an expert of `open_experts`; of a diffusers pipeline folder, its transformer.

    Raises as `open_experts`; a folder with two transformers is refused, and so is an image-to-video file that has no
    image branch.
    """
    dtype = _checked(compute_dtype, storage)
    expert = open_expert(_one_path(Path(path)))
    _require_image_branch(expert)
    tell_what_stays([expert], storage)
    return ExpertPair(high=expert, low=expert, compute_dtype=dtype, storage=storage, direct=direct, shared=shared)


def _refuse_ti2v(expert: Expert) -> None:
    if expert.config.family == "ti2v":
        raise CheckpointError(
            expert.path,
            f"is Wan2.2 TI2V-5B ({expert.config.in_channels} channels), which is one expert and none of a pair; the "
            "experts of Wan2.2 A14B have 16 or 36 channels: open it as one expert",
        )


def _refuse_image_branch(expert: Expert) -> None:
    if expert.config.image_dim is not None:
        raise CheckpointError(
            expert.path,
            "has an image branch, which Wan2.1 I2V has and no expert of Wan2.2 A14B: open it as one expert",
        )


def _require_image_branch(expert: Expert) -> None:
    if expert.config.family == "i2v" and expert.config.image_dim is None:
        raise CheckpointError(
            expert.path,
            f"has no image branch ({both_names(IMAGE_LAYER)} is missing), which Wan2.1 I2V needs: choose its whole "
            "file; or, if this is an expert of Wan2.2 I2V A14B, open it as a pair, with the other expert",
        )


def _checked(compute_dtype: ComputeDtype, storage: Storage) -> torch.dtype:
    """The dtype to compute in. Raises ValueError for settings that cannot be."""
    dtype = resolved_dtype(compute_dtype)
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"compute_dtype is {compute_dtype}; {', '.join(map(str, COMPUTE_DTYPES))} or 'auto' can be computed with"
        )
    if storage not in STORAGES:
        raise ValueError(f"storage is {storage!r}; blocks can be kept {' or '.join(map(repr, STORAGES))}")
    return dtype


def _one_path(path: Path) -> Path:
    """The path of the only expert; a pipeline folder holds it."""
    if not path.exists():
        raise CheckpointError(path, "does not exist")
    if (path / "transformer_2").is_dir():
        raise CheckpointError(
            path, "holds two transformers, as Wan2.2 A14B does: open it as a pair of experts, or give one transformer"
        )
    return path / "transformer" if (path / "transformer").is_dir() else path


def _expert_paths(high: Path, low: Path | None) -> tuple[Path, Path]:
    """The path of each expert; a pipeline folder holds both."""
    if low is not None:
        return high, low
    if not high.exists():
        raise CheckpointError(high, "does not exist")
    if not (high / "transformer").is_dir():
        raise CheckpointError(
            high,
            "is one expert: give the low-noise expert too, or a pipeline folder (transformer, transformer_2); a model "
            "that has no other (Wan2.1, Wan2.2 TI2V-5B) is opened as one expert",
        )
    if not (high / "transformer_2").is_dir():
        raise CheckpointError(high, "has no transformer_2: Wan2.2 A14B has two transformers; open this as one expert")
    return high / "transformer", high / "transformer_2"


def _check_pair(high: Expert, low: Expert) -> None:
    if high.config.family != low.config.family:
        raise CheckpointError(
            low.path,
            f"is {low.config.family.upper()}, but the high-noise expert {high.path} is {high.config.family.upper()}",
        )
    sizes, others = asdict(low.config), asdict(high.config)
    for size, value in sizes.items():
        if value != others[size]:
            raise CheckpointError(
                low.path,
                f"does not belong to {high.path}: {size} is {value} in the one and {others[size]} in the other",
            )

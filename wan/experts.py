"""Opens the pair of experts that Wan2.2 A14B is made of, by value."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from pathlib import Path

import torch

from ..plan import Storage
from .block_storage import STORAGES, tell_what_stays
from .checkpoint import Expert, open_expert
from .expert_pair import ExpertPair
from .stored import CheckpointError

__all__ = ["COMPUTE_DTYPES", "ExpertPair", "open_experts"]

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def open_experts(
    high_noise: str | PathLike[str],
    low_noise: str | PathLike[str] | None = None,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
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
        compute_dtype: bf16, fp16 or fp32. What diffusers keeps in fp32 stays in fp32 whatever is asked here.
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
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"compute_dtype is {compute_dtype}; {', '.join(map(str, COMPUTE_DTYPES))} can be computed with"
        )
    if storage not in STORAGES:
        raise ValueError(f"storage is {storage!r}; blocks can be kept {' or '.join(map(repr, STORAGES))}")
    high_path, low_path = _expert_paths(Path(high_noise), None if low_noise is None else Path(low_noise))
    high, low = open_expert(high_path), open_expert(low_path)
    _check_pair(high, low)
    tell_what_stays((high, low), storage)
    return ExpertPair(high=high, low=low, compute_dtype=compute_dtype, storage=storage, direct=direct, shared=shared)


def _expert_paths(high: Path, low: Path | None) -> tuple[Path, Path]:
    """The path of each expert; a pipeline folder holds both."""
    if low is not None:
        return high, low
    if not high.exists():
        raise CheckpointError(high, "does not exist")
    if not (high / "transformer").is_dir():
        raise CheckpointError(
            high, "is one expert: give the low-noise expert too, or a pipeline folder (transformer, transformer_2)"
        )
    if not (high / "transformer_2").is_dir():
        raise CheckpointError(high, "has no transformer_2: this pipeline has one transformer, Wan2.2 A14B has two")
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

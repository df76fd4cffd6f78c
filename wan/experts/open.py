"""Opening of experts by value: pair, single model, and a registry with the last open pair."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ...block_kernels import INDUCTOR, Kernels, check_installed
from ...devices import AUTO, ComputeDtype, resolve_dtype
from ...schema.refs import Arithmetic, ExpertsRef, LoraRef, Storage
from ..checkpoint.detect import IMAGE_LAYER, KNOWN_CHANNELS, LATENT_CHANNELS, PAIR_CHANNELS
from ..checkpoint.files import CheckpointError
from ..checkpoint.key_names import both_names
from ..checkpoint.open import Expert, open_expert
from ..lora.file import open_lora
from .pair import ExpertPair
from .storage import MULTIPLIED, STORAGES, Precision, log_unquantised

ARITHMETIC_CHOICES: tuple[Arithmetic, ...] = ("auto", "decoded", "as stored")
COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def open_experts(
    high_noise: str | PathLike[str],
    low_noise: str | PathLike[str] | None = None,
    *,
    compute_dtype: ComputeDtype = AUTO,
    storage: Storage = "as stored",
    arithmetic: Arithmetic = "decoded",
    direct: bool | None = None,
    shared: bool = False,
) -> ExpertPair:
    """Open both experts without loading them. Only headers are read.

    Args:
        high_noise: expert for the early steps: a safetensors file (diffusers' or ComfyUI's keys;
            fp32, fp16, bf16, fp8 with or without scales, int8, mxfp8, nvfp4), a GGUF file, or a
            diffusers transformer folder. A diffusers pipeline folder contains both experts.
        low_noise: expert for the late steps, likewise. None with a pipeline folder.
        compute_dtype: bf16, fp16, fp32 or "auto": `auto_dtype` of the GPU if there is one,
            otherwise of the CPU. Pass `auto_dtype(device)` for another device. Parameters that
            diffusers keeps in fp32 are always in fp32.
        storage: form of the block matrices in RAM and on the bus. "as stored", or "fp8" (e4m3fn) or
            "int8 ConvRot" with one scale per row, which halve RAM and transfers for a bf16 or fp16
            file. Matrices are quantised while they are read. "int8 ConvRot" also quantises fp8
            matrices. Other matrices that are quantised in the file are unchanged.
        arithmetic: "decoded": decode all matrices to `compute_dtype`. "as stored": multiply by int8
            and fp8 (e4m3fn) matrices as they are stored, including those from `storage`, which
            halves the buffers. "int8", "fp8": do so for one format. LoRAs are then not added to
            these matrices but computed next to them. int8 is slow on a CPU. The engine raises
            KernelsError on an unsupported device. `with_resolved_precision` replaces "auto".
        direct: read blocks past the page cache (O_DIRECT). None: where this is faster.
        shared: other processes on this machine open the same experts. They then share blocks in
            RAM, and read files through the page cache unless `direct` is True.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor
            GGUF.
        CheckpointError: the tensors are not those of an A14B expert, or the two experts do not
            belong together.
        ValueError: unsupported compute dtype, storage or arithmetic.
    """
    precision = _precision(compute_dtype, storage, arithmetic)
    high, low = map(open_expert, _expert_paths(Path(high_noise), low_noise))
    _check_pair(high, low)
    log_unquantised((high, low), storage)
    return ExpertPair(high=high, low=low, precision=precision, direct=direct, shared=shared)


def open_single_model(
    path: str | PathLike[str],
    *,
    compute_dtype: ComputeDtype = AUTO,
    storage: Storage = "as stored",
    arithmetic: Arithmetic = "decoded",
    shared: bool = False,
) -> ExpertPair:
    """Open a single model for every step: Wan2.1 T2V, I2V, Fun Control, Wan2.2 TI2V-5B or Fun 5B.

    The model takes the place "high" in the pair. Requests run all steps there (`boundary_ratio` 0).

    Args:
        path: file or folder, as for `open_experts`, or a diffusers pipeline folder with one
            transformer.
        compute_dtype: as for `open_experts`.
        storage: as for `open_experts`.
        arithmetic: as for `open_experts`.
        shared: as for `open_experts`.

    Raises:
        CheckpointFileError: as `open_experts`.
        CheckpointError: the folder has two transformers, the tensors do not form such a model, an
            image-to-video model has no image branch, or the file is an expert from a pair.
        ValueError: as `open_experts`.
    """
    precision = _precision(compute_dtype, storage, arithmetic)
    expert = open_expert(_one_path(Path(path)))
    _require_single(expert)
    log_unquantised([expert], storage)
    return ExpertPair(high=expert, low=expert, precision=precision, direct=None, shared=shared)


def _require_single(expert: Expert) -> None:
    channels = expert.config.in_channels
    if expert.config.family == "control" and channels in PAIR_CHANNELS:
        reason = f"is an expert of Fun Control of Wan2.2 A14B ({channels} channels), which has two"
        raise CheckpointError(expert.path, f"{reason}: open it as a pair, with the other expert")
    if expert.config.family == "i2v" and expert.config.image_dim is None:
        raise CheckpointError(
            expert.path,
            f"has no image branch ({both_names(IMAGE_LAYER)} is missing), which Wan2.1 I2V needs: "
            "choose its whole file; or, if this is an expert of Wan2.2 I2V A14B, open it as a "
            "pair, with the other expert",
        )


def _precision(compute_dtype: ComputeDtype, storage: Storage, arithmetic: Arithmetic) -> Precision:
    """Return the form of the weights.

    Raises ValueError for an unsupported dtype, storage or arithmetic.
    """
    dtype = resolve_dtype(compute_dtype)
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"compute_dtype is {compute_dtype}; {', '.join(map(str, COMPUTE_DTYPES))} or 'auto' "
            "can be computed with"
        )
    if storage not in STORAGES:
        raise ValueError(
            f"storage is {storage!r}; blocks can be kept {' or '.join(map(repr, STORAGES))}"
        )
    if arithmetic not in MULTIPLIED:
        raise ValueError(
            f"arithmetic is {arithmetic!r}; choose {' or '.join(map(repr, MULTIPLIED))}"
        )
    return Precision(compute_dtype=dtype, storage=storage, arithmetic=arithmetic)


def _one_path(path: Path) -> Path:
    """Return a single model's path, which may be the transformer in a pipeline folder."""
    if not path.exists():
        raise CheckpointError(path, "does not exist")
    if (path / "transformer_2").is_dir():
        reason = "holds two transformers, as Wan2.2 A14B does: open it as a pair of experts"
        raise CheckpointError(path, f"{reason}, or give one transformer")
    if (path / "transformer").is_dir():
        return path / "transformer"
    return path


def _expert_paths(high: Path, low: str | PathLike[str] | None) -> tuple[Path, Path]:
    """Return the path of each expert. A pipeline folder contains both."""
    if low is not None:
        return high, Path(low)
    if not high.exists():
        raise CheckpointError(high, "does not exist")
    if not (high / "transformer").is_dir():
        raise CheckpointError(
            high,
            "is one expert: give the low-noise expert too, or a pipeline folder (transformer, "
            "transformer_2); open Wan2.1 and Wan2.2 TI2V-5B as a single model",
        )
    if not (high / "transformer_2").is_dir():
        raise CheckpointError(
            high,
            "has no transformer_2: Wan2.2 A14B has two transformers; open this as a single model",
        )
    return high / "transformer", high / "transformer_2"


def _check_pair(high: Expert, low: Expert) -> None:
    for expert in (high, low):
        channels = expert.config.in_channels, expert.config.out_channels
        if channels[0] not in PAIR_CHANNELS or channels[1] != LATENT_CHANNELS:
            *others, last = PAIR_CHANNELS
            raise CheckpointError(
                expert.path,
                f"is {KNOWN_CHANNELS[channels]} ({channels[0]} channels), which is a single model; "
                f"the experts of Wan2.2 A14B have {', '.join(map(str, others))} or {last} "
                "channels: open it as a single model (Wan Model (single))",
            )
    if high.config.family != low.config.family:
        raise CheckpointError(
            low.path,
            f"is {low.config.family.upper()}, but the high-noise expert is not: use two T2V or two "
            f"I2V files ({high.path.name} is {high.config.family.upper()})",
        )
    for size, value in vars(low.config).items():
        other = getattr(high.config, size)
        if value != other:
            raise CheckpointError(
                low.path,
                f"does not belong to {high.path}: {size} is {value} in this one and {other} in the "
                "other",
            )
    if high.config.image_dim is not None:
        reason = "has an image branch, so it is Wan2.1 I2V and not an expert of Wan2.2 A14B"
        raise CheckpointError(high.path, f"{reason}: open it as a single model")


def open_pair(ref: ExpertsRef, *, shared: bool = False) -> ExpertPair:
    """Open the experts in `ref` without its LoRAs. Only headers are read.

    `shared` is the argument of `open_experts`.
    """
    dtype: ComputeDtype = AUTO
    if ref.compute_dtype != AUTO:
        dtype = getattr(torch, ref.compute_dtype)
    form: dict[str, Any] = {
        "compute_dtype": dtype,
        "storage": ref.storage,
        "arithmetic": ref.arithmetic,
    }
    if ref.single:
        return open_single_model(ref.high_noise, **form, shared=shared)
    return open_experts(ref.high_noise, ref.low_noise, **form, shared=shared)


def set_loras(pair: ExpertPair, refs: Sequence[LoraRef]) -> None:
    """Open the LoRAs in `refs` and set them on `pair`. Only headers and alphas are read."""
    pair.set_loras(
        high=[(open_lora(ref.high_noise), ref.high) for ref in refs if ref.high_noise is not None],
        low=[(open_lora(ref.low_noise), ref.low) for ref in refs if ref.low_noise is not None],
    )


class ExpertsRegistry:
    """Thread-safe registry for at most one open pair, looked up by value.

    A later run of the same graph reuses the open pair unless a file has changed. Another pair
    closes the open one first, so that two pairs never share the device. New LoRAs or kernels do not
    close the pair.
    """

    def __init__(self, open_pair: Callable[[ExpertsRef], ExpertPair] = open_pair) -> None:
        self._open_pair = open_pair
        self._lock = threading.Lock()
        self._pair: ExpertPair | None = None
        self._ref: ExpertsRef | None = None
        """Of the open pair."""
        self._loras: tuple[LoraRef, ...] = ()
        self._kernels = Kernels()

    def get(self, ref: ExpertsRef) -> ExpertPair:
        """Return the pair for `ref` with LoRAs and kernels set, opened unless it is open.

        If the LoRAs or kernels are refused, an open pair is unchanged.

        Raises:
            KernelsError: the kernels are not installed.
            OSError: as `open_pair` and `set_loras`.
            ValueError: as `open_pair` and `set_loras`.
        """
        kernels = Kernels(
            math=ref.kernels, attention=ref.attention, compiler=INDUCTOR if ref.compile else None
        )
        # First, so that missing kernels do not close the open pair.
        check_installed(kernels)
        with self._lock:
            pair = self._pair
            if pair is None or self._ref != ref.opened or not pair.is_current():
                self._close()
                pair = self._open_pair(ref.opened)
                # Kept before the LoRAs are set: a refused LoRA must not cost the opened pair.
                self._pair = pair
                self._ref = ref.opened
            if self._loras != ref.loras or not pair.loras_are_current():
                set_loras(pair, ref.loras)
                self._loras = ref.loras
            if self._kernels != kernels:
                pair.kernels = self._kernels = kernels
            return pair

    def free(self) -> None:
        """Close the open pair, if any."""
        with self._lock:
            self._close()

    @property
    def loaded_bytes(self) -> int:
        """Device memory of the open pair, in bytes. 0 if none is open."""
        pair = self._pair  # without the lock, which `get` keeps while it opens a pair
        return pair.loaded_bytes if pair is not None else 0

    def _close(self) -> None:
        pair = self._pair
        # Forgotten first, so a pair whose closing fails is not returned again.
        self._pair = None
        self._loras = ()
        self._kernels = Kernels()
        if pair is not None:
            pair.close()

"""Opening of experts by value: a pair, a single model, and the registry that keeps the last one open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import torch

from ...devices import AUTO, ComputeDtype, resolve_dtype
from ...schema import Arithmetic, CodeFormat, ExpertsRef, LoraRef, Storage
from ..checkpoint.detect import IMAGE_LAYER, KNOWN_CHANNELS, LATENT_CHANNELS, PAIR_CHANNELS
from ..checkpoint.files import CheckpointError
from ..checkpoint.key_names import both_names
from ..checkpoint.open import Expert, open_expert
from ..kernels.attention import INDUCTOR, Kernels, check_installed
from ..kernels.multiplication import CODE_FORMATS
from ..lora.file import open_lora
from .pair import ExpertPair
from .storage import MULTIPLIED, STORAGES, log_unquantised

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
    """Open both experts without loading them; only the headers of their files are read.

    Args:
        high_noise: expert of the early steps: a safetensors file (diffusers' or ComfyUI's keys; fp32, fp16, bf16, fp8
            with or without scales, int8, mxfp8, nvfp4), a GGUF file, or a diffusers transformer folder. A diffusers
            pipeline folder contains both experts.
        low_noise: expert of the late steps, likewise; None with a pipeline folder.
        compute_dtype: bf16, fp16, fp32 or "auto": `auto_dtype` of the GPU if there is one, otherwise of the CPU. Pass
            `auto_dtype(device)` for another device. Parameters that diffusers keeps in fp32 are always in fp32.
        storage: form of the blocks' matrices in RAM and on the bus. "as stored"; "fp8" (e4m3fn) and "int8 ConvRot",
            with one scale per row, halve RAM and transfers for a bf16 or fp16 file. Matrices are quantised while they
            are read. "int8 ConvRot" also quantises fp8 matrices; otherwise those that are quantised in the file are
            unchanged.
        arithmetic: "decoded": decode all matrices to `compute_dtype`; "as stored": multiply by int8 and fp8 (e4m3fn)
            matrices as they are stored, those of `storage` included, which halves the buffers; "int8", "fp8": do so for
            matrices of one format. LoRAs are then not added to these matrices but computed beside them. int8 is slow on
            a CPU. The engine raises KernelsError on a device that cannot. `with_resolved_precision` replaces "auto".
        direct: read blocks past the page cache (O_DIRECT); None: where this is faster.
        shared: other processes of this machine open the same experts. Blocks in RAM are then shared by all of them, and
            files are read through the page cache unless `direct` is True.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor GGUF.
        CheckpointError: the tensors are not those of an A14B expert, or the two experts do not belong together.
        ValueError: the compute dtype, the storage or the arithmetic is not one of the above.
    """
    dtype = _checked(compute_dtype, storage, arithmetic)
    high_path, low_path = _expert_paths(Path(high_noise), None if low_noise is None else Path(low_noise))
    high, low = open_expert(high_path), open_expert(low_path)
    _check_pair(high, low)
    log_unquantised((high, low), storage)
    form: _Form = {"compute_dtype": dtype, "storage": storage, "arithmetic": arithmetic}
    return ExpertPair(high=high, low=low, **form, direct=direct, shared=shared)


def open_single_model(
    path: str | PathLike[str],
    *,
    compute_dtype: ComputeDtype = AUTO,
    storage: Storage = "as stored",
    arithmetic: Arithmetic = "decoded",
    direct: bool | None = None,
    shared: bool = False,
) -> ExpertPair:
    """Open a single model, which runs every step: Wan2.1 T2V, I2V or Fun Control, Wan2.2 TI2V-5B or Fun 5B.

    The model takes the place "high" of the pair. Requests run all of their steps there (`boundary_ratio` 0).

    Args:
        path: file or folder, as for `open_experts`, or a diffusers pipeline folder with one transformer.
        compute_dtype: as for `open_experts`.
        storage: as for `open_experts`.
        arithmetic: as for `open_experts`.
        direct: as for `open_experts`.
        shared: as for `open_experts`.

    Raises:
        CheckpointFileError: as `open_experts`.
        CheckpointError: the folder has two transformers, the tensors are not those of such a model, an image-to-video
            model has no image branch, or the file is an expert of a pair.
        ValueError: as `open_experts`.
    """
    dtype = _checked(compute_dtype, storage, arithmetic)
    expert = open_expert(_one_path(Path(path)))
    _require_single(expert)
    log_unquantised([expert], storage)
    form: _Form = {"compute_dtype": dtype, "storage": storage, "arithmetic": arithmetic}
    return ExpertPair(high=expert, low=expert, **form, direct=direct, shared=shared)


def _require_single(expert: Expert) -> None:
    channels = expert.config.in_channels
    if expert.config.family == "control" and channels in PAIR_CHANNELS:
        raise CheckpointError(
            expert.path,
            f"is an expert of Fun Control of Wan2.2 A14B ({channels} channels), which has two: open it as a pair, with "
            "the other expert",
        )
    if expert.config.family == "i2v" and expert.config.image_dim is None:
        raise CheckpointError(
            expert.path,
            f"has no image branch ({both_names(IMAGE_LAYER)} is missing), which Wan2.1 I2V needs: choose its whole "
            "file; or, if this is an expert of Wan2.2 I2V A14B, open it as a pair, with the other expert",
        )


class _Form(TypedDict):
    """Form of the weights in RAM and in the computation."""

    compute_dtype: torch.dtype
    storage: Storage
    arithmetic: Arithmetic


def _checked(compute_dtype: ComputeDtype, storage: Storage, arithmetic: Arithmetic) -> torch.dtype:
    """Return the compute dtype. Raises ValueError for an unsupported dtype, storage or arithmetic."""
    dtype = resolve_dtype(compute_dtype)
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"compute_dtype is {compute_dtype}; {', '.join(map(str, COMPUTE_DTYPES))} or 'auto' can be computed with"
        )
    if storage not in STORAGES:
        raise ValueError(f"storage is {storage!r}; blocks can be kept {' or '.join(map(repr, STORAGES))}")
    if arithmetic not in MULTIPLIED:
        raise ValueError(f"arithmetic is {arithmetic!r}; choose {' or '.join(map(repr, MULTIPLIED))}")
    return dtype


def _one_path(path: Path) -> Path:
    """Return the path of a single model, the transformer of a pipeline folder included."""
    if not path.exists():
        raise CheckpointError(path, "does not exist")
    if (path / "transformer_2").is_dir():
        raise CheckpointError(
            path, "holds two transformers, as Wan2.2 A14B does: open it as a pair of experts, or give one transformer"
        )
    return path / "transformer" if (path / "transformer").is_dir() else path


def _expert_paths(high: Path, low: Path | None) -> tuple[Path, Path]:
    """Return the path of each expert; a pipeline folder contains both."""
    if low is not None:
        return high, low
    if not high.exists():
        raise CheckpointError(high, "does not exist")
    if not (high / "transformer").is_dir():
        raise CheckpointError(
            high,
            "is one expert: give the low-noise expert too, or a pipeline folder (transformer, transformer_2); open "
            "Wan2.1 and Wan2.2 TI2V-5B as a single model",
        )
    if not (high / "transformer_2").is_dir():
        raise CheckpointError(
            high, "has no transformer_2: Wan2.2 A14B has two transformers; open this as a single model"
        )
    return high / "transformer", high / "transformer_2"


def _or(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}"


def _check_pair(high: Expert, low: Expert) -> None:
    for expert in (high, low):
        channels = expert.config.in_channels, expert.config.out_channels
        if channels[0] not in PAIR_CHANNELS or channels[1] != LATENT_CHANNELS:
            raise CheckpointError(
                expert.path,
                f"is {KNOWN_CHANNELS[channels]} ({channels[0]} channels), which is a single model; the experts of "
                f"Wan2.2 A14B have {_or(PAIR_CHANNELS)} channels: open it as a single model (Wan Model (single))",
            )
    if high.config.family != low.config.family:
        raise CheckpointError(
            low.path,
            f"is {low.config.family.upper()}, but the high-noise expert is not: use two T2V or two I2V files "
            f"({high.path.name} is {high.config.family.upper()})",
        )
    sizes, others = asdict(low.config), asdict(high.config)
    for size, value in sizes.items():
        if value != others[size]:
            raise CheckpointError(
                low.path,
                f"does not belong to {high.path}: {size} is {value} in this one and {others[size]} in the other",
            )
    if high.config.image_dim is not None:
        raise CheckpointError(
            high.path,
            "has an image branch, so it is Wan2.1 I2V and not an expert of Wan2.2 A14B: open it as a single model",
        )


def arithmetic_of(formats: Collection[CodeFormat]) -> Arithmetic:
    """Return what "as stored" means where matrices in these formats can be multiplied."""
    if len(formats) == len(CODE_FORMATS):
        return "as stored"
    return next(iter(formats), "decoded")


def open_pair(ref: ExpertsRef, *, shared: bool = False) -> ExpertPair:
    """Open the experts of `ref` without its LoRAs; only headers are read. `shared` is that of `open_experts`."""
    dtype: ComputeDtype = AUTO if ref.compute_dtype == AUTO else getattr(torch, ref.compute_dtype)
    form: dict[str, Any] = {"compute_dtype": dtype, "storage": ref.storage, "arithmetic": ref.arithmetic}
    if ref.single:
        return open_single_model(ref.high_noise, **form, shared=shared)
    return open_experts(ref.high_noise, ref.low_noise, **form, shared=shared)


def set_loras(pair: ExpertPair, refs: Sequence[LoraRef]) -> None:
    """Open the LoRAs of `refs` and set them on `pair`; only headers and alphas are read."""
    pair.set_loras(
        high=[(open_lora(ref.high_noise), ref.high) for ref in refs if ref.high_noise is not None],
        low=[(open_lora(ref.low_noise), ref.low) for ref in refs if ref.low_noise is not None],
    )


class ExpertsRegistry:
    """Thread-safe registry of at most one open pair, looked up by value.

    A later run of the same graph reuses the open pair unless its files have changed. Another pair closes the open one
    first, so that two pairs never share the device. New LoRAs or kernels do not close the pair.
    """

    def __init__(self, open_pair: Callable[[ExpertsRef], ExpertPair] = open_pair) -> None:
        self._open_pair = open_pair
        self._lock = threading.Lock()
        self._entry: tuple[ExpertsRef, ExpertPair] | None = None
        self._loras: tuple[LoraRef, ...] = ()
        self._kernels = Kernels()

    def get(self, ref: ExpertsRef) -> ExpertPair:
        """Return the pair of `ref` with its LoRAs and kernels set; opens it unless it is open.

        If the LoRAs or kernels are refused, an open pair is unchanged.

        Raises:
            KernelsError: the kernels are not installed.
            OSError: as `open_pair` and `set_loras`.
            ValueError: as `open_pair` and `set_loras`.
        """
        kernels = Kernels(math=ref.kernels, attention=ref.attention, compiler=INDUCTOR if ref.compile else None)
        check_installed(kernels)
        with self._lock:
            if self._entry is None or self._entry[0] != ref.opened or not self._entry[1].is_current():
                self._close()
                self._entry = (ref.opened, self._open_pair(ref.opened))
            pair = self._entry[1]
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
        """Bytes of device memory of the open pair; 0 if none is open."""
        entry = self._entry  # a copy without the lock, because `get` keeps it while a pair is opened
        return 0 if entry is None else entry[1].loaded_bytes

    def _close(self) -> None:
        entry, self._entry = self._entry, None
        self._loras, self._kernels = (), Kernels()
        if entry is not None:
            entry[1].close()

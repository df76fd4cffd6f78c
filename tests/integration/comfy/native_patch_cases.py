"""Runs in ComfyUI's own Python: patches of native models that stream, compared with ComfyUI's own models.

`answers(folder)` returns one JSON value per case; `test_native_patches.py` checks the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.sd
import comfy.utils
import native_families as families
import torch
from guider_cases import _told
from installed_pack import load_pack
from safetensors.torch import load_file, save_file

load_pack()
from wanstream.host.comfy.native_model import WEIGHT_DTYPES  # noqa: E402
from wanstream.host.comfy.native_run import load_native  # noqa: E402
from wanstream.host.comfy.stream_model import stream_model  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

POLICY = OffloadPolicy.layerwise(1)
SWAP = OffloadPolicy.block_swap(2, prefetch_blocks=1)
LIMITS = {"smallest_block": 200_000, "smallest_model": 1000}
NUMBER_FORMATS = {"fp32": "default", "bf16": "bf16", "fp8": "fp8_e4m3fn"}
"""Loader's weight type by number format of the file; "bf16" keeps bf16 weights, which the CPU casts to compute."""


class Side:
    """One model: its file in every number format, loaded by ComfyUI and by us, and LoRAs for it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.family = folder, families.FAMILIES[name]
        with torch.inference_mode(False):
            for dtype in NUMBER_FORMATS:
                self.family.write(self.file(dtype), dtype)
        state = self.native("fp32").model.diffusion_model.state_dict()
        self.shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}

    def file(self, dtype: str) -> Path:
        return self.folder / f"{self.family.name}_{dtype}.safetensors"

    def native(self, dtype: str) -> Any:
        return families.native(self.file(dtype), self.family, weight_dtype=NUMBER_FORMATS[dtype])

    def streamed(self, dtype: str, policy: OffloadPolicy = POLICY) -> Any:
        return load_native(self.file(dtype), NUMBER_FORMATS[dtype], policy, **LIMITS)

    def lora(self, kind: str, *, beside: bool = True) -> Path:
        """Return a LoRA; `beside` the blocks too."""
        path = self.folder / f"{self.family.name}_{kind}_{beside}.safetensors"
        shapes = self.shapes if beside else {key: shape for key, shape in self.shapes.items() if "blocks." in key}
        if not path.exists():
            families.write_lora(kind, path, shapes)
        return path

    def sample(self, model: Any, **settings: Any) -> torch.Tensor:
        return families.sample(model, self.family, **{"steps": 2, **settings})


def _with_lora(model: Any, path: Path, strength: float = 1.0) -> Any:
    return comfy.sd.load_lora_for_models(model, None, load_file(path), strength, 0)[0]


def _low_vram(model: Any) -> Any:
    """Return the MODEL, which keeps all weights in RAM and patches each when it is used."""
    load = model.partially_load
    model.partially_load = lambda device, extra_memory=0, **settings: load(device, extra_memory=1, **settings)
    return model


def kind_case(side: Side, kind: str, dtype: str) -> object:
    """LoRAs of one kind in one number format; natively baked into fp32, else added to the weights when they are used."""
    whole = dtype == "fp32"
    lora = side.lora(kind, beside=whole)
    native = _with_lora(side.native(dtype), lora)
    theirs = side.sample(native if whole else _low_vram(native))
    streamed = side.streamed(dtype)
    ours = side.sample(_with_lora(streamed, lora))
    return {"equal": torch.equal(ours, theirs), "effect": float((ours - side.sample(streamed)).abs().max())}


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per case. ComfyUI runs nodes in inference mode as well."""
    torch.set_num_threads(1)
    options = {**families.WEIGHT_DTYPES, "bf16": {"dtype": torch.bfloat16}}
    with (
        patch.dict(WEIGHT_DTYPES, {"bf16": torch.bfloat16}),
        patch.object(families, "WEIGHT_DTYPES", options),
    ):
        wan, flux = Side(Path(folder), "wan_t2v"), Side(Path(folder), "flux")
        cases: dict[str, Callable[[], object]] = {
            **{
                f"{kind} {side.family.name} {dtype}": partial(kind_case, side, kind, dtype)
                for side in (wan, flux)
                for kind in families.LORAS
                for dtype in NUMBER_FORMATS
                if kind != "offset" or side is flux
            },
        }
        return {name: _told(case) for name, case in cases.items()}

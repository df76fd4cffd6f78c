"""Runs in ComfyUI's own Python: streamed native models compared with those that ComfyUI loads, sampler by sampler.

`answers(folder)` returns one JSON value per case; `test_native_models.py` checks the values. Both models come from one
file of `native_families`, and run with the same input.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.controlnet
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sample
import native_families
import torch
from installed_pack import load_pack
from native_families import FAMILIES, Family, sample

load_pack()
from wanstream.host.comfy.native_run import load_native  # noqa: E402
from wanstream.offload.engine.run import EngineRun  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

LIMITS = {"smallest_block": 30_000, "smallest_model": 1_000}
"""Sizes of the blocks of the tiny models."""

FORMATS = {
    "bf16": ("bf16", "default"),
    "fp16": ("fp16", "default"),
    "fp32": ("fp32", "default"),
    "fp8": ("fp8", "default"),
    "fp8 kept": ("fp8", "fp8_e4m3fn"),
}
"""Number format of a file, and the weight type with which it is loaded: only the last keeps fp8 on the device."""

POLICIES: dict[str, Callable[[int], OffloadPolicy]] = {
    "layerwise": lambda _: OffloadPolicy.layerwise(1),
    "block swap": lambda blocks: OffloadPolicy.block_swap(blocks // 2),
    "resident": lambda _: OffloadPolicy.resident(),
}
"""Policies for a number of blocks."""

WrappersMP = comfy.patcher_extension.WrappersMP
Run = Callable[[Any], torch.Tensor]
"""Samples with a MODEL."""


class Traffic:
    """Visits and fetches of all engines."""

    def __init__(self) -> None:
        self.visits = self.nbytes = 0
        self.fetched: list[int] = []
        """Indices of blocks."""

    def count(self, run: EngineRun) -> None:
        self.visits += run._next
        self.fetched += [fetch.block.block for fetch in run.fetched]
        self.nbytes += sum(run._pool.fetch_bytes(fetch.block) for fetch in run.fetched)


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count in the `with` body."""
    counted, leave = Traffic(), EngineRun.__exit__

    def counting(self: EngineRun, *error: Any) -> None:
        try:
            leave(self, *error)
        finally:
            counted.count(self)

    with patch.object(EngineRun, "__exit__", counting):
        yield counted


def recompiled(model: Any) -> int:
    """Return the recompilations of the last run of a streamed MODEL."""
    return int(model.model.runs.course.recompiled)


def block_bytes(model: Any) -> list[int]:
    """Return the bytes that each block of a streamed MODEL has in its file, by the index of the block."""
    stored = model.model.stored
    starts = [f"diffusion_model.{path}." for path in model.model.weights.blocks]
    return [sum(view.nbytes for key, view in stored.items() if key.startswith(start)) for start in starts]


class Files:
    """Checkpoints, written once, and the models of their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._natives: dict[tuple[str, str], Any] = {}

    def path(self, family: Family, dtype: str) -> Path:
        path = self.folder / f"{family.name}_{dtype}.safetensors"
        if not path.exists():
            family.write(path, dtype)
        return path

    def native(self, family: Family, form: str = "fp32") -> Any:
        """Return the MODEL that ComfyUI loads, the same one for each call."""
        dtype, weight_dtype = FORMATS[form]
        if (family.name, form) not in self._natives:
            loaded = native_families.native(self.path(family, dtype), family, weight_dtype=weight_dtype)
            self._natives[family.name, form] = loaded
        return self._natives[family.name, form]

    def streamed(self, family: Family, form: str = "fp32", policy: str = "layerwise") -> Any:
        """Return a new MODEL of ours."""
        dtype, weight_dtype = FORMATS[form]
        with native_families.given_configuration(family):
            model = load_native(self.path(family, dtype), weight_dtype, OffloadPolicy.layerwise(1), **LIMITS)
        model.policy = POLICIES[policy](len(model.model.weights.blocks))
        return model

    def compare(
        self, name: str, run: Run, *, form: str = "fp32", policy: str = "layerwise", changed: Family | None = None
    ) -> dict[str, Any]:
        """Return what two runs of a streamed model show next to a native one."""
        family = changed or FAMILIES[name]
        expected = run(self.native(family, form))
        model = self.streamed(family, form, policy)
        sizes = block_bytes(model)
        found: dict[str, Any] = {"equal": [], "recompiled": [], "fetches": [], "visits": [], "bytes": []}
        for _ in range(2):
            with traffic() as counted:
                result = run(model)
            found["equal"].append(torch.equal(result, expected))
            found["recompiled"].append(recompiled(model))
            found["fetches"].append(len(counted.fetched))
            found["visits"].append(counted.visits)
            found["bytes"].append([counted.nbytes, sum(sizes[block] for block in counted.fetched)])
        model.detach()
        return {**found, "blocks": len(sizes), "finite": bool(expected.isfinite().all())}


def family_cases(files: Files) -> dict[str, Callable[[], Any]]:
    """Return a case per family and number format, with both policies for two families and by turns for the others."""
    cases = {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        for turn, form in enumerate(FORMATS, start=number):
            policies = ("layerwise", "block swap")
            for policy in policies if name in ("wan_t2v", "flux") else policies[turn % 2 :][:1]:
                run = partial(files.compare, name, partial(sample, family=family), form=form, policy=policy)
                cases[f"family {name}, {form}, {policy}"] = run
    run = partial(sample, family=FAMILIES["flux"])
    cases["family flux, fp16, resident"] = partial(files.compare, "flux", run, form="fp16", policy="resident")
    return cases


SAMPLERS = ("euler", "heun", "dpm_2", "uni_pc", "dpmpp_2m_sde", "dpm_fast", "dpm_adaptive", "lcm")


def sampler_cases(files: Files) -> dict[str, Callable[[], Any]]:
    cases = {}
    for name in ("wan_t2v", "flux"):
        for number, sampler in enumerate(SAMPLERS):
            run = partial(sample, family=FAMILIES[name], sampler=sampler, steps=4)
            policy = ("layerwise", "block swap")[number % 2]
            cases[f"sampler {name}, {sampler}"] = partial(files.compare, name, run, policy=policy)
    return cases


def _told(case: Callable[[], object]) -> object:
    """Return the value of a case; a case that fails says where, and the others go on."""
    try:
        return case()
    except Exception:  # noqa: BLE001 - the test of this case fails with the traceback
        return {"error": traceback.format_exc()}


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per case. ComfyUI runs nodes in inference mode as well."""
    torch.set_num_threads(1)
    files = Files(Path(folder))
    cases = {**family_cases(files), **sampler_cases(files)}
    return {name: _told(case) for name, case in cases.items()}

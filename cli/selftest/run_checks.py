"""Checks by whole runs with small random experts.

They cover every policy and format, short memory, and released memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...block_kernels import choose_multiplication
from ...devices import auto_dtype, clock_for
from ...sampling import denoise
from ...sampling.inputs import DenoiseRequest
from ...sampling.steps import seeded_noise
from ...schema import OffloadPolicy
from ...schema.refs import ExpertsRef, LoraRef
from ...schema.text import format_size
from ...shapes import VideoShape
from ...testing import (
    TEXT_DIM,
    TinyShape,
    make_expert,
    make_lora,
    q4_k_m,
    save_expert_file,
    save_expert_gguf,
    save_lora,
    scaled_fp8,
)
from ...wan import ExpertsRegistry
from ...wan.checkpoint import open_expert, write_int8
from .device_checks import Subject
from .findings import Finding

VIDEO = VideoShape(width=128, height=128, frames=9)
STEPS = 4
MOST_DIFFERENCE = 0.2
"""Relative difference from fp32 on a CPU: bf16 makes some percent, wrong weights make 1 and
more."""
IN_INT8 = "int8 ConvRot in int8, with a LoRA"
RESIDENT = OffloadPolicy.resident()
SMALLEST = OffloadPolicy.layerwise(1)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Random experts in every format, and the request for all runs."""

    subject: Subject
    request: DenoiseRequest
    formats: Mapping[str, ExpertsRef]
    """Experts by format name, the plain one first."""
    registry: ExpertsRegistry

    @property
    def plain(self) -> ExpertsRef:
        return next(iter(self.formats.values()))

    def latents(self, ref: ExpertsRef, policy: OffloadPolicy) -> torch.Tensor:
        """Return the latents from a run on the device."""
        return denoise(
            self.registry.get(ref), self.request, policy=policy, device=self.subject.device
        ).latents


@contextmanager
def prepared_runs(subject: Subject, folder: Path) -> Iterator[Runs]:
    """Write the experts into `folder`, and close the last one at the end of the `with`."""
    registry = ExpertsRegistry()
    draw = torch.Generator().manual_seed(0)
    # (batch, tokens, width), with two lengths, as prompts have.
    positive, negative = (torch.randn(1, tokens, TEXT_DIM, generator=draw) for tokens in (20, 11))
    noise = seeded_noise((1, subject.tiny.in_channels, *VIDEO.latent), 0)
    request = DenoiseRequest(noise, positive, negative=negative, steps=STEPS, guidance=(4.0, 3.0))
    formats = _write_experts(subject.tiny, folder, subject.device)
    try:
        yield Runs(subject=subject, request=request, formats=formats, registry=registry)
    finally:
        registry.free()


def check_policies(runs: Runs, name: str) -> Finding:
    """Run one format under several policies, and compare the latents with resident blocks."""
    ref = runs.formats[name]
    policies = _policies(runs.subject.tiny.layers)
    resident = runs.latents(ref, RESIDENT)
    different = [
        words
        for words, policy in policies.items()
        if not torch.equal(runs.latents(ref, policy), resident)
    ]
    if different:
        return Finding.failed(f"other latents than resident blocks: {', '.join(different)}")
    return Finding.passed(f"{len(policies)} policies, equal to resident blocks bit for bit")


def check_result(runs: Runs) -> Finding:
    """Compare latents in bf16 and in int8 with decoded weights in fp32 on a CPU."""
    differences = {
        "in bf16": _difference(runs, runs.plain),
        "in int8": _difference(runs, runs.formats[IN_INT8]),
    }
    words = " and ".join(
        f"{100 * difference:.1f} % {name}" for name, difference in differences.items()
    )
    return Finding(
        outcome="passed" if max(differences.values()) <= MOST_DIFFERENCE else "failed",
        words=f"{words} from fp32 on a CPU, up to {100 * MOST_DIFFERENCE:.0f} % is rounding",
        figures={
            "relative_difference": differences["in bf16"],
            "relative_difference_int8": differences["in int8"],
        },
    )


def _difference(runs: Runs, ref: ExpertsRef) -> float:
    found = runs.latents(ref, RESIDENT).cpu()
    exact = ExpertsRegistry()
    try:
        pair = exact.get(replace(ref, compute_dtype="float32", arithmetic="decoded"))
        expected = denoise(pair, runs.request, policy=SMALLEST, device="cpu").latents
    finally:
        exact.free()
    return float((found - expected).norm() / expected.norm())


def check_short_memory(runs: Runs) -> Finding:
    """Start resident blocks in memory that only streamed ones fit into, and compare the latents."""
    runtime = runs.subject.runtime
    expected = runs.latents(runs.plain, RESIDENT)
    least, most = (_peak_bytes(runs, policy) for policy in (SMALLEST, RESIDENT))
    # Before the limit, so that the next run allocates everything below it.
    runs.registry.free()
    # Between both peaks: streamed blocks fit, resident ones do not.
    runtime.limit_memory((least + most) // 2)
    try:
        pair = runs.registry.get(runs.plain)
        result = denoise(pair, runs.request, policy=RESIDENT, device=runs.subject.device)
    finally:
        runs.registry.free()
        runtime.limit_memory(None)
    figures = {"limit_bytes": (least + most) // 2, "changes": result.timeline.changes}
    # Without a change, the run has not met the limit.
    if not result.timeline.changes:
        return Finding(
            outcome="not run",
            words="torch does not limit the memory of this device",
            figures=figures,
        )
    if not torch.equal(result.latents, expected):
        return Finding.failed("other latents after running out of memory", **figures)
    words = (
        f"{len(result.timeline.changes)} times out of memory below {format_size(most)}, the same "
        "latents"
    )
    return Finding.passed(words, **figures)


def check_given_back(runs: Runs) -> Finding:
    """Release a finished run's memory as ComfyUI requests it, and count it as ComfyUI does."""
    runtime = runs.subject.runtime
    runs.latents(runs.plain, RESIDENT)  # libraries allocate work memory once and keep it
    runs.registry.free()
    clock_for(runs.subject.device).settle()
    before = runtime.active_bytes()
    runs.latents(runs.plain, RESIDENT)
    pair = runs.registry.get(runs.plain)
    used = runtime.active_bytes()
    released = pair.release_memory(pair.loaded_bytes)
    freed = used - runtime.active_bytes()
    runs.registry.free()
    kept = runtime.active_bytes() - before
    figures = {"released_bytes": released, "freed_bytes": freed, "kept_bytes": kept}
    if kept > 0 or freed < released or not released:
        words = (
            f"{format_size(released)} released, {format_size(freed)} freed, {format_size(kept)} "
            "kept after closing"
        )
        return Finding.failed(words, **figures)
    words = f"{format_size(freed)} freed at once, nothing kept after closing"
    return Finding.passed(words, **figures)


def _peak_bytes(runs: Runs, policy: OffloadPolicy) -> int:
    """Return torch's peak allocation in a run under `policy`, in bytes."""
    runtime = runs.subject.runtime
    runs.registry.free()
    runtime.limit_memory(None)  # returns cached memory, too
    runtime.reset_peaks()
    runs.latents(runs.plain, policy)
    return runtime.allocated_bytes(peak=True)


def _policies(blocks: int) -> dict[str, OffloadPolicy]:
    half = OffloadPolicy.block_swap(blocks // 2, source="pinned")
    return {
        "layerwise": SMALLEST,
        "layerwise, 2 ahead, from RAM": OffloadPolicy.layerwise(2, source="pinned"),
        "half swapped, from RAM": half,
        "half swapped, half of them from RAM": replace(half, ram_blocks=blocks // 2),
    }


def _write_experts(shape: TinyShape, folder: Path, device: torch.device) -> dict[str, ExpertsRef]:
    models = {"high": make_expert(shape, seed=1), "low": make_expert(shape, seed=2)}
    for name, model in models.items():
        plain_file = folder / f"{name}.safetensors"
        save_expert_file(model, plain_file, dtype=torch.bfloat16)
        save_expert_file(
            model, folder / f"{name}_fp8.safetensors", dtype=torch.bfloat16, quantised=scaled_fp8
        )
        write_int8(open_expert(plain_file), folder / f"{name}_int8.safetensors")
        save_lora(
            make_lora(model, seed=3), folder / f"{name}_lora.safetensors", dtype=torch.bfloat16
        )

    def ref(ending: str) -> ExpertsRef:
        return ExpertsRef(high_noise=folder / f"high{ending}", low_noise=folder / f"low{ending}")

    plain = ref(".safetensors")
    lora = LoraRef(
        high_noise=folder / "high_lora.safetensors", low_noise=folder / "low_lora.safetensors"
    )
    formats = {
        "bf16": plain,
        "bf16 with a LoRA": replace(plain, loras=(lora,)),
        "fp8 file": ref("_fp8.safetensors"),
        "fp8 with a LoRA": replace(ref("_fp8.safetensors"), loras=(lora,)),
        "fp8 in RAM": replace(plain, storage="fp8"),
        "int8 ConvRot": ref("_int8.safetensors"),
        IN_INT8: replace(ref("_int8.safetensors"), arithmetic="int8", loras=(lora,)),
        "int8 ConvRot in RAM, in int8": replace(plain, storage="int8 ConvRot", arithmetic="int8"),
    }
    # GPUs before the RTX 40 series have no fp8 units. Their loader refuses these experts.
    if choose_multiplication("fp8", device, auto_dtype(device)).name is not None:
        formats["fp8 file in fp8, with a LoRA"] = replace(
            formats["fp8 with a LoRA"], arithmetic="fp8"
        )
    # Writes the file. Reading one needs no package.
    if importlib.util.find_spec("gguf") is not None:
        for name, model in models.items():
            save_expert_gguf(model, folder / f"{name}.gguf", types=q4_k_m)
        formats["GGUF Q4_K_M"] = ref(".gguf")
    return formats

"""Run error by number format: relative latent distance to fp32, per step and at the end.

python benchmarks/number_formats.py
python benchmarks/number_formats.py HIGH LOW [NAME=HIGH,LOW ...]

Without arguments, two random experts with four heads, eight blocks and outlier channels, as in
trained models: in every block matrix, each 64th column is divided by 20, and the source of its
input is multiplied by 20. With arguments, the experts HIGH and LOW, in bf16 or fp32, and others to
compare with them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from wanstream.benchmarks.record import record
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import seeded_noise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import Arithmetic, Storage
from wanstream.testing.experts import save_expert_file
from wanstream.testing.quantised import scaled_fp8
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.tests.support.wan.number_formats import MixedLayout
from wanstream.wan import open_experts

SHAPE = TinyShape(layers=8, heads=4, ffn_dim=2048)
OUTLIERS = slice(None, None, 64)
OUTLIER_SIZE = 20.0
STEPS = 8
SWITCH = 4
LATENT = (1, 16, 3, 16, 16)
POLICY = OffloadPolicy.layerwise(1)
FORMATS = {"fp8_scaled": scaled_fp8} | {
    # The default argument binds this round's name. Otherwise every lambda would use the last one.
    name: MixedLayout(format_of=lambda _, name=name: name)  # type: ignore[misc]
    for name in ("int8 rows", "int8 ConvRot", "mxfp8", "nvfp4")
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a pair of files, and the arithmetic."""

    high: Path
    low: Path
    storage: Storage = "as stored"
    arithmetic: Arithmetic = "decoded"
    dtype: torch.dtype = torch.bfloat16


def add_outliers(model: WanTransformer3DModel) -> WanTransformer3DModel:
    """Make some input channels of the block matrices large, but keep the model's function."""
    for block in model.blocks:
        # Attention: the modulation of the first norm, the norm of the second, and the values.
        block.scale_shift_table[:, 1, OUTLIERS] = (
            # The block multiplies by 1 + scale.
            OUTLIER_SIZE * (1 + block.scale_shift_table[:, 1, OUTLIERS]) - 1
        )
        block.scale_shift_table[:, 0, OUTLIERS] *= OUTLIER_SIZE
        for linear in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v):
            linear.weight[:, OUTLIERS] /= OUTLIER_SIZE
        for attention in (block.attn1, block.attn2):
            attention.to_v.weight[OUTLIERS] *= OUTLIER_SIZE
            attention.to_v.bias[OUTLIERS] *= OUTLIER_SIZE
            attention.to_out[0].weight[:, OUTLIERS] /= OUTLIER_SIZE
        block.norm2.weight[OUTLIERS] *= OUTLIER_SIZE
        block.norm2.bias[OUTLIERS] *= OUTLIER_SIZE
        block.attn2.to_q.weight[:, OUTLIERS] /= OUTLIER_SIZE
    return model


def made_files(folder: Path) -> tuple[Case, dict[str, Case]]:
    """Write both experts in every format. Return the reference and the other cases."""

    def case(
        name: str, arithmetic: Arithmetic = "decoded", dtype: torch.dtype = torch.bfloat16
    ) -> Case:
        return Case(
            high=folder / f"high {name}",
            low=folder / f"low {name}",
            arithmetic=arithmetic,
            dtype=dtype,
        )

    for seed, place in enumerate(("high", "low"), 1):
        model = add_outliers(make_expert(SHAPE, seed=seed))
        save_expert_file(model, folder / f"{place} fp32", dtype=torch.float32)
        save_expert_file(model, folder / f"{place} bf16", dtype=torch.bfloat16)
        for name, layout in FORMATS.items():
            save_expert_file(
                model, folder / f"{place} {name}", dtype=torch.bfloat16, quantised=layout
            )
    cases = {"bf16": case("bf16")} | {name: case(name) for name in FORMATS}
    for name in ("int8 rows, in int8", "int8 ConvRot, in int8", "fp8_scaled, in fp8"):
        cases[name] = case(name.partition(",")[0], "as stored")
    in_ram: dict[str, Storage] = {"fp8 in RAM": "fp8", "int8 ConvRot in RAM": "int8 ConvRot"}
    cases |= {name: replace(case("bf16"), storage=storage) for name, storage in in_ram.items()}
    return case("fp32", dtype=torch.float32), cases


def given_files(arguments: list[str]) -> tuple[Case, dict[str, Case]]:
    high, low = map(Path, arguments[:2])
    plain = Case(high=high, low=low)
    cases = {"bf16": plain, "fp8 in RAM": replace(plain, storage="fp8")}
    cases["int8 ConvRot in RAM, in int8"] = replace(
        plain, storage="int8 ConvRot", arithmetic="as stored"
    )
    for argument in arguments[2:]:
        name, _, files = argument.partition("=")
        one, _, other = files.partition(",")
        cases[name] = Case(high=Path(one), low=Path(other))
        cases[f"{name}, as stored"] = Case(high=Path(one), low=Path(other), arithmetic="as stored")
    return Case(high=high, low=low, dtype=torch.float32), cases


def request() -> DenoiseRequest:
    texts = torch.Generator().manual_seed(0)
    positive, negative = (torch.randn(1, 32, 4096, generator=texts) for _ in range(2))
    return DenoiseRequest(
        noise=seeded_noise(LATENT, 0),
        positive=positive,
        negative=negative,
        steps=STEPS,
        switch_step=SWITCH,
        flow_shift=5.0,
        guidance=(4.0, 3.0),
    )


def steps_of(case: Case) -> Iterator[torch.Tensor]:
    """Yield the final latents as estimated after each step, and the final latents."""
    found: list[torch.Tensor] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open_experts(
        case.high,
        case.low,
        compute_dtype=case.dtype,
        storage=case.storage,
        arithmetic=case.arithmetic,
    ) as pair:
        result = denoise(
            pair,
            request(),
            policy=POLICY,
            device=device,
            on_step=lambda step: found.append(step.denoised.cpu()),
        )
    yield from found
    yield result.latents.cpu()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def percent(part: float) -> float:
    return round(100 * part, 2)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        reference, cases = given_files(sys.argv[1:]) if sys.argv[1:] else made_files(Path(name))
        expected = list(steps_of(reference))
        figures = {}
        for label, case in cases.items():
            *each, last = map(distance, steps_of(case), expected)
            figures[label] = {
                "latent_percent": round(100 * last, 2),
                "steps_percent": [round(100 * e, 2) for e in each],
            }
            print(label, figures[label], flush=True)
    method = (
        f"relative distance to a run in fp32 with the same seed, {STEPS} steps, switch at "
        f"{SWITCH}: of the final latents, and of the estimate of them after each step; computed in "
        "bf16, decoded on arrival or multiplied as stored; "
        + (
            "given experts"
            if sys.argv[1:]
            else f"random experts {SHAPE} with outlier channels, not a trained model"
        )
    )
    print(record("number-formats", method=method, figures=figures))


if __name__ == "__main__":
    main()

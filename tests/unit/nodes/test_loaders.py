"""Loaders of experts and LoRAs: values, kernels, single models, and refused files."""

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.block_kernels import INDUCTOR, Kernels
from wanstream.block_kernels.attention import KernelsError
from wanstream.devices import compute_dtype
from wanstream.host import current_host
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.latents import WanStreamImageToVideo
from wanstream.nodes.loaders import WanStreamExperts, WanStreamOneExpert
from wanstream.nodes.runs.benchmark import _describe_experts
from wanstream.nodes.sampler import SamplerSettings, WanStreamSampler
from wanstream.sampling.steps import RequestError
from wanstream.schema import StepRange
from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.testing import model
from wanstream.tests.support.host.given_nodes import SETTINGS
from wanstream.tests.support.host.shipped import node, shipped

T2V = "wan2.2_t2v_{}_noise_14B_fp16.safetensors"
PAIR = {"high_noise": T2V.format("high"), "low_noise": T2V.format("low")}
LOADERS = [(WanStreamExperts, PAIR), (WanStreamOneExpert, {"file": Path(model.T2V_FILE).name})]
BOTH = pytest.mark.parametrize(("loader", "files"), LOADERS, ids=["pair", "one"])
REF = ExpertsRef(high_noise=Path("high"), low_noise=Path("low"))


@pytest.mark.usefixtures("opened_test_model")
class TestExperts:
    @BOTH
    def test_kernels_are_a_value_and_reopen_nothing(self, loader, files):
        (before,) = loader.execute(**files, compute_dtype="fp32").args
        pair = current_host().models.experts(before)
        kernels = {"attention": "sdpa", "compile": True}
        (chosen,) = loader.execute(**files, compute_dtype="fp32", **kernels).args
        assert chosen == replace(before, **kernels) != before
        assert current_host().models.experts(chosen) is pair
        assert pair.kernels == Kernels(attention="sdpa", compiler=INDUCTOR)
        assert current_host().models.experts(before).kernels == Kernels()
        (fp8,) = loader.execute(**files, compute_dtype="fp32", storage="fp8").args
        assert (before.storage, fp8.storage) == ("as stored", "fp8")

    @BOTH
    @pytest.mark.skipif(find_spec("sageattention") is not None, reason="sageattention is there")
    def test_missing_package_is_named(self, loader, files):
        message = r"attention 'sage' needs sageattention 2\.1\.1 or later, which cannot be"
        with pytest.raises(KernelsError, match=message):
            loader.execute(**files, compute_dtype="fp32", attention="sage")

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_auto_dtype_is_resolved_where_it_is_used(
        self, dtype, loader, files, monkeypatch, caplog
    ):
        """A driver without a GPU must not choose the dtype for workers with GPUs."""
        monkeypatch.setattr(compute_dtype, "auto_dtype", {torch.device("cpu"): dtype}.__getitem__)
        with caplog.at_level(logging.INFO):
            (ref,) = loader.execute(**files, compute_dtype="auto").args
        name = str(dtype).removeprefix("torch.")
        pair = current_host().models.experts(ref)
        assert (ref.compute_dtype, pair.compute_dtype) == ("auto", dtype)
        assert current_host().models.experts(replace(ref, compute_dtype=name)) is pair
        assert f"compute_dtype auto: the blocks compute in {name} on cpu" in caplog.text
        assert loader.execute(**files, compute_dtype="fp16").args[0].compute_dtype == "float16"
        (choice,) = (each for each in loader.define_schema().inputs if each.id == "compute_dtype")
        assert choice.as_dict()["default"] == "auto"


def test_report_names_the_chosen_kernels():
    chosen = replace(REF, attention="sage", compile=True, arithmetic="as stored")
    changed = {"Attention": "sage", "Blocks": "compiled", "Multiplied in": "as stored"}
    assert _describe_experts(chosen) == {**_describe_experts(REF), **changed}


def test_single_model_takes_every_step_under_the_first_guidance():
    def found(experts, **changes):
        settings = SamplerSettings.of(experts, {**SETTINGS, **changes})
        return settings.steps.boundary_ratio, settings.steps.switch_step, settings.guidance.scales

    one = ExpertsRef(high_noise=Path("one"), single=True)
    assert found(REF) == (0.875, None, (5.0, 1.0))
    assert found(REF, switch_step=2)[1] == 2
    assert found(one) == (0.0, None, (5.0, 5.0))
    with pytest.raises(RequestError, match="switch_step is 0, but a single model runs every step"):
        found(one, switch_step=0)


SIZE = {"width": 64, "height": 32, "frames": 9}


@pytest.mark.usefixtures("opened_test_model")
@pytest.mark.parametrize("name", [model.TI2V_FILE.name, model.TI2V_PIPELINE.name])
def test_sampler_runs_a_single_model(name, text):
    (ref,) = WanStreamOneExpert.execute(name, "fp32").args
    image = torch.rand(1, 40, 56, 3, generator=torch.Generator().manual_seed(1))
    given = (text, text, model.WAN22_VAE_FILE.name, image, 1)
    *prompts, latent = WanStreamImageToVideo.execute(*given, **SIZE).args
    made, ran = WanStreamSampler.execute(ref, *prompts, latent, **SETTINGS).args
    assert [step.expert for step in ran.timeline.steps] == ["high"] * 3
    assert ran.block_counts == {"high": 4}
    samples = made["samples"]
    first = latent["samples"][:, :, :1]
    assert samples.shape == (1, 48, 3, 2, 4)
    assert samples.std() > 0.1
    assert (samples[:, :, :1] - first).norm() / first.norm() < 1e-5, "begins with the image"


LIGHTNING = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
STRENGTHS = {"strength_high": 1.0, "strength_low": 1.0}
NEITHER = {"high_noise": "none", "low_noise": "none", **STRENGTHS}
LORAS = {place: LIGHTNING.format(place.removesuffix("_noise")) for place in PAIR}
LORA = {**LORAS, **STRENGTHS}
ONLY_LOW = {**LORA, "high_noise": "none"}


class TestLora:
    @pytest.fixture
    def made(self, run, own_loras):
        """`made(*loras, keep="sampler")` runs text to video with these LoRA nodes in a row."""

        def made(*loras, keep="sampler"):
            nodes = shipped(latent={"frames": 1}, sampler={"steps": 2, "switch_step": 1})
            for number, lora in enumerate(loras):
                link = nodes["sampler"]["inputs"]["experts"]
                nodes[f"lora{number}"] = node("WanStreamLora", experts=link, **lora)
                nodes["sampler"]["inputs"]["experts"] = [f"lora{number}", 0]
            return run(nodes, only=[keep], models=own_loras).results[keep][0]

        return made

    def test_loras_are_values(self, made, own_loras):
        steps = {**ONLY_LOW, "strength_steps": "1: 0.5, 0: 0"}
        found: ExpertsRef = made({**LORA, "strength_low": 0.25}, NEITHER, steps, keep="lora2")
        high, low = (own_loras / "loras" / name for name in LORAS.values())
        ranges = (StepRange(0, 0, 0.0), StepRange(1, 1, 0.5))
        assert found.loras == (
            LoraRef(high_noise=high, low_noise=low, strength_high=1.0, strength_low=0.25),
            LoraRef(low_noise=low, strength_high=1.0, strength_low=1.0, steps=ranges),
        )
        plain = made(keep="experts")
        assert hash(found) != hash(plain)
        assert made(NEITHER, keep="lora0") == plain

    def test_unusable_file_is_reported_on_its_node(self, made, own_loras):
        layer = "blocks.0.self_attn.q.lora_{}.weight"
        wide = {layer.format("down"): torch.ones(4, 5120), layer.format("up"): torch.ones(5120, 4)}
        save_file(wide, own_loras / "loras" / "wide.safetensors")
        message = r"\[5120, 5120\].*\[256, 256\].*for a 14B model"
        with pytest.raises(NodeFailedError, match=message) as failed:
            made(LORA, {**NEITHER, "low_noise": "wide.safetensors"})
        assert failed.value.node_id == "lora1"

    def test_unusable_steps_are_refused(self, made):
        for steps in ("0: much", "1-0: 0"):
            with pytest.raises(InvalidWorkflowError, match=r"as in 0-1: 0|ends before it begins"):
                made({**LORA, "strength_steps": steps})

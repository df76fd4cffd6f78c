"""ComfyUI's GUIDER for streamed experts: its samplers drive the model, and their history crosses the switch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.samplers
import torch

from ...plan import TRAIN_TIMESTEPS
from ...sampling import (
    CachedCalls,
    DenoiseRequest,
    LaneInputs,
    ModelCalls,
    NonFiniteLatentError,
    RequestError,
    RunPolicy,
    SamplingCancelled,
    check_fits,
    native_inputs,
    prefetch_embeddings,
    single_entry,
)
from ...schema import OffloadPolicy, Timeline
from ...telemetry import Recorder, TelemetryOptions
from ..auto_policy import PolicyChoice
from ..error_names import plainly_named
from ..memory import MemoryEstimateInputs
from .guider_run import Choose, GuiderRun, Known, Watch, foretold, guider_job
from .guider_steps import GuiderSettings, GuiderSteps
from .sampler_dry_run import one_level, predicted_sigmas, sampler_name

if TYPE_CHECKING:
    from .patcher import ExpertsPatcher


HIGHEST_SIGMA = 1 + 1e-4
"""Some schedules come back to 1 through functions that round."""

CONDITIONS = "sampler_calc_cond_batch_function"
"""The model option through which ComfyUI lets others compute what the conditions of one call give."""

logger = logging.getLogger("wanstream.host")


class ExpertsGuider(comfy.samplers.CFGGuider):  # type: ignore[misc]
    """A CFGGuider whose model is the pair of streamed experts. See `ComfyHost.guider`."""

    def __init__(
        self,
        patcher: ExpertsPatcher,
        settings: GuiderSettings,
        watch: Watch,
        observe: Callable[[], TelemetryOptions],
        known: Known,
        choose: Choose | None = None,
    ) -> None:
        super().__init__(patcher)
        self.settings, self._watch, self._observe, self._known = settings, watch, observe, known
        self._choose = choose
        self._choice = PolicyChoice(policy=OffloadPolicy.layerwise())  # until one is made
        self.timeline: Timeline | None = None
        """Of the last run: one step per call of the model."""
        self.recompiled = 0
        """Calls of the last run that were not the predicted ones."""
        self._given: dict[str, Sequence[Any]] = {}
        self._run: GuiderRun | None = None

    def set_conds(self, positive: Sequence[Any], negative: Sequence[Any]) -> None:
        self._given = {"positive": positive, "negative": negative}
        for side, given in self._given.items():
            single_entry(side, given)  # what is refused is refused before ComfyUI makes anything of it
        super().set_conds(positive, negative)

    @plainly_named  # called by a node of ComfyUI
    def sample(
        self, noise: Any, latent_image: Any, sampler: Any, sigmas: torch.Tensor, *run: Any, **settings: Any
    ) -> torch.Tensor:
        if latent_image.is_nested:
            raise RequestError("the latent has several parts, Wan makes video alone: use an empty video latent")
        guider_steps = self._guider_steps_of(noise.shape, sigmas)
        if self._choose is not None and guider_steps.steps > 0:
            self._choose_policy(self._choose, noise.shape, guider_steps)
        self.model_patcher.model.needs = MemoryEstimateInputs(
            chunk_tokens=self.model_patcher.policy.chunk_tokens,
            cache=self.settings.cache,
            windows=self.settings.windows,
            steps=max(1, guider_steps.steps),
        )
        samples: torch.Tensor = super().sample(noise, latent_image, sampler, sigmas, *run, **settings)
        return samples

    def _guider_steps_of(self, shape: Sequence[int], sigmas: torch.Tensor) -> GuiderSteps:
        """The steps of a run on latents of `shape`."""
        return GuiderSteps(settings=self.settings, sigmas=tuple(sigmas.tolist()), frames=shape[2])

    def _choose_policy(self, choose: Choose, shape: Sequence[int], guider_steps: GuiderSteps) -> None:
        """Before ComfyUI makes room for the policy: have one chosen, for one call of the model per step."""
        patcher = self.model_patcher
        patcher.model.open(patcher.ref)
        job = guider_job(patcher.model.pair, guider_steps, guider_steps.sigmas[:-1], shape, patcher.load_device)
        self._choice = choose(job)
        patcher.policy = self._choice.policy

    def inner_sample(  # noqa: PLR0913, PLR0917 (ComfyUI's arguments)
        self,
        noise: torch.Tensor,
        latent_image: torch.Tensor,
        device: torch.device,
        sampler: Any,
        sigmas: torch.Tensor,
        denoise_mask: torch.Tensor | None,
        callback: Any,
        disable_pbar: bool,
        seed: int | None,
        **more: Any,
    ) -> torch.Tensor:
        """Where ComfyUI has made room for the model and prepared all tensors, and the sampler has not begun."""
        self.timeline = None
        guider_steps = self._guider_steps_of(noise.shape, sigmas)
        asked = self._predicted(sampler, sigmas, seed, guider_steps)
        run = self._run = self._begun(noise, denoise_mask, asked, guider_steps, sampler_name(sampler))
        try:
            with run.watched:
                with run.passes:
                    samples: torch.Tensor = super().inner_sample(
                        *(noise, latent_image, device, sampler, sigmas, denoise_mask, callback, disable_pbar, seed),
                        **more,
                    )
                told = tuple(filter(None, (self._choice.reason, *run.policy.changes)))
                self.timeline = replace(run.recorder.timeline(), changes=told)
                run.watched.ended(self.timeline)
        except SamplingCancelled:
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise
        except AttributeError as err:
            if err.obj is not self.inner_model:
                raise
            raise RequestError(
                f"the sampler {sampler_name(sampler)} asks for {err.name} of the model, which streamed experts do not "
                "have: choose one of ComfyUI's samplers (KSamplerSelect)"
            ) from err
        finally:
            self._run, self.recompiled = None, run.passes.recompiled
        return samples

    def _begun(
        self,
        noise: torch.Tensor,
        denoise_mask: torch.Tensor | None,
        asked: Sequence[float],
        guider_steps: GuiderSteps,
        sampler: str,
    ) -> GuiderRun:
        """A run that is asked for the noise levels `asked`, in that order; nothing is fetched yet."""
        pair, policy, place = self.model_patcher.loaded_experts()
        request = self._request(noise, denoise_mask)
        check_fits(request, pair)
        engine, experts = pair.engine(policy, place), [self.settings.expert(sigma) for sigma in asked]
        shape, guided, kept = guider_steps.computed_shape(noise.shape), guider_steps.guided(asked), self.settings.cache
        going = RunPolicy(
            pair,
            policy,
            engine.device,
            shape=shape,
            guided=any(guided.values()),
            cache=kept,
            revise=self._choice.revise_under(policy),
        )
        going.refuse_without_ram()
        cached = CachedCalls.of(kept, guider_steps.calls(asked, len(noise)))
        recorder = Recorder(engine.device, observe=self._observe())
        passes = ModelCalls(
            engine,
            experts,
            recorder=recorder,
            should_stop=comfy.model_management.processing_interrupted,
            policy=going,
            nag=self.settings.more_guidance.nag,
            cached=cached,
        )
        inputs = LaneInputs(request, engine.device)
        timesteps = [sigma * TRAIN_TIMESTEPS for sigma in asked]
        prefetch_embeddings(
            engine, inputs, zip(experts, timesteps, strict=True), guided=guider_steps.reads_negative(asked)
        )
        expected = foretold(
            pair, policy, guider_steps, asked, known=self._known, engine=engine, shape=noise.shape, cached=cached
        )
        return GuiderRun(
            inputs=inputs,
            passes=passes,
            policy=going,
            recorder=recorder,
            watched=self._watch(experts, expected, policy, noise.shape),
            shape=noise.shape,
            guider_steps=guider_steps,
            sampler=sampler,
        )

    def predict_noise(
        self, x: torch.Tensor, timestep: torch.Tensor, model_options: Mapping[str, Any] = {}, seed: int | None = None
    ) -> torch.Tensor:
        """One call: the estimate of x0 [B, 16, T, h, w] for `x` at the sigma that `timestep` [B] really is."""
        assert self._run is not None, "ComfyUI calls the model inside inner_sample"
        sigma, run = one_level(timestep), self._run
        if CONDITIONS in model_options:
            raise RequestError(f"another node computes the conditions itself ({CONDITIONS}): remove it")

        def conditions(call: Mapping[str, Any]) -> list[torch.Tensor]:
            with_negative = call["conds"][1] is not None
            return self._denoised(run, call["input"], sigma, with_negative=with_negative)

        denoised: torch.Tensor = comfy.samplers.sampling_function(
            self.inner_model,
            x,
            timestep,
            self.conds["negative"],
            self.conds["positive"],
            run.guider_steps.scale(sigma),
            model_options={**model_options, CONDITIONS: conditions},
            seed=seed,
        )
        return denoised

    def _denoised(self, run: GuiderRun, x: torch.Tensor, sigma: float, *, with_negative: bool) -> list[torch.Tensor]:
        """What the positive and the negative give, each [B, 16, T, h, w] float32; zeros for a negative left out."""
        if x.shape != run.shape:
            raise RequestError(
                f"the sampler {run.sampler} changes the size of the latent from {list(run.shape)} to {list(x.shape)}, "
                "and the streamed experts were given their image and memory for the first: choose another sampler"
            )
        run.guider_steps.check_call(run.passes.calls, sigma)
        expert, windows = self.settings.expert(sigma), run.guider_steps.windows(sigma)
        held = run.guider_steps.scale(sigma) == 1 and self.settings.more_guidance.nag is not None
        lanes = run.inputs.lanes(x, with_negative=with_negative, attach_nag=held, windows=windows)
        velocities = run.passes.forward(expert, lanes, sigma)
        run.watched.step(run.recorder.last)
        every = torch.cat(velocities if windows is None else windows.whole(velocities)).float()
        if not every.isfinite().all():
            source = "their answer" if x.isfinite().all() else f"what the sampler {run.sampler} gave them"
            raise NonFiniteLatentError(
                f"{source} is NaN or infinite at sigma {sigma:.4f} ({expert}-noise expert): choose another sampler or "
                "sigmas; where that does not help, an input or a weight is broken"
            )
        sides = [x - velocity * sigma for velocity in every.split(len(x))]
        return sides if with_negative else [*sides, torch.zeros_like(x)]

    def _request(self, noise: torch.Tensor, denoise_mask: torch.Tensor | None) -> DenoiseRequest:
        """The inputs of this run, checked as those of our own sampler are."""
        mask = None if denoise_mask is None else denoise_mask.cpu()
        latent = {"samples": torch.zeros(noise.shape), "noise_mask": mask}
        inputs = native_inputs(self._given["positive"], self._given["negative"], latent)
        return DenoiseRequest(
            noise.float(),
            inputs.positive,
            negative=inputs.negative,
            image_condition=inputs.image_condition,
            image_embedding=inputs.image_embedding,
            # What it keeps is ComfyUI's to keep; TI2V-5B is told which frames these are.
            mask=inputs.mask if self.model_patcher.model.keeps_frames else None,
            boundary_ratio=self.settings.boundary_ratio,
            guidance=self.settings.guidance,
        )

    def _predicted(
        self, sampler: Any, sigmas: torch.Tensor, seed: int | None, guider_steps: GuiderSteps
    ) -> Sequence[float]:
        """The noise level of each call that the sampler is going to make."""
        highest = float(sigmas.max())
        if highest > HIGHEST_SIGMA:
            raise RequestError(
                f"a sigma is {highest:g}, and flow models have none above 1: make the SIGMAS with Wan Sigmas"
            )
        asked, name = predicted_sigmas(self, sampler, sigmas, seed), sampler_name(sampler)
        guider_steps.check_calls(asked, name)
        if asked is None:
            logger.info("the sampler %s was not tried beforehand: expecting one model call per step", name)
            return guider_steps.sigmas[:-1]
        return asked

"""Both experts as one native GUIDER: ComfyUI's samplers drive the streamed pair, their history crosses the switch.

Everything but the model itself is ComfyUI's: masks, CFG and its hooks, callbacks, previews, memory. What is ours comes
in by two of its own ways: `inner_sample`, around which the passes are open, and the option that computes the
conditions of one call, here all lanes in one pass of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.samplers
import torch

from ..metrics import Observe, Recorder
from ..plan import AutoOffload, ExpertsRef, OffloadPolicy, Timeline
from ..plan.experts import TRAIN_TIMESTEPS
from ..sampling import (
    Cancelled,
    DenoiseRequest,
    NonFiniteLatentError,
    Passes,
    RequestError,
    native_inputs,
    offload_job,
)
from ..sampling.conditioning import single_entry
from ..sampling.fits import check_fits
from ..sampling.lanes import LaneInputs, foretell
from ..sampling.run_policy import RunPolicy
from .announced_run import AnnouncedRun
from .auto_offload import Choice
from .comfy_trace import one_level, predicted_sigmas, sampler_name
from .guider_run import Choose, GuiderRun, Known, Watch, foretold
from .guider_settings import GuiderSettings
from .observed import observed

if TYPE_CHECKING:
    from .comfy import ComfyDoor
    from .comfy_patcher import ExpertsPatcher

HIGHEST_SIGMA = 1 + 1e-4
"""Some schedules come back to 1 through functions that round."""

CONDITIONS = "sampler_calc_cond_batch_function"
"""The model option through which ComfyUI lets others compute what the conditions of one call give."""

log = logging.getLogger("wanstream.host")


class ExpertsGuider(comfy.samplers.CFGGuider):  # type: ignore[misc]
    """A CFGGuider whose model is the pair of streamed experts. See `make_guider`."""

    def __init__(
        self,
        patcher: ExpertsPatcher,
        settings: GuiderSettings,
        watch: Watch,
        observe: Callable[[], Observe],
        known: Known,
        choose: Choose | None = None,
    ) -> None:
        super().__init__(patcher)
        self.settings, self._watch, self._observe, self._known = settings, watch, observe, known
        self._choose = choose
        self._choice = Choice(policy=OffloadPolicy.layerwise())  # until one is made
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

    def sample(
        self, noise: Any, latent_image: Any, sampler: Any, sigmas: torch.Tensor, *run: Any, **settings: Any
    ) -> torch.Tensor:
        if latent_image.is_nested:
            raise RequestError("the latent has several parts, Wan2.2 A14B makes video alone: use an empty video latent")
        if self._choose is not None:
            self._choose_policy(self._choose, noise.shape, sigmas)
        self.model_patcher.model.chunk_tokens = self.model_patcher.policy.chunk_tokens
        samples: torch.Tensor = super().sample(noise, latent_image, sampler, sigmas, *run, **settings)
        return samples

    def _choose_policy(self, choose: Choose, shape: Sequence[int], sigmas: torch.Tensor) -> None:
        """Before ComfyUI makes room for the policy: have one chosen, for one call of the model per step."""
        patcher = self.model_patcher
        experts = [self.settings.expert(sigma) for sigma in sigmas[:-1].tolist()]
        guided = {expert: self.settings.scale(expert) != 1 for expert in ("high", "low")}
        if not experts:
            return  # nothing is denoised
        patcher.model.open(patcher.ref)
        job = offload_job(patcher.model.pair, shape, patcher.load_device, experts_of_steps=experts, guided=guided)
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
        asked = self._predicted(sampler, sigmas, seed)
        run = self._run = self._begun(noise, denoise_mask, asked, sampler_name(sampler))
        try:
            with run.watched:
                with run.passes:
                    samples: torch.Tensor = super().inner_sample(
                        *(noise, latent_image, device, sampler, sigmas, denoise_mask, callback, disable_pbar, seed),
                        **more,
                    )
                run.recorder.outer_bytes = run.engine.outer_bytes - run.outer_bytes
                told = tuple(filter(None, (self._choice.reason, *run.policy.changes)))
                self.timeline = replace(run.recorder.timeline(), changes=told)
                run.watched.ended(self.timeline)
        except Cancelled:
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
        self, noise: torch.Tensor, denoise_mask: torch.Tensor | None, asked: Sequence[float], sampler: str
    ) -> GuiderRun:
        """A run that is asked for the noise levels `asked`, in that order; nothing is fetched yet."""
        pair, policy, place = self.model_patcher.loaded_experts()
        request = self._request(noise, denoise_mask)
        check_fits(request, pair)
        engine, experts = pair.engine(policy, place), [self.settings.expert(sigma) for sigma in asked]
        guided = {expert: self.settings.scale(expert) != 1 for expert in ("high", "low")}
        going = RunPolicy(pair, policy, engine.device, shape=noise.shape, guided=any(guided.values()))
        recorder, outer_bytes = Recorder(engine.device, observe=self._observe()), engine.outer_bytes
        passes = Passes(
            engine,
            experts,
            recorder=recorder,
            should_stop=comfy.model_management.processing_interrupted,
            policy=going,
            revise=self._choice.revise_under(policy),
        )
        inputs = LaneInputs(request, engine.device)
        timesteps = [sigma * TRAIN_TIMESTEPS for sigma in asked]
        foretell(engine, inputs, zip(experts, timesteps, strict=True), guided=guided)
        expected = foretold(
            pair, policy, asked, experts, known=self._known, engine=engine, shape=noise.shape, guided=guided
        )
        return GuiderRun(
            inputs=inputs,
            passes=passes,
            engine=engine,
            outer_bytes=outer_bytes,
            policy=going,
            recorder=recorder,
            watched=self._watch(experts, expected),
            shape=noise.shape,
            sampler=sampler,
        )

    def predict_noise(
        self, x: torch.Tensor, timestep: torch.Tensor, model_options: Mapping[str, Any] = {}, seed: int | None = None
    ) -> torch.Tensor:
        """One call: the estimate of x0 [B, 16, T, h, w] for `x` at the sigma that `timestep` [B] really is."""
        sigma = one_level(timestep)
        expert = self.settings.expert(sigma)
        if CONDITIONS in model_options:
            raise RequestError(f"another node computes the conditions itself ({CONDITIONS}): remove it")

        def conditions(call: Mapping[str, Any]) -> list[torch.Tensor]:
            with_negative = call["conds"][1] is not None
            return self._denoised(call["input"], sigma, expert, with_negative=with_negative)

        denoised: torch.Tensor = comfy.samplers.sampling_function(
            self.inner_model,
            x,
            timestep,
            self.conds["negative"],
            self.conds["positive"],
            self.settings.scale(expert),
            model_options={**model_options, CONDITIONS: conditions},
            seed=seed,
        )
        return denoised

    def _denoised(self, x: torch.Tensor, sigma: float, expert: str, *, with_negative: bool) -> list[torch.Tensor]:
        """What the positive and the negative give, each [B, 16, T, h, w] float32; zeros for a negative left out."""
        run = self._run
        assert run is not None, "ComfyUI calls the model inside inner_sample"
        if x.shape != run.shape:
            raise RequestError(
                f"the sampler {run.sampler} changes the size of the latent from {list(run.shape)} to {list(x.shape)}, "
                "and the streamed experts were given their image and memory for the first: choose another sampler"
            )
        velocities = run.passes.forward(expert, run.inputs.lanes(x, with_negative=with_negative), sigma)
        run.watched.step(run.recorder.last)
        every = torch.cat(velocities).float()
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
            boundary_ratio=self.settings.boundary_ratio,
            guidance=self.settings.guidance,
        )

    def _predicted(self, sampler: Any, sigmas: torch.Tensor, seed: int | None) -> list[float]:
        """The noise level of each call that the sampler is going to make."""
        highest = float(sigmas.max())
        if highest > HIGHEST_SIGMA:
            raise RequestError(
                f"a sigma is {highest:g}, and flow models have none above 1: make the SIGMAS with Wan Sigmas"
            )
        asked = predicted_sigmas(self, sampler, sigmas, seed)
        if asked is None:
            name = sampler_name(sampler)
            log.info("the sampler %s was not tried beforehand: expecting one model call per step", name)
            asked = sigmas[:-1].tolist()
        return asked


def make_guider(
    door: ComfyDoor,
    ref: ExpertsRef,
    positive: Sequence[Any],
    negative: Sequence[Any],
    *,
    boundary_ratio: float,
    guidance: tuple[float, float],
    flow_shift: float,
    policy: OffloadPolicy | AutoOffload,
) -> ExpertsGuider:
    """See `Door.guider`."""
    settings = GuiderSettings(boundary_ratio=boundary_ratio, guidance=guidance)
    if isinstance(policy, AutoOffload):
        known, choose = OffloadPolicy.layerwise(), partial(door.choose_policy, ref, policy)
    else:
        known, choose = policy, None

    made_by = door.executing_node()

    def watch(experts: Sequence[str], expected: Timeline | None) -> AnnouncedRun:
        # By now a sampler executes; its run is shown at the guider.
        return AnnouncedRun(
            door.announce,
            prompt_id=door.run_id(),
            node_id=door.executing_node(),
            shown_at=made_by,
            experts=experts,
            predicted=expected,
        )

    patcher = door.patcher(ref, known, flow_shift=flow_shift)
    kept = partial(door.known_machine, ref)
    guider = ExpertsGuider(patcher, settings, watch, partial(observed, door), kept, choose)
    guider.set_conds(positive, negative)
    return guider

"""Denoising: all steps of both experts in one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..host import ExpertsRef, io, search_words
from ..plan import AutoOffload, OffloadPolicy, WorkersRef
from ..sampling import native_latent
from . import sockets
from .expert_inputs import said_once
from .one_expert import settings_for
from .sample_inputs import sampler_inputs
from .sample_request import NOT_CONNECTED, course_refusal, request_of
from .sampler_run import run_experts

TIMELINE = "wanstream_timeline"
"""Where the history keeps what each step took: one `Timeline.to_dict()`."""


class WanStreamSampler(io.ComfyNode):
    """Runs the high-noise expert, then the low-noise one, both streamed, in one run without a reload at the switch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSampler",
            display_name="Wan Sampler (streamed)",
            category="WanStream/sampling",
            **search_words("ksampler", "moe", "high noise", "low noise", "t2v", "i2v"),
            description="Denoises with both experts in one run. The defaults are those of Wan2.2 text-to-video; for "
            "image-to-video use flow_shift 5, boundary_ratio 0.9 and guidance 3.5.",
            inputs=sampler_inputs(),
            outputs=[io.Latent.Output(display_name="latent"), sockets.Run.Output(display_name="run")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        steps: int | None = None,
        start_step: int | None = None,
        switch_step: int | None = None,
        end_step: int | None = None,
        sigmas: object = NOT_CONNECTED,
    ) -> bool | str:
        return said_once(course_refusal(steps if sigmas is NOT_CONNECTED else None, start_step, switch_step, end_step))

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        latent: Mapping[str, Any],
        policy: OffloadPolicy | AutoOffload | None = None,
        workers: WorkersRef | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        request = request_of(positive, negative, latent, **settings_for(experts, settings))
        asked = policy or OffloadPolicy.layerwise()
        run = run_experts(experts, request, asked, node_id=cls.hidden.unique_id, workers=workers)
        timeline, left = run.timeline, native_latent(run.result.latents, latent, sigma=run.result.sigma)
        return io.NodeOutput(left, run, ui={TIMELINE: [timeline.to_dict()], "text": list(timeline.changes)})

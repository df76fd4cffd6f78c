"""Socket types of the pack; all of them carry values, which are comparable and cheap to keep in ComfyUI's caches."""

from __future__ import annotations

from ..host import io

Experts = io.Custom("WANSTREAM_EXPERTS")
"""An `ExpertsRef`: the paths and the dtype of a pair of experts, or of a single model."""

Policy = io.Custom("WANSTREAM_POLICY")
"""An `OffloadPolicy`, or an `AutoOffload`, with which the planner chooses one."""

Run = io.Custom("WANSTREAM_RUN")
"""A `SamplerRun`: request, settings and timeline of a finished run, enough to run it again."""

Lanes = io.Custom("WANSTREAM_LANES")
"""A tuple of `VideoLane`: the videos of one run, in order."""

LaneLatents = io.Custom("WANSTREAM_LANE_LATENTS")
"""A tuple of LATENTs, one for each lane of a run."""

Workers = io.Custom("WANSTREAM_WORKERS")
"""A `WorkersRef`: the workers of a run and their layout."""

Guidance = io.Custom("WANSTREAM_GUIDANCE")
"""A `Guidance`: a scale per step, and the NAG settings of steps without guidance."""

Windows = io.Custom("WANSTREAM_WINDOWS")
"""`ContextWindows`: length, overlap and blending of the windows of a long video."""

Cache = io.Custom("WANSTREAM_CACHE")
"""`CacheSettings`: the rule by which steps reuse the result of an earlier step."""

Preview = io.Custom("WANSTREAM_PREVIEW")
"""`PreviewSettings`: the tiny VAE and the number of frames of moving previews."""

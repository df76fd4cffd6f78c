"""Socket types in this pack.

All carry values. They are comparable and cheap to keep in ComfyUI's caches.
"""

from ..host import io

Experts = io.Custom("WANSTREAM_EXPERTS")
"""An `ExpertsRef`: paths and dtype for a pair of experts, or for a single model."""

Policy = io.Custom("WANSTREAM_POLICY")
"""An `OffloadPolicy`, or an `AutoOffload` from which the planner chooses one."""

Run = io.Custom("WANSTREAM_RUN")
"""A `SamplerRun`: request, settings and timeline from a finished run, enough to run it again."""

Lanes = io.Custom("WANSTREAM_LANES")
"""A tuple of `VideoLane`: the videos in one run, in order."""

LaneLatents = io.Custom("WANSTREAM_LANE_LATENTS")
"""A tuple of LATENTs, one for each lane in a run."""

Workers = io.Custom("WANSTREAM_WORKERS")
"""A `WorkersRef`: the workers for a run, and their layout."""

Guidance = io.Custom("WANSTREAM_GUIDANCE")
"""A `Guidance`: a scale per step, and NAG settings for steps without guidance."""

Windows = io.Custom("WANSTREAM_WINDOWS")
"""`ContextWindows`: length, overlap and blending for windows over a long video."""

Cache = io.Custom("WANSTREAM_CACHE")
"""`CacheSettings`: the rule by which steps reuse an earlier step's result."""

Preview = io.Custom("WANSTREAM_PREVIEW")
"""`PreviewSettings`: the tiny VAE and the number of frames for moving previews."""

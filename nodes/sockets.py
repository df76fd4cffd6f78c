"""The pack's own edge types. What travels along them are values: comparable, and cheap to keep in ComfyUI's caches."""

from __future__ import annotations

from ..host import io

Experts = io.Custom("WANSTREAM_EXPERTS")
"""An `ExpertsRef`: which two experts, by path and dtype."""

Policy = io.Custom("WANSTREAM_POLICY")
"""An `OffloadPolicy`: how much memory the experts may take; or an `AutoOffload`, which leaves that to the planner."""

Run = io.Custom("WANSTREAM_RUN")
"""A `SamplerRun`: what a sampler ran and how long it took, enough to run it again."""

Lanes = io.Custom("WANSTREAM_LANES")
"""A tuple of `VideoLane`: videos that share a run, in their order."""

LaneLatents = io.Custom("WANSTREAM_LANE_LATENTS")
"""A tuple of LATENTs, one for each lane of a run."""

Workers = io.Custom("WANSTREAM_WORKERS")
"""A `WorkersRef`: which workers compute a run, and how they share it."""

Guidance = io.Custom("WANSTREAM_GUIDANCE")
"""A `Guidance`: a scale for each step, and how the negative prompt acts in steps without one."""

Windows = io.Custom("WANSTREAM_WINDOWS")
"""`ContextWindows`: how a long video is cut into pieces."""

Cache = io.Custom("WANSTREAM_CACHE")
"""`CacheSettings`: which steps may take over what a step before has computed."""

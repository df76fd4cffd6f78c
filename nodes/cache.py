"""Nodes for step caches: settings, and the calibration run for MagCache."""

from __future__ import annotations

from ..host import current_host, io, search_aliases
from ..plan.programs import SkipRule
from ..sampling.cache import PRESETS, CacheSettings, EasyCache, FirstBlockCache, MagCache
from ..schema.records import Notice
from . import sockets
from .decode import check_name
from .inputs import limits, prefix_input
from .runs.calibration import calibrate_run, read_table, write_table
from .runs.notices import show_notices
from .runs.run_experts import SamplerRun

FIRST_BLOCK = "first_block_cache"
MAGNITUDES = "magcache"
EASY = "easycache"
OWN_THRESHOLD = "own threshold"

CACHE_INPUTS: tuple[io.Input, ...] = (
    io.Combo.Input(
        "kind",
        options=[FIRST_BLOCK, MAGNITUDES, EASY],
        default=FIRST_BLOCK,
        tooltip="first_block_cache: every step computes its first block, which is resident on the "
        "device (0.70 GB in bf16), and decides by its change; each prompt keeps two hidden "
        "states (1.5 GB at 1280x720x81 in bf16, 0.67 GB at 832x480x81). magcache: a calibration "
        "decides before the run; a skipped step moves no bytes, and each prompt keeps one "
        "hidden state. easycache: the change of the input predicts that of the output, without "
        "a calibration; a skipped step moves no bytes, and only latents are kept.",
    ),
    io.Combo.Input(
        "preset",
        options=[*PRESETS, OWN_THRESHOLD],
        default="usual",
        tooltip="For first_block_cache: the threshold, 0.03 (careful), 0.05 (usual), 0.1 (fast), "
        "0.15 or 0.2. Others report for 30 steps of Wan2.1 I2V 14B: 0.1 is good, 0.15 distorts "
        "the last frames and 0.2 the whole video. Higher saves more steps.",
    ),
    io.Float.Input(
        "threshold",
        default=0.05,
        **limits(0.0, 2.0, step=0.01),
        tooltip="For own threshold, magcache and easycache. Steps with a smaller change are "
        "skipped; 0 skips none, and the result is bit-equal. Higher saves more time and costs "
        "quality.",
    ),
    io.String.Input(
        "calibration",
        default="",
        optional=True,
        tooltip="For magcache: the file of Wan Cache Calibration, by its name below the output "
        "folder. Making one costs a run.",
    ),
    io.Int.Input(
        "max_consecutive_skips",
        default=2,
        **limits(0, 100),
        optional=True,
        tooltip="For magcache: largest number of consecutive steps to skip. More saves time and "
        "costs quality.",
    ),
    io.Float.Input(
        "retention",
        default=0.2,
        **limits(0.0, 1.0, step=0.01),
        optional=True,
        tooltip="For magcache and easycache: share of each expert's steps, from its first one, "
        "that are never skipped. Less saves time, but early steps decide on the whole video.",
    ),
)


class WanStreamCache(io.ComfyNode):
    """Settings for a step cache: the largest change at which a step reuses an earlier result."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamCache",
            display_name="Wan Cache",
            category="WanStream/sampling",
            **search_aliases("teacache, magcache, easycache, first block cache, skip steps"),
            description="Skips steps that are similar to the one before: their blocks are neither "
            "computed nor fetched, and the earlier change is added again. A higher threshold "
            "costs quality, first in motion and in the last frames: check the result.",
            inputs=[*CACHE_INPUTS],
            outputs=[sockets.Cache.Output(display_name="cache")],
        )

    @classmethod
    def execute(
        cls,
        kind: str,
        preset: str,
        threshold: float,
        # ComfyUI passes only inputs in the workflow, so older workflows need these defaults.
        calibration: str = "",
        max_consecutive_skips: int = 2,
        retention: float = 0.2,
    ) -> io.NodeOutput:
        # OWN_THRESHOLD is not a preset, so `get` returns the threshold.
        settings: CacheSettings = FirstBlockCache(threshold=PRESETS.get(preset, threshold))
        if kind == MAGNITUDES:
            rule = SkipRule(
                threshold=threshold,
                max_consecutive_skips=max_consecutive_skips,
                retention=retention,
            )
            settings = MagCache(table=read_table(current_host().files, calibration), rule=rule)
        elif kind == EASY:
            settings = EasyCache(threshold=threshold, retention=retention)
        return io.NodeOutput(settings)


class WanStreamCacheCalibration(io.ComfyNode):
    """Calibration run for MagCache: measures the block residual in every step, writes a table."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamCacheCalibration",
            display_name="Wan Cache Calibration",
            category="WanStream/benchmark",
            **search_aliases("magcache, calibrate"),
            description="Measures the data that Wan Cache needs for magcache. Repeats the "
            "sampler's run without a cache, in this process, and writes a small file. It is "
            "valid for every prompt and seed with the same experts, steps, schedule and "
            "flow_shift.",
            inputs=[
                sockets.Run.Input(
                    "run",
                    tooltip="From Wan Sampler, with all steps. The calibration costs one more run, "
                    "and one hidden state for each lane (0.77 GB at 1280x720x81 in bf16).",
                ),
                prefix_input("calibration/WanStream", "A few KB."),
            ],
            outputs=[io.String.Output(display_name="calibration")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            # Two equal calibrations must both run.
            # Without this, ComfyUI's cache key has no node id.
            not_idempotent=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool:
        check_name(current_host().files, filename_prefix)
        return True

    @classmethod
    def execute(cls, run: SamplerRun, filename_prefix: str) -> io.NodeOutput:
        host = current_host()
        table = calibrate_run(host, run, node_id=cls.hidden.unique_id)
        name = write_table(host.files, table, filename_prefix)
        return io.NodeOutput(name, ui=show_notices(host, Notice.of(f"{name}: {table.source}")))

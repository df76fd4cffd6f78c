"""Benchmark node: reports a sampler's run, or a matrix of runs like it, as tables, a chart and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..bench import MAX_PREFETCH, MAX_STEPS, Report, TrialMatrix, summary
from ..host import current_host, io, search_aliases
from . import sockets
from .decode import check_name
from .runs.benchmark import (
    MAX_PAUSE_S,
    MAX_RUNS,
    Benchmark,
    MeasuredModel,
    ReportFiles,
    TrialTimes,
    measure,
    named_runs,
)
from .runs.run_experts import SamplerRun
from .sampler import TIMELINE

TITLE = "WanStream benchmark"

REPORT = "wanstream_report"
"""Key of the summary in the history."""


class WanStreamBenchmark(io.ComfyNode):
    """Report on a sampler's run, and on repetitions of it under other settings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamBenchmark",
            display_name="Wan Benchmark",
            category="WanStream/benchmark",
            **search_aliases("benchmark", "speed test", "measure", "profile", "timing"),
            description="Reports seconds, bytes and memory of every step of a sampler's run, next to other runs, as "
            "JSON, CSV, an HTML page and a chart in the output folder. Can repeat the run under every setting "
            "that you name; the defaults only report the finished run.",
            inputs=[_run_input(), *_time_inputs(), *_matrix_inputs(), *_file_inputs(), *_other_runs()],
            outputs=[io.Image.Output(display_name="chart"), io.String.Output(display_name="summary")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def validate_inputs(
        cls,
        repeats: int | None = None,
        warmup: int | None = None,
        cooldown_s: float | None = None,
        policies: str | None = None,
        prefetch: str | None = None,
        steps: str | None = None,
        filename_prefix: str | None = None,
    ) -> bool:
        """Raise for settings that cannot be run, before any node runs."""
        # A linked value is None until the run; `execute` checks it again.
        times: dict[str, Any] = {"repeats": repeats, "warmup": warmup, "cooldown_s": cooldown_s}
        TrialTimes(**{name: times[name] for name in times if isinstance(times[name], int | float)})
        TrialMatrix.parse(policies or "", prefetch or "", steps or "")
        check_name(filename_prefix)
        return True

    @classmethod
    def execute(
        cls,
        run: SamplerRun | MeasuredModel,
        filename_prefix: str,
        trace: bool = False,
        run_b: SamplerRun | MeasuredModel | None = None,
        run_c: SamplerRun | MeasuredModel | None = None,
        run_d: SamplerRun | MeasuredModel | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        matrix = TrialMatrix.parse(*(settings.pop(name) for name in ("policies", "prefetch", "steps")))
        inputs = {"run": run, "run_b": run_b, "run_c": run_c, "run_d": run_d}
        runs = named_runs(inputs, _titles(cls.hidden.prompt))
        files = ReportFiles(current_host().output_file(filename_prefix, "json"))
        traces = files.traces() if trace else None
        benchmark = Benchmark(title=TITLE, runs=runs, matrix=matrix, times=TrialTimes(**settings), traces=traces)
        with files:
            report = measure(benchmark, node_id=cls.hidden.unique_id, on_report=files.save)
        chart, text = files.finish(report), summary(report)
        outputs = {TIMELINE: _median_runs(report), REPORT: [text], "text": [text], "images": [files.chart_preview()]}
        return io.NodeOutput(_image(chart), text, ui=outputs)


class WanStreamModelRun(io.ComfyNode):
    """Run of a native model, for the benchmark."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamModelRun",
            display_name="Run of Streamed Model",
            category="WanStream/benchmark",
            **search_aliases("benchmark", "ksampler", "measure", "timing"),
            description="The last run of a MODEL that streams, by KSampler or another sampler of ComfyUI, for Wan "
            "Benchmark. It can be reported and compared there, but not repeated.",
            inputs=[
                io.Model.Input(
                    "model", tooltip="The MODEL of the sampler, from Load Diffusion Model (streamed) or Stream Model."
                ),
                io.Latent.Input("latent", tooltip="The LATENT of the sampler: this node then runs after it."),
            ],
            outputs=[sockets.Run.Output(display_name="run")],
        )

    @classmethod
    def execute(cls, model: object, latent: Mapping[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(MeasuredModel(run=current_host().model_run(model), latents=latent["samples"]))


def _titles(prompt: Any) -> dict[str, str]:
    """Return the titles of the nodes of a workflow by id, without those that it does not contain."""
    # Hosts do not validate `_meta`: any JSON may stand there.
    metas = {node_id: node.get("_meta") for node_id, node in (prompt or {}).items()}
    titles = {node_id: meta.get("title") for node_id, meta in metas.items() if isinstance(meta, dict)}
    return {node_id: _readable(title) for node_id, title in titles.items() if isinstance(title, str) and title}


def _readable(title: str) -> str:
    """Return the title in one line, without lone surrogates, which UTF-8 files cannot contain."""
    return " ".join(title.encode(errors="replace").decode().split())


def _median_runs(report: Report) -> list[dict[str, Any]]:
    """Return the median run of each variant as JSON."""
    # Without the memory samples: ComfyUI sends this to every open page, and a run of hours has many samples.
    runs = [variant.median_run for variant in report.variants if variant.median_run is not None]
    return [replace(timeline, memory=()).to_dict() for timeline in runs]


def _image(chart: Image.Image) -> torch.Tensor:
    """Return the chart as an IMAGE [1, H, W, 3], float32 in 0..1."""
    return torch.from_numpy(np.array(chart)).float().div(255).unsqueeze(0)


def _run_input() -> io.Input:
    return sockets.Run.Input(
        "run", tooltip="From Wan Sampler or Run of Streamed Model: the run to measure, and the reference for others."
    )


def _time_inputs() -> list[io.Input]:
    return [
        io.Int.Input(
            "warmup",
            default=0,
            min=0,
            max=MAX_RUNS,
            tooltip="First runs of each variant, which are not counted. Each costs a whole run; the first one fetches "
            "the resident blocks and fills the page cache.",
        ),
        io.Int.Input(
            "repeats",
            default=1,
            min=1,
            max=MAX_RUNS,
            tooltip="Measured runs of each variant, each a whole run. 1, without warm-up and variants: the finished "
            "run is reported, and nothing is run again. The spread means something from 3 on.",
        ),
        io.Float.Input(
            "cooldown_s",
            default=0.0,
            min=0.0,
            max=MAX_PAUSE_S,
            step=1.0,
            tooltip="Seconds of pause before each run, so that a hot GPU does not slow the next one down.",
        ),
    ]


def _matrix_inputs() -> list[io.Input]:
    return [
        io.String.Input(
            "policies",
            tooltip="Policies to compare, separated by commas: layerwise, block_swap 20, resident, auto. Empty: the "
            "policy of the run. Each one costs warmup + repeats runs; resident takes the memory of both experts.",
        ),
        io.String.Input(
            "prefetch",
            tooltip=f"Prefetch depths (0 to {MAX_PREFETCH}) to try with layerwise and block_swap: 1, 2. Empty: that of "
            "the run. Each multiplies the runs; one more block ahead costs 0.70 GB in bf16.",
        ),
        io.String.Input(
            "steps",
            tooltip=f"Numbers of steps (1 to {MAX_STEPS}) to try: 4, 8. Empty: that of the run. Each multiplies the "
            "runs. Short runs measure a step as well as long ones.",
        ),
    ]


def _file_inputs() -> list[io.Input]:
    return [
        io.String.Input(
            "filename_prefix",
            default="benchmark/WanStream",
            tooltip="Name below the output folder; a counter is appended. Four small files: .json, .csv, .html and "
            "the chart as .png.",
        ),
        io.Boolean.Input(
            "trace",
            default=False,
            optional=True,
            tooltip="On: writes a trace of visits and fetches for ui.perfetto.dev, some MB for each run of the "
            "benchmark, next to the report.",
        ),
    ]


def _other_runs() -> list[io.Input]:
    return [
        sockets.Run.Input(
            f"run_{letter}",
            optional=True,
            tooltip="From another Wan Sampler, or Run of Streamed Model, to compare. A run of Wan Sampler is repeated "
            "and varied like the first one.",
        )
        for letter in "bcd"
    ]

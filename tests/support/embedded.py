"""Runs of workflows in one embedded host, which keeps experts open from test to test until a test frees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wanstream.host.embedded.adapter import EmbeddedHost, Folders
from wanstream.host.embedded.graph import Prompt
from wanstream.host.embedded.io import ComfyNode
from wanstream.host.embedded.run import History, Workflow, load_workflow
from wanstream.host.embedded.validate import Verdict

embedded_host = EmbeddedHost()


def load(
    prompt: Prompt | None,
    *,
    nodes: Sequence[type[ComfyNode]],
    models: Path,
    input_dir: Path,
    output: Path = Path(),
    device: torch.device | None = None,
    strict: bool = False,
) -> Workflow:
    folders = Folders(models=models, output=output, input=input_dir)
    return load_workflow(prompt, host=embedded_host, nodes=nodes, folders=folders, device=device, strict=strict)


def validate_workflow(prompt: Prompt | None, nodes: Sequence[type[ComfyNode]], **folders: Path) -> Verdict:
    return load(prompt, nodes=nodes, **folders).verdict


RUN_OPTIONS = ("on_progress", "on_event", "extra_pnginfo", "keep")


def run_workflow(prompt: Prompt | None, *, only: Sequence[str] = (), **options: Any) -> History:
    """Load and run; `options` are those of `load` and of `Workflow.run`.

    `only` are the nodes to keep: the rest of the valid workflow, such as a decode behind them, does not run.
    """
    run = {name: options.pop(name) for name in RUN_OPTIONS if name in options}
    workflow = load(prompt, **options)
    if only and workflow.verdict.error is None:
        workflow = replace(workflow, verdict=replace(workflow.verdict, outputs=tuple(only)))
        run["keep"] = only
    return workflow.run(**run)

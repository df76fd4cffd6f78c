"""Workflow runs in one embedded host, which keeps experts open until a test frees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import History, Workflow, load_workflow
from wanstream.host.embedded.workflow.graph import Prompt
from wanstream.host.embedded.workflow.io import ComfyNode
from wanstream.host.embedded.workflow.validate import Verdict

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
    return load_workflow(
        prompt, host=embedded_host, nodes=nodes, folders=folders, device=device, strict=strict
    )


def validate_workflow(
    prompt: Prompt | None, nodes: Sequence[type[ComfyNode]], **folders: Path
) -> Verdict:
    return load(prompt, nodes=nodes, **folders).verdict


RUN_OPTIONS = ("on_progress", "keep")


def run_workflow(prompt: Prompt | None, *, only: Sequence[str] = (), **options: Any) -> History:
    """Load and run. `options` are for `load` and `Workflow.run`.

    `on_event` gets the events announced by nodes. `only` are the nodes to keep: the rest of the
    valid workflow, such as a decode behind them, does not run.
    """
    on_event = options.pop("on_event", embedded_host.events.announce)
    run = {name: options.pop(name) for name in RUN_OPTIONS if name in options}
    workflow = load(prompt, **options)
    if only and workflow.verdict.error is None:
        workflow = replace(workflow, verdict=replace(workflow.verdict, outputs=tuple(only)))
        run["keep"] = only
    with patch.object(embedded_host.events, "announce", on_event):
        return workflow.run(**run)

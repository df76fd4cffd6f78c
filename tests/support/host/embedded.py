"""Workflow runs in one embedded host, which keeps experts open until a test frees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from wanstream.host.embedded import EmbeddedHost, Folders, History, Prompt, load_workflow

embedded_host = EmbeddedHost()


def load(prompt, *, nodes, models, input_dir, output=Path(), device=None, strict=False):
    folders = Folders(models=models, output=output, input=input_dir)
    return load_workflow(
        prompt, host=embedded_host, nodes=nodes, folders=folders, device=device, strict=strict
    )


def validate_workflow(prompt, nodes, **folders):
    return load(prompt, nodes=nodes, **folders).verdict


RUN_OPTIONS = ("on_progress", "keep")


def run_workflow(prompt: Prompt | None, *, only: Sequence[str] = (), **options) -> History:
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

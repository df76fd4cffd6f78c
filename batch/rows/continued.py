"""Workflow for a row that continues another one: input and file name for the other row's latent."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from ...host import LATENT
from ...host.embedded import InputError, Prompt, as_link

CONTINUE = "WanStreamContinueVideo"
PREVIOUS = "previous"
PREVIOUS_FILE = "previous_file"
NO_FILE = "none"
SAVERS = ("WanStreamSaveLatent", "SaveLatent")
FOLDER = "continued"
"""Folder below the backend's output folder, for latents that a batch gives to workflows."""


def latent_name(workflow: str, source: str) -> str:
    """Return the latent's name below the backend's output folder, for the row with hash `source`.

    It depends on the row and the `workflow` digest, so batches of several workflows can share a
    server. It does not depend on the run, so a workflow in a file's metadata identifies the row.
    """
    return f"{FOLDER}/{hashlib.sha256(json.dumps([workflow, source]).encode()).hexdigest()}{LATENT}"


def continue_from(prompt: Prompt, workflow: Prompt, latent: str) -> Prompt:
    """Return a copy of `prompt` that continues the saved `latent`, a name from `latent_name`.

    Args:
        prompt: workflow with the row's values.
        workflow: workflow of the batch.
        latent: name of the file to continue.

    Raises:
        InputError: the workflow does not have exactly one continuing node and one saving a latent,
            or the row chooses a file too.
    """
    node_id = _only(
        [
            node_id
            for node_id, node in prompt.items()
            if node.get("class_type") == CONTINUE
            and as_link(node.get("inputs", {}).get(PREVIOUS)) is None
        ],
        f"{CONTINUE} whose {PREVIOUS} is not connected",
    )
    _only(
        [node_id for node_id, node in prompt.items() if node.get("class_type") in SAVERS],
        " or ".join(SAVERS),
    )
    # Compared with the workflow: a value from there is a default, and a row may keep it.
    if _file_of(prompt, node_id) != _file_of(workflow, node_id):
        raise InputError(
            f"the row sets {node_id}.{PREVIOUS_FILE}, and continues a row: leave one of them out"
        )
    # A deep copy, because other rows may share the nodes.
    changed: dict[str, Any] = copy.deepcopy(dict(prompt))
    changed[node_id].setdefault("inputs", {})[PREVIOUS_FILE] = latent
    return changed


def _only(found: list[str], wanted: str) -> str:
    if len(found) != 1:
        listed = f" ({', '.join(found)})" * bool(found)
        raise InputError(
            f"a row that continues another one needs one {wanted} in the workflow, which has "
            f"{len(found)}{listed}"
        )
    return found[0]


def _file_of(prompt: Prompt, node_id: str) -> object:
    return prompt[node_id].get("inputs", {}).get(PREVIOUS_FILE, NO_FILE)

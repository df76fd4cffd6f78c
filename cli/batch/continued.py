"""Workflow of a row that continues another one: the input that reads the latent of that row, and the file's name."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from ...host import LATENT
from ...host.embedded import Prompt, as_link
from ..inputs import InputError

CONTINUE, PREVIOUS, PREVIOUS_FILE, NO_FILE = "WanStreamContinueVideo", "previous", "previous_file", "none"
SAVERS = ("WanStreamSaveLatent", "SaveLatent")
FOLDER = "continued"
"""Folder of the latents that a batch gives to its workflows, below the output folder of the backend."""


def latent_name(workflow: str, source: str) -> str:
    """Return the name, below the backend's output folder, of the latent of the row with the hash `source`.

    It depends on the row and the digest of the `workflow`, so that batches of several workflows can share a server, and
    not on the run, so that a workflow in the metadata of a file identifies its row.
    """
    return f"{FOLDER}/{hashlib.sha256(json.dumps([workflow, source]).encode()).hexdigest()}{LATENT}"


def continue_from(prompt: Prompt, workflow: Prompt, latent: str) -> Prompt:
    """Return a copy of a row's `prompt` that continues the saved `latent`, a name of `latent_name`.

    Args:
        prompt: workflow with the values of the row.
        workflow: workflow of the batch.
        latent: name of the file to continue.

    Raises:
        InputError: the workflow does not have exactly one node that continues and one that saves a latent, or the row
            chooses a file too.
    """
    node_id = _only(
        [node_id for node_id, node in prompt.items() if node.get("class_type") == CONTINUE and not _has_previous(node)],
        f"{CONTINUE} whose {PREVIOUS} is not connected",
    )
    _only([node_id for node_id, node in prompt.items() if node.get("class_type") in SAVERS], " or ".join(SAVERS))
    if _file_of(prompt, node_id) != _file_of(workflow, node_id):
        raise InputError(f"the row sets {node_id}.{PREVIOUS_FILE}, and continues a row: leave one of them out")
    changed: dict[str, Any] = copy.deepcopy(dict(prompt))
    changed[node_id].setdefault("inputs", {})[PREVIOUS_FILE] = latent
    return changed


def _only(found: list[str], wanted: str) -> str:
    if len(found) != 1:
        listed = f" ({', '.join(found)})" if found else ""
        raise InputError(
            f"a row that continues another one needs one {wanted} in the workflow, which has {len(found)}{listed}"
        )
    return found[0]


def _has_previous(node: Any) -> bool:
    return as_link(node.get("inputs", {}).get(PREVIOUS)) is not None


def _file_of(prompt: Prompt, node_id: str) -> object:
    return prompt[node_id].get("inputs", {}).get(PREVIOUS_FILE, NO_FILE)

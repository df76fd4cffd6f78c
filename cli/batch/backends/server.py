"""ComfyUI server as a batch backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....host.embedded import Prompt, Verdict
from .base import Ended, Interrupted, JobFailed, MadeFile, Outcome, RefusedError, UnderWay, Unknown, UnreachableError
from .comfy_client import ComfyClient, NotComfyUIError
from .object_info import ObjectInfo

_OK, _BAD_REQUEST, _TOO_LARGE, _BROKEN = 200, 400, 413, 500


class ServerBackend:
    """`BatchBackend` on a server. One workflow runs while another one waits, so that the server is never idle."""

    window = 2

    def __init__(self, client: ComfyClient, info: ObjectInfo) -> None:
        self._client = client
        self._info = info
        self._whole: set[str] = set()

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow, and cancel it if the server drops some of its outputs as invalid."""
        status, answer = self._client.post_prompt(prompt_id, prompt)
        if status >= _BROKEN:
            raise UnreachableError(f"{self._client.url} answers with status {status}")
        if status not in {_OK, _BAD_REQUEST, _TOO_LARGE}:
            raise NotComfyUIError(f"{self._client.url} does not accept workflows (status {status})")
        if status == _OK and not isinstance(answer, dict):
            raise UnreachableError(f"the response of {self._client.url} to a workflow is incomplete")
        response = answer if isinstance(answer, dict) else {}
        if status == _OK and response.get("prompt_id") != prompt_id:
            self.withdraw(str(response.get("prompt_id")))
            raise NotComfyUIError(f"{self._client.url} ignores prompt ids: a batch needs ComfyUI 0.3.64 or later")
        if status == _OK and not response.get("node_errors"):
            self._whole.add(prompt_id)
            return
        if status == _OK:
            self.withdraw(prompt_id)
            self.interrupt(prompt_id)
        with self._client.shape("/prompt"):
            faults = _describe_faults(response)
        raise RefusedError(faults or f"the server refuses it with status {status}")

    def outcome(self, prompt_id: str) -> Outcome:
        job = self._client.job(prompt_id)
        if job is None:
            return Unknown()
        with self._client.shape(f"/api/jobs/{prompt_id}"):
            outcome = _outcome(job)
        # If the response to the post was lost, the server may have dropped outputs.
        if isinstance(outcome, Ended) and prompt_id not in self._whole and not self._was_whole(prompt_id):
            return Unknown()
        return outcome

    def fetch(self, file: MadeFile, part: Path) -> None:
        self._client.download(file.filename, file.subfolder, part)

    def withdraw(self, prompt_id: str) -> None:
        self._client.delete(prompt_id)

    def interrupt(self, prompt_id: str) -> None:
        self._client.interrupt(prompt_id)

    def release(self, prompt_id: str) -> None:
        self._whole.discard(prompt_id)

    def halt(self) -> None:
        """Do nothing: no method of this backend blocks."""

    def _was_whole(self, prompt_id: str) -> bool:
        executed = self._client.executed(prompt_id)
        if executed is None:
            return False
        prompt, outputs = executed
        with self._client.shape("/history"):
            wanted = {
                node_id for node_id, node in prompt.items() if self._info.get(node["class_type"], {}).get("output_node")
            }
        return outputs == wanted


def _outcome(job: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a response of `/api/jobs/ID`."""
    if job["status"] in {"pending", "in_progress"}:
        return UnderWay(begun=job["status"] == "in_progress")
    if job["status"] == "cancelled":
        return Interrupted()
    if job["status"] != "completed":
        return JobFailed(reason=_failure(job.get("execution_error") or {}))
    return Ended(files=_files(job.get("outputs") or {}))


def _describe_faults(answer: Mapping[str, Any]) -> str:
    """Return the faults of the nodes or, if there are none, that of the workflow."""
    error = answer.get("error")
    if error is not None and not isinstance(error, dict):
        return str(error)
    node_errors = answer.get("node_errors") or {}
    return "; ".join(Verdict(prompt={}, error=error, node_errors=node_errors).lines())


def _failure(error: Mapping[str, Any]) -> str:
    message = str(error.get("exception_message", "the server returned no reason")).strip()
    if "node_id" not in error:
        return message
    return f"node {error['node_id']} ({error.get('node_type')}): {message}"


def _files(outputs: Mapping[str, Any]) -> tuple[MadeFile, ...]:
    """Return the files in the output folder; previews are in the temporary folder."""
    files: dict[MadeFile, None] = {}
    for node_id, shown in sorted(outputs.items()):
        for values in shown.values() if isinstance(shown, dict) else ():
            for value in values if isinstance(values, list) else ():
                if isinstance(value, dict) and value.get("type") == "output" and value.get("filename"):
                    # Converted to text, because nodes of other packs may return anything.
                    filename, subfolder = str(value["filename"]), str(value.get("subfolder") or "")
                    files[MadeFile(node_id=node_id, filename=filename, subfolder=subfolder)] = None
    return tuple(files)

"""A ComfyUI server as the host of a batch."""

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
    """Implements `BatchBackend`. One workflow runs there while another one waits, so that the server is never idle."""

    window = 2

    def __init__(self, client: ComfyClient, info: ObjectInfo) -> None:
        self._client = client
        self._info = info
        self._whole: set[str] = set()

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """A server runs what is valid of a workflow and drops the rest: here it is all or nothing."""
        status, answer = self._client.post_prompt(prompt_id, prompt)
        if status >= _BROKEN:
            raise UnreachableError(f"{self._client.url} answers with status {status}")
        if status not in {_OK, _BAD_REQUEST, _TOO_LARGE}:
            raise NotComfyUIError(f"{self._client.url} does not take workflows from here (status {status})")
        if status == _OK and not isinstance(answer, dict):
            raise UnreachableError(f"the answer of {self._client.url} to a workflow is not whole")
        said = answer if isinstance(answer, dict) else {}
        if status == _OK and said.get("prompt_id") != prompt_id:
            self.withdraw(str(said.get("prompt_id")))
            raise NotComfyUIError(f"{self._client.url} gives ids of its own: a batch needs ComfyUI 0.3.64 or later")
        if status == _OK and not said.get("node_errors"):
            self._whole.add(prompt_id)
            return
        if status == _OK:
            self.withdraw(prompt_id)
            self.interrupt(prompt_id)
        with self._client.shape("/prompt"):
            words = _words(said)
        raise RefusedError(words or f"the server refuses it with status {status}")

    def outcome(self, prompt_id: str) -> Outcome:
        job = self._client.job(prompt_id)
        if job is None:
            return Unknown()
        with self._client.shape(f"/api/jobs/{prompt_id}"):
            outcome = _outcome(job)
        # Whoever did not hear the answer to its post does not know whether outputs were dropped.
        if isinstance(outcome, Ended) and prompt_id not in self._whole and not self._was_whole(prompt_id):
            return Unknown()
        return outcome

    def fetch(self, file: MadeFile, part: Path) -> None:
        self._client.download(file.filename, file.subfolder, part)

    def withdraw(self, prompt_id: str) -> None:
        self._client.delete(prompt_id)

    def interrupt(self, prompt_id: str) -> None:
        self._client.interrupt(prompt_id)

    def forget(self, prompt_id: str) -> None:
        self._whole.discard(prompt_id)

    def halt(self) -> None:
        """Nothing: no method of this host computes."""

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
    """Return what `/api/jobs/ID` says."""
    if job["status"] in {"pending", "in_progress"}:
        return UnderWay(begun=job["status"] == "in_progress")
    if job["status"] == "cancelled":
        return Interrupted()
    if job["status"] != "completed":
        return JobFailed(reason=_failure(job.get("execution_error") or {}))
    return Ended(files=_files(job.get("outputs") or {}))


def _words(answer: Mapping[str, Any]) -> str:
    """The server's faults, the nodes' before that of the workflow."""
    error = answer.get("error")
    if error is not None and not isinstance(error, dict):
        return str(error)
    node_errors = answer.get("node_errors") or {}
    return "; ".join(Verdict(prompt={}, error=error, node_errors=node_errors).lines())


def _failure(error: Mapping[str, Any]) -> str:
    message = str(error.get("exception_message", "the server does not say why")).strip()
    if "node_id" not in error:
        return message
    return f"node {error['node_id']} ({error.get('node_type')}): {message}"


def _files(outputs: Mapping[str, Any]) -> tuple[MadeFile, ...]:
    """What lies in the output folder; previews lie in the temporary one."""
    files: dict[MadeFile, None] = {}
    for node_id, shown in sorted(outputs.items()):
        for values in shown.values() if isinstance(shown, dict) else ():
            for value in values if isinstance(values, list) else ():
                if isinstance(value, dict) and value.get("type") == "output" and value.get("filename"):
                    # A node of anybody's may show anything.
                    filename, subfolder = str(value["filename"]), str(value.get("subfolder") or "")
                    files[MadeFile(node_id=node_id, filename=filename, subfolder=subfolder)] = None
    return tuple(files)

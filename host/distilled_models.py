"""Notice about CFG with a distilled model or few-step LoRA, from file names in a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..schema.records import Notice, NoticeLevel
from ..wan import is_for_few_steps

_WEIGHTS = (".safetensors", ".sft", ".gguf")
_MODEL_INPUTS = ("model", "guider")
_SWITCH = {"switch", "on_true", "on_false"}
"""Inputs on ComfyUI's switch node. It passes on one of two values."""
_STRENGTHS = ("strength_model", "strength")


def cfg_notices(
    prompt: Mapping[str, Any], node: str | None, cfg: object, *, is_wan: bool
) -> list[Notice]:
    """Return a notice if the sampler `node` runs a distilled model with a `cfg` above 1.

    The node is in a queued graph.

    A LoRA with strength 0 does not count, nor does a file whose name is missing in the graph. For
    models other than Wan the level is "note", because less is known about their names.
    """
    if not isinstance(cfg, int | float) or cfg <= 1:
        return []
    for name in _files_before(prompt, node):
        if is_for_few_steps(name):
            text = (
                f"{name} needs no CFG, and cfg is {cfg:g}: set it to 1, or the result gets harsh "
                "colours and takes twice the time"
            )
            level: NoticeLevel = "wrong" if is_wan else "note"
            return [Notice(text=text, level=level, values={"cfg": cfg})]
    return []


def node_with_cfg(prompt: Mapping[str, Any], node: str | None) -> str | None:
    """Return a sampler's guider if it has the `cfg`, else the sampler."""
    guider = _source(_inputs_of(prompt, node).get("guider"))
    if "cfg" in _inputs_of(prompt, guider):
        return guider
    return node


def still_has(prompt: Mapping[str, Any], node: str, texts: Sequence[str]) -> bool:
    """Return True if the notices on `node` apply to a queued graph.

    A linked `cfg` is known only in the run.
    """
    # The texts are the same for other models.
    notices = cfg_notices(prompt, node, _inputs_of(prompt, node).get("cfg"), is_wan=True)
    return [notice.text for notice in notices] == list(texts)


def _files_before(prompt: Mapping[str, Any], node: str | None) -> Iterator[str]:
    """Yield weight file names from all nodes along a sampler's MODEL inputs."""
    found = [node]
    for key in found:  # grows meanwhile
        inputs = _inputs_of(prompt, key)
        if not any(inputs.get(strength) == 0 for strength in _STRENGTHS):
            for value in inputs.values():
                if isinstance(value, str) and value.lower().endswith(_WEIGHTS):
                    yield PurePosixPath(value.replace("\\", "/")).name
        sources = [
            _source(value) for name, value in inputs.items() if name.startswith(_MODEL_INPUTS)
        ]
        if inputs.keys() >= _SWITCH:
            sources = [_source(inputs.get(_branch(prompt, inputs["switch"])))]
        found += [source for source in sources if source is not None and source not in found]


def _inputs_of(prompt: Mapping[str, Any], node: str | None) -> Mapping[str, Any]:
    part = prompt.get(node or "")
    if not isinstance(part, Mapping) or not isinstance(part.get("inputs"), Mapping):
        return {}
    inputs: Mapping[str, Any] = part["inputs"]
    return inputs


def _source(value: object) -> str | None:
    """Return the node at the other end of a link, or None for a constant."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return None


def _branch(prompt: Mapping[str, Any], switch: object) -> str:
    """Return the input selected by a switch.

    ComfyUI's templates link the switch to a node with the value.
    """
    source = _source(switch)
    if source is not None:
        switch = _inputs_of(prompt, source).get("value")
    return "on_true" if switch else "on_false"

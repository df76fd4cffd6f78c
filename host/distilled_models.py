"""Notice about CFG with a model or LoRA distilled to a few steps, by the names of the files in a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..schema import Notice, NoticeLevel
from ..wan import is_for_few_steps

_WEIGHTS = (".safetensors", ".sft", ".gguf")
_MODEL_INPUTS = ("model", "guider")
_SWITCH = {"switch", "on_true", "on_false"}
"""Inputs of ComfyUI's switch, which passes on one of two values."""
_STRENGTHS = ("strength_model", "strength")


def cfg_notices(prompt: Mapping[str, Any], node: str | None, cfg: object, *, is_wan: bool) -> list[Notice]:
    """Return a notice if the sampler `node` of a queued graph runs a distilled model with a `cfg` above 1.

    A LoRA that is loaded with a strength of 0 does not count, nor a file whose name is not in the graph.
    For models other than Wan, of whose names less is known, it is a note.
    """
    if not isinstance(cfg, int | float) or cfg <= 1:
        return []
    for name in _files_before(prompt, node):
        if is_for_few_steps(name):
            text = f"{name} needs no CFG, and cfg is {cfg:g}: set it to 1, or the result gets harsh colours and takes "
            level: NoticeLevel = "wrong" if is_wan else "note"
            return [Notice(text=f"{text}twice the time", level=level, values={"cfg": cfg})]
    return []


def node_with_cfg(prompt: Mapping[str, Any], node: str | None) -> str | None:
    """Return the guider of a sampler if that has the `cfg`, else the sampler."""
    guider = _source(_inputs_of(prompt, node).get("guider"))
    return guider if "cfg" in _inputs_of(prompt, guider) else node


def still_has(prompt: Mapping[str, Any], node: str, texts: Sequence[str]) -> bool:
    """Return True if the notices on `node` are those of a queued graph; a linked `cfg` is known only in the run."""
    notices = cfg_notices(prompt, node, _inputs_of(prompt, node).get("cfg"), is_wan=True)  # their texts are equal
    return [notice.text for notice in notices] == list(texts)


def _files_before(prompt: Mapping[str, Any], node: str | None) -> Iterator[str]:
    """Yield the names of the weight files in the nodes through which the MODEL of a sampler comes."""
    found = [node]
    for key in found:  # grows meanwhile
        inputs = _inputs_of(prompt, key)
        if not any(inputs.get(strength) == 0 for strength in _STRENGTHS):
            for value in inputs.values():
                if isinstance(value, str) and value.lower().endswith(_WEIGHTS):
                    yield PurePosixPath(value.replace("\\", "/")).name
        sources = [_source(value) for name, value in inputs.items() if name.startswith(_MODEL_INPUTS)]
        if inputs.keys() >= _SWITCH:
            sources = [_source(inputs.get(_branch(prompt, inputs["switch"])))]
        found += [source for source in sources if source is not None and source not in found]


def _inputs_of(prompt: Mapping[str, Any], node: str | None) -> Mapping[str, Any]:
    part = prompt.get(node or "")
    inputs = part.get("inputs") if isinstance(part, Mapping) else None
    return inputs if isinstance(inputs, Mapping) else {}


def _source(value: object) -> str | None:
    """Return the node at the other end of a link; None for a constant."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else None


def _branch(prompt: Mapping[str, Any], switch: object) -> str:
    """Return the input that a switch takes. ComfyUI's templates link the switch to a node with its value."""
    source = _source(switch)
    value = switch if source is None else _inputs_of(prompt, source).get("value")
    return "on_true" if value else "on_false"

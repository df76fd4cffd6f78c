"""Private names and versions of ComfyUI: only `host/comfy/versions.py` may contain them."""

from __future__ import annotations

import ast
import builtins
import re
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
COMFY = ROOT / "host" / "comfy"
VERSIONS = COMFY / "versions.py"
FILES = sorted(path for path in (ROOT / "host").rglob("*.py") if path != VERSIONS)

TORCH = {
    "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl",
    "_version", "_is_param", "_orig_mod", "_load_from_state_dict",
}  # fmt: skip
"""Private names in torch."""

SHARED = {
    "APPLY_MODEL", "BaseModel", "CLIP", "INPUT_TYPES", "Linear", "ModelPatcher", "WAN21",
    "WrappersMP", "arguments", "bias", "cfg", "clone", "conds", "control", "current_patcher",
    "default", "get_dtype", "get_user_directory", "get_wrappers", "hooks", "input", "instance",
    "is_injected", "load_device", "lora", "memory_required", "model", "model_base",
    "model_detection", "load_checkpoint_guess_config", "model_management", "model_options",
    "model_patcher", "nodes", "noise", "not_loaded", "object_patches", "offload_device", "ops",
    "parent", "patcher_extension", "patches", "pinned", "pinned_bytes", "release_pinned",
    "required", "scaled_fp8", "sd", "sockets", "unet_prefix_from_state_dict", "utils", "weight",
    "weight_adapter", "weights", "wrappers",
}  # fmt: skip
"""Names in `versions.py` also used by us, or public."""

PROBES = {"hasattr", "getattr", "setattr", "delattr"}
LOOKS = {"signature", "getclosurevars", "getsource", "getattr_static", "getmembers"}
INSPECTED = {*LOOKS, "find_spec", "import_module"}
FAILED_IMPORT = re.compile("ImportError|ModuleNotFoundError")
VERSION = re.compile(r"\b0\.\d+\.\d+\b|ComfyUI 0\.\d+|comfyui_version")


def _strings_and_attributes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "versions":
            yield node, node.attr
        elif isinstance(node, ast.Constant) and _is_identifier(node.value):
            yield node, node.value


def _is_identifier(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _known() -> set[str]:
    """Return names in Python and torch."""
    kinds = [str, dict, list, tuple, Path, BaseException, builtins, uuid]
    kinds += [torch, torch.nn, torch.Tensor, torch.nn.Module, torch.device]
    return {name for kind in kinds for name in dir(kind)}


@cache
def _private_names() -> set[str]:
    """Return the private names in `versions.py`."""
    tree = ast.parse(VERSIONS.read_text(encoding="utf-8"))
    found = {name for _, name in _strings_and_attributes(tree)}
    return found - _known() - SHARED - TORCH - INSPECTED


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in TORCH


def _own_names(tree: ast.AST) -> set[str]:
    """Return what a file defines: functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_stored_in_self(node):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _is_stored_in_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in {"self", "cls"}


def _overridden(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield private methods of classes derived from ComfyUI's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(_is_of_comfy(base) for base in node.bases):
            for each in node.body:
                is_method = isinstance(each, ast.FunctionDef) and _is_private(each.name)
                if is_method and "super()" in ast.unparse(each):
                    yield each, f"overrides {each.name}"


def _is_of_comfy(base: ast.expr) -> bool:
    return ast.unparse(base).startswith(("comfy", "versions.")) or "Patcher" in ast.unparse(base)


def faults(source: str, private: set[str], *, in_comfy: bool = True) -> Iterator[tuple[int, str]]:
    """Yield lines with private names or versions of ComfyUI, and the reasons."""
    tree = ast.parse(source)
    own = _own_names(tree)
    for node, name in _strings_and_attributes(tree):
        if name in private and name not in own:
            yield node.lineno, f"{name} is a private name of ComfyUI"
        if isinstance(node, ast.Attribute) and _is_private(name):
            owner = ast.unparse(node.value)
            if owner == "super()" or (name not in own and in_comfy):
                yield node.lineno, f"{owner}.{name} is private"
    for found, reason in _overridden(tree):
        yield found.lineno, reason  # type: ignore[attr-defined]
    if in_comfy:
        yield from _probes(tree)
        for number, line in enumerate(source.splitlines(), start=1):
            if VERSION.search(line):
                yield number, "names a version"


def _probes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PROBES:
            probed = node.args[1]
            if isinstance(probed, ast.Constant) and not str(probed.value).startswith("__"):
                yield node.lineno, f"{ast.unparse(node)} looks for a name"
        elif isinstance(node, ast.Name | ast.Attribute | ast.alias):
            fields = {"Name": "id", "Attribute": "attr", "alias": "name"}
            name = getattr(node, fields[type(node).__name__])
            if name in INSPECTED:
                yield node.lineno, f"{name} looks at an object of ComfyUI"
        elif isinstance(node, ast.ExceptHandler) and FAILED_IMPORT.search(ast.dump(node)):
            yield node.lineno, "tries an import"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_other_file_touches_private_names_of_comfyui(path):
    source = path.read_text(encoding="utf-8")
    in_comfy = path.is_relative_to(COMFY)
    found = faults(source, _private_names(), in_comfy=in_comfy)
    assert [f"{path.name}:{line} {reason}" for line, reason in found] == []


SUPER = "return super()._load_list()"


@pytest.mark.parametrize(
    "line",
    [
        "layer.comfy_cast_weights = True",
        'vars(layer)["comfy_patched_weights"] = True',
        "patcher._load_list()",
        f"class A(comfy.model_patcher.ModelPatcher):\n    def load(self):\n        {SUPER}",
        f"class A(StreamedPatcher):\n    def _load_list(self):\n        {SUPER}",
        "comfy.samplers._calc_cond_batch(1)",
        'hasattr(comfy.utils, "convert_old_quants")',
        "inspect.signature(comfy.sd.load_checkpoint)",
        "from inspect import getclosurevars",
        'find_spec("comfy.quant_ops")',
        "import comfyui_version",
        'version >= "0.18.1"',
        "pass  # ComfyUI 0.33 and later",
        "try:\n    import comfy.new\nexcept ImportError:\n    pass",
        'options["transformer_options"]',
    ],
)
def test_line_with_a_private_name_is_found(line):
    assert [*faults(line, _private_names())]


@pytest.mark.parametrize(
    "line", ["self._count = 1\nself._count", "versions.is_dynamic(model)", "layer._parameters"]
)
def test_own_and_public_names_are_allowed(line):
    assert [*faults(line, _private_names())] == []

"""Runs in ComfyUI's own Python: the public names of ComfyUI in `host/comfy`, and our overrides."""

import ast
import inspect
import textwrap
from contextlib import suppress

from torch import nn

from wanstream.host.comfy.experts.guider import ExpertsGuider
from wanstream.host.comfy.experts.patcher import ExpertsModel, ExpertsPatcher
from wanstream.host.comfy.native.encoders import EncoderPatcher
from wanstream.host.comfy.native.join import JoinedPatcher
from wanstream.host.comfy.native.streamed.patcher import NativePatcher
from wanstream.host.comfy.samplers import FlowSampling

from ..pack import ROOT

EXPERTS = (ExpertsPatcher, ExpertsModel, ExpertsGuider, FlowSampling)
CLASSES = (NativePatcher, JoinedPatcher, EncoderPatcher, *EXPERTS)
"""Our subclasses of ComfyUI's classes."""

PUBLIC_VARIABLES = {"SCHEDULER_NAMES", "args"}
"""Variables in ComfyUI's modules used by node packs."""


class _Other(Exception):
    """An expression that is no member of a ComfyUI module."""


def _imported(node):
    """Yield the ComfyUI modules and members imported by a statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            if top.startswith("comfy") or top in {"folder_paths", "latent_preview"}:
                yield top, __import__(alias.name)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("comfy"):
        module = __import__(node.module, fromlist=["*"])
        yield from ((alias.name, getattr(module, alias.name)) for alias in node.names)


def _member(node, imported):
    if isinstance(node, ast.Name) and node.id in imported:
        return imported[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_member(node.value, imported), node.attr)
    raise _Other


def _fault(node, imported):
    """Return why ComfyUI has no such member, or does not take such a call, in words."""
    try:
        if isinstance(node, ast.Call):
            return _call_fault(node, _member(node.func, imported))
        member = _member(node, imported)
    except AttributeError as err:
        return str(err)
    if not isinstance(node, ast.Attribute) or node.attr in PUBLIC_VARIABLES:
        return ""
    is_value = not inspect.ismodule(member) and not callable(member)
    if is_value and inspect.ismodule(_member(node.value, imported)):
        return f"{node.attr} is a variable of a module: put it into versions.py"
    return ""


def _call_fault(call, function):
    named = {each.arg: each.value for each in call.keywords}
    if None in named or any(isinstance(each, ast.Starred) for each in call.args):
        return ""
    with suppress(ValueError):  # a class without a signature
        try:
            inspect.signature(function).bind(*call.args, **named)
        except TypeError as err:
            return str(err)
    return ""


def check_public_names(_):
    """All members exist, and take our calls. Names in `versions.py` are checked there."""
    faults = {}
    for file in {*(ROOT / "host" / "comfy").rglob("*.py")}:
        if file.name == "versions.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = {name: found for node in tree.body for name, found in _imported(node)}
        for node in ast.walk(tree):
            with suppress(_Other):
                if fault := _fault(node, imported):
                    faults[f"{file.name}:{node.lineno} {ast.unparse(node)}"] = fault
    assert not faults


def _of_self(kind, context):
    """Return the attributes on `self` and `super()` in a class's source."""
    return {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind))))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and ast.unparse(node.value) in {"self", "super()"}
    }


def _override_fault(ours, theirs):
    """Return "" if `ours` takes all arguments from `theirs`, all by name or all by position."""
    parameters = inspect.signature(theirs).parameters.values()
    _, *named = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    bind = inspect.signature(ours).bind
    try:
        bind(None, **dict.fromkeys(named))
    except TypeError as err:
        try:
            bind(None, *named)
        except TypeError:
            return f"{err}: {named}"
    return ""


def check_overrides(_):
    """They take ComfyUI's arguments, and the attributes that they read on `self` exist."""
    faults = {}
    for kind in CLASSES:
        ours = [each for each in kind.__mro__ if each.__module__.startswith("wanstream.")]
        core = [each for each in kind.__mro__ if each.__module__.startswith("comfy.")]
        known = {*dir(nn.Module), *dir(object)}
        for each in (*ours, *core):
            known |= {*vars(each), *_of_self(each, ast.Store)}
        for each in ours:
            own = inspect.get_annotations(each)
            for name in _of_self(each, ast.Load) - known - own.keys():
                faults[f"{each.__name__}.{name}"] = "ComfyUI has no such attribute"
            for name, method in inspect.getmembers(each, inspect.isfunction):
                base = next((vars(one)[name] for one in core if name in vars(one)), None)
                if name in vars(each) and inspect.isfunction(base) and name != "__init__":
                    faults[f"{each.__name__}.{name}"] = _override_fault(method, base)
    faults = {name: fault for name, fault in faults.items() if fault}
    assert not faults

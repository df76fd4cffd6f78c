"""Runs in ComfyUI's own Python: checks, as tests outside of pytest.

Checks are functions named `check_*`. The first argument comes from `setup(folder)` in the module,
which returns or yields it as a pytest fixture does. Without `setup` it is the folder.
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar
from unittest import SkipTest

import comfy.model_management
import comfyui_version
import torch

Check = TypeVar("Check", bound=Callable[..., None])
SHOWN = 2000
"""Characters of a frame in a traceback, with the local values."""


def for_each(*rows) -> Callable[[Check], Check]:
    """Run a check once for each row of further arguments. A single value is a row."""

    def mark(check: Check) -> Check:
        check.rows = [row if isinstance(row, tuple) else (row,) for row in rows]
        return check

    return mark


def outcomes(module: str, folder: str) -> dict[str, str]:
    """Run a module's checks. Return for each an empty text, the reason of a skip or a traceback.

    They run in inference mode, as ComfyUI's nodes do, unless the module sets `INFERENCE_MODE`.
    """
    torch.set_num_threads(1)
    checks = import_module(f".{module}", __package__)
    found = {}
    with torch.inference_mode(getattr(checks, "INFERENCE_MODE", True)):
        try:
            setup = _setup(checks, Path(folder))
        except SkipTest as err:
            return {"setup": f"skipped: {err}"}
        with setup as given:
            for name, check in [*vars(checks).items()]:
                if not name.startswith("check_") or check.__module__ != checks.__name__:
                    continue
                for row in getattr(check, "rows", [()]):
                    shown = [str(getattr(value, "__name__", value)) for value in row]
                    found[", ".join([name, *shown])] = _outcome(check, given, *row)
                    comfy.model_management.unload_all_models()
                    gc.collect()
                    gc.freeze()  # else every collection traverses a hundred thousand kept objects
    return found


def _setup(checks: ModuleType, folder: Path):
    setup = getattr(checks, "setup", Path)
    if inspect.isgeneratorfunction(setup):
        return contextmanager(setup)(folder)
    return nullcontext(setup(folder))


def _outcome(check: Callable[..., None], *arguments: object) -> str:
    try:
        check(*arguments)
    except SkipTest as err:
        return f"skipped: {err}"
    except Exception as err:  # noqa: BLE001 - a check that fails must not hide the others
        lines = traceback.TracebackException.from_exception(err, capture_locals=True).format()
        return "".join(line[:SHOWN] for line in lines)
    return ""


def require(there: object, what: str) -> None:
    """Skip a check, or a module, in an old ComfyUI without something. Newer ones have all."""
    if not there:
        version = comfyui_version.__version__
        assert [int(part) for part in version.split(".")] < [0, 33], f"no {what} in {version}"
        raise SkipTest(what)


def refused(call, *words, kind=ValueError):
    """Return the text of a call's error, which has the words."""
    try:
        call()
    except kind as err:
        message = str(err)
        assert all(each in message for each in words), message
        return message
    raise AssertionError(f"no {kind}")

"""How Ray is imported and spoken to, without a trace in the process of the user.

Ray reads its settings from the environment, when it is imported and when it starts processes, which inherit them. They
are there only for as long as that takes.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from .ray_errors import RayMissingError

ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters; off, every port of Ray listens on loopback, on Linux too."""
PREFIX, DEBUGGER = "RAY_", "PYTHONBREAKPOINT"
TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Where a user says how Ray knows whom to trust."""


def import_ray() -> Any:
    """The module `ray`. Raises RayMissingError where it is not installed."""
    try:
        with settings({"RAY_USAGE_STATS_ENABLED": "0"}):
            return importlib.import_module("ray")
    except ModuleNotFoundError as err:
        if err.name != "ray":
            raise
        raise RayMissingError from err


@contextmanager
def own_ray() -> Iterator[None]:
    """While this lasts, a Ray that is started listens on loopback only, reports nothing, and knows a token of its own.

    Where the user says how Ray knows whom to trust, that holds.
    """
    values = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    if not any(name in os.environ for name in TOKENS):
        values["RAY_AUTH_TOKEN"] = own_token()
    with settings(values), on_loopback():
        yield


@cache
def own_token() -> str:
    """Of this process: Ray reads its token once, so that a second Ray needs the same one."""
    return secrets.token_hex(32)


@contextmanager
def on_loopback() -> Iterator[None]:
    """While this lasts, Ray takes 127.0.0.1 for what it is, instead of putting this machine's outer address there."""
    with settings({ONE_MACHINE: "0"}), _one_machine(), quiet():
        yield


@contextmanager
def settings(values: Mapping[str, str]) -> Iterator[None]:
    """While this lasts, the environment has these values; afterwards no setting of Ray is another than before.

    Ray leaves some of its own there, by which all that follows in this process would run with tokens.
    """
    kept = _of_ray()
    os.environ.update(values)
    try:
        yield
    finally:
        for name in _of_ray().keys() - kept.keys():
            del os.environ[name]
        os.environ.update(kept)


def _of_ray() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX) or name == DEBUGGER}


@contextmanager
def _one_machine() -> Iterator[None]:
    """The switch for clusters, for a Ray that was imported before it was set."""
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is None:
        yield
        return
    kept = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept  # type: ignore[attr-defined]


@contextmanager
def quiet() -> Iterator[None]:
    """Without Ray's remarks on threads and tokens, which are meant for whoever calls it."""
    logger = logging.getLogger("ray")
    kept = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(kept)

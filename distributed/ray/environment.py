"""How Ray is imported and spoken to, without a trace in the process of the user.

Ray reads its settings from the environment, when it is imported and when it starts processes, which inherit them. They
are there only for as long as that takes.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from .errors import RayMissingError, RaySetupError

ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters; off, every port of Ray listens on loopback, on Linux too."""
PREFIX, DEBUGGER = "RAY_", "PYTHONBREAKPOINT"
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""From where Ray takes whether it sends a token, and which. Without them it takes the file `~/.ray/auth_token`."""

_ENVIRONMENT = threading.RLock()
"""Held while the environment is changed: it belongs to the process, and two threads would restore each other's."""


def import_ray() -> Any:
    """The module `ray`. Raises RayMissingError where it is not installed."""
    try:
        # Only the first import reads the environment; later ones are made while another thread may have changed it.
        with nullcontext() if "ray" in sys.modules else settings({"RAY_USAGE_STATS_ENABLED": "0"}):
            return importlib.import_module("ray")
    except ModuleNotFoundError as err:
        if err.name != "ray":
            raise
        raise RayMissingError from err


@contextmanager
def own_ray() -> Iterator[None]:
    """While this lasts, a Ray that is started listens on loopback only, reports nothing, and requires its own token.

    A token in the environment belongs to a cluster, and so does a mode that requires none: both are replaced.
    """
    values = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with settings({**values, MODE: "token", TOKEN: own_token(), TOKEN_FILE: None}), on_loopback():
        forget_token()
        yield


@contextmanager
def token_of_cluster(token_file: str) -> Iterator[None]:
    """While this lasts, Ray and the processes that it starts send the token in that file, and without a file none.

    Raises RaySetupError for a file that cannot be read, or that others can read.
    """
    if token_file:
        check_token_file(token_file)
    values: dict[str, str | None] = {MODE: "disabled", TOKEN: None, TOKEN_FILE: None}
    if token_file:
        values |= {MODE: "token", TOKEN_FILE: str(Path(token_file).expanduser())}
    with settings(values):
        forget_token()
        yield


def check_token_file(token_file: str) -> None:
    """Raise RaySetupError for a token file that is not there, is empty, or that other users can read or change."""
    file = Path(token_file).expanduser()
    try:
        about = file.stat()
        empty = not file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as err:
        raise RaySetupError(
            f"the token file {file} cannot be read ({err}): correct token_file in the list of clusters, or make "
            "the file (ray get-auth-token --generate)"
        ) from err
    if empty:
        raise RaySetupError(f"the token file {file} is empty: copy the token of the cluster into it")
    # Windows has no such bits; its profile folders are private to their user.
    if os.name == "posix" and (stat.S_IMODE(about.st_mode) & 0o077 or about.st_uid != os.getuid()):
        raise RaySetupError(
            f"the token file {file} has the mode {stat.S_IMODE(about.st_mode):o} and belongs to user {about.st_uid}: "
            f"it must be your own and readable by you alone (chmod 600 {file})"
        )


def forget_token() -> None:
    """Have Ray read its token again: it keeps the first one of a process, and would send it to another cluster too."""
    raylet = sys.modules.get("ray._raylet")
    if raylet is not None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")  # whether tokens are sent at all


@cache
def own_token() -> str:
    """A token that is drawn once for this process."""
    return secrets.token_hex(32)


@contextmanager
def on_loopback() -> Iterator[None]:
    """While this lasts, Ray takes 127.0.0.1 for what it is, instead of putting this machine's outer address there."""
    with settings({ONE_MACHINE: "0"}), _one_machine(), quiet():
        yield


@contextmanager
def settings(values: Mapping[str, str | None]) -> Iterator[None]:
    """While this lasts, the environment has these values, None: not the variable; afterwards it is as it was.

    Ray leaves some of its own there, by which all that follows in this process would run with tokens. One thread at a
    time has settings; another one waits.
    """
    with _ENVIRONMENT:
        kept = _of_ray()
        os.environ.update({name: value for name, value in values.items() if value is not None})
        for name in values:
            if values[name] is None:
                os.environ.pop(name, None)
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

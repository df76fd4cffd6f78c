"""Ray's import with a temporary environment, tokens, and errors.

ValueError
  RaySetupError      workers cannot be started as configured; the message says what to change
    RayMissingError  Ray is not installed
    LostAtStartError a worker, or its machine, was lost before it was ready
    LateRayletError  a Ray on this machine did not start within Ray's own timeout

Ray reads settings from the environment, when it is imported and when it starts processes. The
processes inherit them. They are set only for this time, so other packs in the user's process are
not affected.
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
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any


class RaySetupError(ValueError):
    """Workers cannot be started as configured. The message has the reason and the remedy."""


class RayMissingError(RaySetupError):
    """Ray is not installed in this Python."""

    def __init__(self) -> None:
        super().__init__(
            "several workers need Ray, which is not installed: "
            'pip install "ray>=2.52" (or "wanstream[distributed]") '
            f"for the Python at {sys.executable}, or set the cluster of the workers to in-process "
            "for one worker without it"
        )


class LostAtStartError(RaySetupError):
    """A worker or a machine was lost before it was ready.

    The message contains the known cause.
    """


class LateRayletError(RaySetupError):
    """A Ray on this machine did not start within Ray's own timeout. Another try may succeed."""


ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters. When it is off, all Ray ports listen on loopback, on Linux too."""
PREFIX = "RAY_"
DEBUGGER = "PYTHONBREAKPOINT"
MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
"""Ray's variables for the token. Without them Ray uses the file `~/.ray/auth_token`."""

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": r"\A(Raylet is terminated|The node with node)"}
"""Variable that Ray reads when it is imported. A user's value is kept. The messages come after a
raylet has ended, with the end of the log. Ray prints them although `log_to_driver` is off."""

PROCESS_TOKEN = secrets.token_hex(32)
"""Random token for this process."""

_ENVIRONMENT = threading.RLock()
"""Lock on the process-wide environment: two threads would restore each other's values."""


def import_ray() -> Any:
    """Import and return the module `ray`. Raises RayMissingError if it is not installed."""
    values = QUIET | _ray_variables() | {"RAY_USAGE_STATS_ENABLED": "0"}
    try:
        # Only the first import reads the environment. Later ones need neither the variables nor the
        # lock.
        with nullcontext() if "ray" in sys.modules else temporary_environment(values):
            return importlib.import_module("ray")
    except ModuleNotFoundError as err:
        if err.name != "ray":
            raise
        raise RayMissingError from err


@contextmanager
def local_ray_environment() -> Iterator[None]:
    """Make a Ray started inside listen on loopback only and require a new token.

    It sends no usage statistics. A token or token mode in the user's environment is meant for a
    cluster, so both are replaced.
    """
    values = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with (
        temporary_environment({**values, MODE: "token", TOKEN: PROCESS_TOKEN, TOKEN_FILE: None}),
        on_loopback(),
    ):
        # Inside the environment, because the new token is read from it.
        reset_token_cache()
        yield


@contextmanager
def token_of_cluster(token_file: str) -> Iterator[None]:
    """Make Ray and all its processes send the token in this file, or none for an empty path.

    Raises:
        RaySetupError: the file cannot be read, is empty, or can be read by other users.
    """
    values = {MODE: "disabled", TOKEN: None, TOKEN_FILE: None}
    if token_file:
        check_token_file(token_file)
        values |= {MODE: "token", TOKEN_FILE: str(Path(token_file).expanduser())}
    with temporary_environment(values):
        reset_token_cache()
        yield


def check_token_file(token_file: str) -> None:
    """Raise RaySetupError for a missing or empty token file, or one open to other users.

    Open means readable or writable.
    """
    file = Path(token_file).expanduser()
    try:
        about = file.stat()
        empty = not file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as err:
        raise RaySetupError(
            f"the token file {file} cannot be read ({err}): correct token_file in the list of "
            "clusters, or make the file (ray get-auth-token --generate)"
        ) from err
    if empty:
        raise RaySetupError(
            f"the token file {file} is empty: copy the token of the cluster into it"
        )
    # Windows has no such bits. Profile folders are private to their user there.
    if os.name == "posix" and (stat.S_IMODE(about.st_mode) & 0o077 or about.st_uid != os.getuid()):
        raise RaySetupError(
            f"the token file {file} has the mode {stat.S_IMODE(about.st_mode):o} and belongs to "
            f"user {about.st_uid}: it must be your own and readable by you alone (chmod 600 {file})"
        )


def reset_token_cache() -> None:
    """Make Ray read the token again.

    It caches the first one, and would send it to another cluster too.
    """
    if (raylet := sys.modules.get("ray._raylet")) is not None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")  # reads the token mode again


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make Ray use 127.0.0.1 as given, and not replace it by this machine's external address."""
    with temporary_environment({ONE_MACHINE: "0"}), quiet_logging(), ExitStack() as undo:
        constants: Any = sys.modules.get("ray._private.ray_constants")
        if constants is not None:  # a Ray that is already imported has read the variable before
            undo.callback(setattr, constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)
            constants.ENABLE_RAY_CLUSTER = False
        yield


@contextmanager
def temporary_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set these environment variables (None: unset), and restore the environment on exit.

    Also removes variables added by Ray, because later connections from this process would use
    tokens. Other threads wait for the lock.
    """
    with _ENVIRONMENT:
        before = _ray_variables()
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        try:
            yield
        finally:
            for name in _ray_variables().keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def _ray_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) or name == DEBUGGER
    }


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Suppress Ray's warnings about threads and tokens. They are not for ComfyUI users."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

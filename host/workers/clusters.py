"""Ray clusters by name: built-in ones, and a settings file that no graph can change."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import platformdirs

from ...distributed import BUILTIN_CLUSTERS, cluster_named, read_clusters
from ...schema.refs import IN_PROCESS, WorkersError, WorkersRef

logger = logging.getLogger("wanstream.workers")

VARIABLE = "WANSTREAM_CLUSTERS"
"""Environment variable with the path to another file."""


def clusters_file() -> Path:
    """Return the path to the list of clusters."""
    # Not in ComfyUI's user folder: web clients may write files there.
    usual = Path(platformdirs.user_config_dir("wanstream", appauthor=False), "clusters.json")
    return Path(os.environ.get(VARIABLE) or usual)


def cluster_names() -> list[str]:
    """Return all cluster names.

    If the list cannot be read, warn and return only this machine's clusters.
    """
    try:
        return list(_clusters())
    except WorkersError as err:
        logger.warning("%s", err)
        return list(BUILTIN_CLUSTERS)


def cluster(name: object, *, in_process: bool = True) -> WorkersRef:
    """Return one worker from the cluster called `name`.

    Raises WorkersError with the valid names, or if the list cannot be read.

    `in_process`: this process counts as a cluster.
    """
    if isinstance(name, str) and name in BUILTIN_CLUSTERS:
        return BUILTIN_CLUSTERS[name]
    valid = {
        key: entry
        for key, entry in _clusters().items()
        if in_process or entry.address != IN_PROCESS
    }
    return cluster_named(name, valid, str(clusters_file()))


def _clusters() -> dict[str, WorkersRef]:
    """Return all entries with absolute token file paths, relative to the list's folder.

    `~` is expanded.
    """
    file = clusters_file()
    try:
        # Windows editors may write a byte order mark.
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return dict(BUILTIN_CLUSTERS)
    except (OSError, ValueError) as err:
        raise WorkersError(f"the list of clusters {file} cannot be read: {err}") from err
    clusters = read_clusters(text, str(file))
    for name, entry in clusters.items():
        if entry.token_file:
            # os.path, unlike pathlib, does not raise for `~` with an unknown user: the missing file
            # is refused with its path.
            token_file = file.absolute().parent / os.path.expanduser(entry.token_file)
            clusters[name] = replace(entry, token_file=str(token_file))
    return clusters

"""List of Ray clusters for workers: a settings file of the user that no graph can change."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import platformdirs

from ..schema import BUILTIN_CLUSTERS, Cluster, WorkersError, cluster_named, read_clusters

VARIABLE = "WANSTREAM_CLUSTERS"
"""Environment variable with the path of another file."""

logger = logging.getLogger("wanstream.workers")


def clusters_file() -> Path:
    """Return the path of the list of clusters."""
    # Not in ComfyUI's user folder: web clients may write files there.
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(platformdirs.user_config_dir("wanstream", appauthor=False), "clusters.json")


def cluster_names() -> list[str]:
    """Return all cluster names; only those of this machine, with a warning, if the list cannot be read."""
    try:
        return list(_clusters())
    except WorkersError as err:
        logger.warning("%s", err)
        return list(BUILTIN_CLUSTERS)


def cluster(name: object) -> Cluster:
    """Return the entry called `name`. Raises WorkersError with the valid names, or if the list cannot be read."""
    found = BUILTIN_CLUSTERS.get(name) if isinstance(name, str) else None
    return found or cluster_named(name, _clusters(), str(clusters_file()))


def _clusters() -> dict[str, Cluster]:
    """Return all entries with absolute token file paths, resolved against the folder of the list; `~` is expanded."""
    file = clusters_file()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return dict(BUILTIN_CLUSTERS)
    except (OSError, ValueError) as err:
        raise WorkersError(f"the list of clusters {file} cannot be read: {err}") from err
    folder = file.absolute().parent
    return {name: _with_whole_paths(entry, folder) for name, entry in read_clusters(text, str(file)).items()}


def _with_whole_paths(entry: Cluster, folder: Path) -> Cluster:
    # os.path, unlike pathlib, does not raise for the `~` of an unknown user: the missing file is refused with its path.
    return replace(entry, token_file=str(folder / os.path.expanduser(entry.token_file))) if entry.token_file else entry

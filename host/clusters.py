"""The list of Ray clusters that workers may run in: a settings file of the user, which no graph can change."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import platformdirs

from ..schema import HERE, Cluster, WorkersError, cluster_named, read_clusters

VARIABLE = "WANSTREAM_CLUSTERS"
"""Environment variable that names another file."""

logger = logging.getLogger("wanstream.workers")


def clusters_file() -> Path:
    """The file with the list. ComfyUI's user folder is not the place: its web interface lets clients write there."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(platformdirs.user_config_dir("wanstream", appauthor=False), "clusters.json")


def cluster_names() -> list[str]:
    """All names to choose from; only those of this machine where the list cannot be read, which is logged."""
    try:
        return list(_clusters())
    except WorkersError as err:
        logger.warning("%s", err)
        return list(HERE)


def cluster(name: object) -> Cluster:
    """The entry of that name. Raises WorkersError with the names that there are, or for a list that cannot be read."""
    found = HERE.get(name) if isinstance(name, str) else None
    return found or cluster_named(name, _clusters(), str(clusters_file()))


def _clusters() -> dict[str, Cluster]:
    """All entries, token files as absolute paths: `~` is the user's folder, and others begin at that of the list."""
    file = clusters_file()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return dict(HERE)
    except (OSError, ValueError) as err:
        raise WorkersError(f"the list of clusters {file} cannot be read: {err}") from err
    folder = file.absolute().parent
    return {name: _with_whole_paths(entry, folder) for name, entry in read_clusters(text, str(file)).items()}


def _with_whole_paths(entry: Cluster, folder: Path) -> Cluster:
    # os.path leaves the `~` of an unknown user as it is: the file is then missing, and refused with its path.
    return replace(entry, token_file=str(folder / os.path.expanduser(entry.token_file))) if entry.token_file else entry

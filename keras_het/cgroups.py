"""The cgroups of this process, by controller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def controller_folders(
    controller: str, cgroups: Path = CGROUPS, membership: Path | None = None
) -> Iterator[Path]:
    """Yield the cgroup of this process that has a controller, then its ancestors.

    Args:
        controller: name of the controller, such as "cpu".
        cgroups: where the cgroup file systems are mounted.
        membership: file that names the cgroups of the process, that of this process by default.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (membership or Path("/proc/self/cgroup")).read_text().splitlines()
    for line in lines:
        _, names, path = line.split(":", 2)
        root = _root_of(controller, names, cgroups)
        if root is None:
            continue
        folder = root / path.lstrip("/")
        # in a container the path may be that of the host: the root is then this process's group
        while not folder.exists() and folder != root:
            folder = folder.parent
        while True:
            yield folder
            if folder == root:
                break
            folder = folder.parent


def _root_of(controller: str, names: str, cgroups: Path) -> Path | None:
    """Return the mount point of the hierarchy, None if it does not have this controller."""
    if names == "":  # version 2 has all controllers
        mounts = [cgroups]
    elif controller in names.split(","):
        mounts = [cgroups / names, cgroups / controller]
    else:
        mounts = []
    return next((mount for mount in mounts if mount.exists()), None)

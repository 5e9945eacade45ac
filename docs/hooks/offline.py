"""Refuses a site that loads anything from the network when it is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

# What a browser fetches by itself; links that a reader follows are welcome.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link[^>]*\srel=["']?(?:stylesheet|icon|preload|preconnect)[^>]*\shref=["']?(?:https?:)?//"""
    r"""|(?:url\(|@import )["']?(?:https?:)?//[^"')]+"""
)


def on_post_build(config: Any, **_: Any) -> None:
    """MkDocs calls this when the site is complete."""
    site = Path(config["site_dir"])
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    found = {
        f"{path.relative_to(site)}: {loaded}"
        for path in files
        for loaded in _LOADED.findall(path.read_text())
    }
    if found:
        raise PluginError("These would be loaded from the network:\n" + "\n".join(sorted(found)))

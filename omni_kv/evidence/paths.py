"""Where the notebooks, the records and the site's sources lie: in a checkout, or in the package.

An installed wheel brings them along in ``omni_kv/share``, where they are read and never written.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SHARE = PACKAGE / "share"


class InstalledFiles(ValueError):
    """Something would be written among the files of an installed package."""


def project_dir() -> Path:
    """The folder that holds ``notebooks``, ``data``, ``report``, ``docs`` and ``upstream``."""
    root = PACKAGE.parent
    checkout = (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir()
    return root if checkout else SHARE


def to_write(path: Path, variable: str) -> Path:
    """The path itself, where it may be written.

    Args:
        path: what is about to be written.
        variable: the environment variable that names another folder.

    Raises:
        InstalledFiles: if it lies among the files that an installed package brought.
    """
    if path.resolve().is_relative_to(SHARE):
        raise InstalledFiles(
            f"{path.name} belongs to the installed package and stays as it is; "
            f"set {variable} to a folder of your own, or work in a checkout"
        )
    return path

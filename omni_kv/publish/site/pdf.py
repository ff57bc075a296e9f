"""The report as a PDF: printed by a headless Chromium if there is one, or else by WeasyPrint."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

#: Names a browser that is not on the PATH.
BROWSER_VARIABLE = "OMNI_KV_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
#: Nothing is asked of other hosts, and root may start it.
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
INSTALL = (
    "no PDF: install Chromium (Debian: apt install chromium), or what WeasyPrint needs "
    "(pip install weasyprint; Debian: apt install libpango-1.0-0 libpangoft2-1.0-0)"
)


def find_chromium() -> str | None:
    """The browser that ``OMNI_KV_CHROMIUM`` names, or the first one on the PATH."""
    given = os.environ.get(BROWSER_VARIABLE)
    if given is not None:
        return shutil.which(given)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def write_pdf(page: Path, target: Path) -> str:
    """Print a page, with an outline.

    Args:
        page: the HTML file.
        target: the PDF to write.

    Returns:
        A line that says what was written and by what, or else what to install.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for by, prints in (("Chromium", _by_chromium), ("WeasyPrint", _by_weasyprint)):
        if prints(page, target):
            return f"{target}: printed by {by}"
    target.unlink(missing_ok=True)
    return INSTALL


def _by_chromium(page: Path, target: Path) -> bool:
    chromium = find_chromium()
    if chromium is None:
        return False
    with tempfile.TemporaryDirectory(prefix="omni-kv-chromium-") as profile:
        printed = Path(profile) / "printed.pdf"
        command = [chromium, "--headless", *QUIET, f"--user-data-dir={profile}"]
        # The time is virtual: it passes as fast as fonts and pictures are loaded.
        command += ["--virtual-time-budget=60000", "--no-pdf-header-footer"]
        command += ["--generate-pdf-document-outline", f"--print-to-pdf={printed}"]
        subprocess.run(
            [*command, page.resolve().as_uri()], capture_output=True, timeout=300, check=False
        )
        if printed.exists():
            shutil.move(printed, target)
            return True
    return False


def _by_weasyprint(page: Path, target: Path) -> bool:
    try:
        import weasyprint
    except (ImportError, OSError):  # OSError: Pango is missing
        return False
    weasyprint.HTML(filename=str(page)).write_pdf(target)
    return True

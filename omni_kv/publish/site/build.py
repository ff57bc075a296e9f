"""The report: a site and a PDF, built from notebooks that were executed before.

Nothing is executed here. The pages are the executed notebooks in order, the prose of ``report/``,
and a front page computed from the recorded outcomes. The same notebooks give the same bytes.
"""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from omni_kv.evidence.paths import project_dir
from omni_kv.evidence.records import PACKAGE_PARENT
from omni_kv.publish.parameters import Refused

PDF_NAME = "omni-kv-report.pdf"
PREVIEW_NAME = "link-preview.png"


def prose_dir() -> Path:
    """The project's ``report`` folder: the site's configuration, style and prose pages."""
    return project_dir() / "report"


def build_report(executed: Path, out: Path) -> Path:
    """Build the site in ``out/html``, and a PDF beside it where something can print one.

    Args:
        executed: folder with executed notebooks; all of them, in the order of their names.
        out: folder of the report.

    Returns:
        The site's front page.

    Raises:
        Refused: if there are no executed notebooks, the checkout's ``report`` folder or Sphinx are
            missing, or Sphinx finds anything to warn of; the message is its first warning.
    """
    from omni_kv.publish.site.pdf import write_pdf

    notebooks = sorted(executed.glob("*.ipynb"))
    if not notebooks:
        raise Refused(f"there are no executed notebooks in {executed}; run `omni-kv run` first")
    if not (prose_dir() / "conf.py").is_file():
        raise Refused(f"{prose_dir()} is missing: build the report from a checkout")
    with tempfile.TemporaryDirectory(prefix="omni-kv-report-") as scratch:
        work = Path(scratch)
        for builder, target in (("html", out / "html"), ("singlehtml", work / "paged")):
            stage(notebooks, work / builder, paged=builder == "singlehtml")
            _sphinx(work, builder, target)
        told = write_pdf(work / "paged" / "index.html", out / PDF_NAME)
    print(told)
    return out / "html" / "index.html"


def stage(notebooks: list[Path], source: Path, *, paged: bool = False) -> None:
    """Lay out what Sphinx reads: prose, notebooks, pictures and the front page.

    Args:
        notebooks: the executed notebooks, in order.
        source: folder to make.
        paged: for the PDF, where all pages become one.
    """
    from omni_kv.publish.figures.packages import write_packages
    from omni_kv.publish.figures.site import write_pictures
    from omni_kv.publish.site.front_page import fill_in
    from omni_kv.publish.site.pages import for_site, run_of

    leave_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    shutil.copytree(prose_dir(), source, ignore=leave_out)
    # As in the checkout, so that the page's link to its figure holds in both.
    shutil.copytree(project_dir() / "docs", source / "docs", ignore=leave_out)
    write_packages(source / "data" / "figures")
    (source / "notebooks").mkdir()
    runs = [run_of(path) for path in notebooks]
    for path, run in zip(notebooks, runs, strict=True):
        for_site(path, run, source / "notebooks" / path.name, paged=paged)
    write_pictures(source / "pictures", ".svg")
    (source / "pictures" / PREVIEW_NAME).rename(source / "static" / PREVIEW_NAME)
    fill_in(source, runs, paged=paged)


def _sphinx(work: Path, builder: str, target: Path) -> None:
    """Run one of Sphinx's builders, warnings being errors, and put what it made at ``target``."""
    built = work / "built" / builder
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder]
    command += ["-t", "paged"] if builder == "singlehtml" else []
    command += ["-d", str(work / f"doctrees-{builder}"), str(work / builder), str(built)]
    env = os.environ | {
        "SOURCE_DATE_EPOCH": str(_epoch()),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")])
        ),
        "TZ": "UTC",
    }
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    if ran.returncode:
        lines = (ran.stderr or ran.stdout).replace(str(work / builder) + os.sep, "").splitlines()
        print("\n".join(lines), file=sys.stderr)
        if "No module named sphinx" in ran.stderr:
            raise Refused("Sphinx is missing: pip install 'omni-kv[docs]'")
        first = next((line for line in lines if "WARNING" in line or "ERROR" in line), "")
        raise Refused(f"Sphinx could not build the {builder} pages cleanly: {first or lines[-1]}")
    for leftover in (".buildinfo", ".doctrees"):
        path = built / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(built, target)


def _epoch() -> int:
    """The report's date, as seconds: ``SOURCE_DATE_EPOCH``, or that of the checkout's commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if given.isdigit():
        return int(given)
    command = ["git", "-C", str(PACKAGE_PARENT), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return int(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp())

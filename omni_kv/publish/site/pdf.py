"""The report as a PDF: printed by a headless Chromium if there is one, or else by WeasyPrint."""

from __future__ import annotations

import re
import time
from pathlib import Path

INSTALL = (
    "no PDF: install Chromium (Debian: apt install chromium), or what WeasyPrint needs "
    "(pip install weasyprint; Debian: apt install libpango-1.0-0 libpangoft2-1.0-0)"
)


def write_pdf(page: Path, target: Path, epoch: int) -> str:
    """Print a page to a PDF without dates of its own, so that the same page gives the same bytes.

    Args:
        page: the HTML file.
        target: the PDF to write.
        epoch: the date to put into it, as seconds.

    Returns:
        A line that says what was written and by what, or else what to install.
    """
    for by, route in (("Chromium", _by_chromium), ("WeasyPrint", _by_weasyprint)):
        content = route(page)
        if content is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(numbered(dated(content, epoch)))
            return f"{target}: printed by {by}"
    target.unlink(missing_ok=True)
    return INSTALL


def _by_chromium(page: Path) -> bytes | None:
    from omni_kv.publish.site.browser import Browser, find_chromium

    if find_chromium() is None:
        return None
    with Browser() as browser:
        browser.open(page.resolve().as_uri())
        return browser.print_pdf()


def _by_weasyprint(page: Path) -> bytes | None:
    try:
        import weasyprint
    except (ImportError, OSError):  # OSError: Pango is missing
        return None
    document = weasyprint.HTML(filename=str(page)).render()
    return document.write_pdf(pdf_identifier=b"omni-kv-report-0")


def dated(content: bytes, epoch: int) -> bytes:
    """Replace a PDF's dates by ``epoch``, in as many bytes, since its offsets count them."""
    stamp = time.strftime("%Y%m%d%H%M%S", time.gmtime(epoch)).encode()
    return re.sub(
        rb"(/(?:CreationDate|ModDate) ?\(D:)\d{14}", lambda found: found[1] + stamp, content
    )


def numbered(content: bytes) -> bytes:
    """Number a tagged PDF's structure elements from 1, in as many bytes.

    Chromium names them after the page's nodes, whose numbers begin where its start happened to end:
    ``node00000817`` in one run is ``node00000815`` in the next. Their order is always the same.
    """
    names = sorted(set(re.findall(rb"node\d{8}", content)))
    rank = {name: b"node%08d" % number for number, name in enumerate(names, 1)}
    return re.sub(rb"node\d{8}", lambda found: rank[found[0]], content)

"""The report: whole, without requests to other hosts, readable, and the same bytes twice."""

from __future__ import annotations

import hashlib
import html.parser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import matplotlib.pyplot as plt
import nbformat
import pytest

from omni_kv.evidence import outcomes, records, verdicts
from omni_kv.experiments.atlas import lookup
from omni_kv.experiments.atlas import records as atlas
from omni_kv.publish.figures import svg as pictures
from omni_kv.publish.parameters import Refused
from omni_kv.publish.site import pdf as report_pdf
from omni_kv.publish.site.build import PDF_NAME, build_report, stage
from omni_kv.publish.site.front_page import FRONT_LAYOUTS
from omni_kv.publish.site.pages import for_site, run_of
from omni_kv.publish.site.pdf import BROWSER_VARIABLE, QUIET, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as BrowserPage

pytestmark = pytest.mark.compiles
CHECKOUT = Path(__file__).resolve().parents[2]
STORED = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))
SAMPLE = "98_sample"
REVISION = "0123456789ab"

needs_browser = pytest.mark.skipif(
    find_chromium() is None,
    reason=f"no Chromium here: apt install chromium, or name one in {BROWSER_VARIABLE}",
)


def sample(path: Path, *, described: bool = True, text: str = "") -> Path:
    """An executed notebook with one of everything that the site has to show."""
    with plt.style.context(pictures.STYLE):
        fig, ax = plt.subplots(figsize=(2, 1))
        ax.plot([0, 1], [0, 1])
        if described:
            ax.set_title("A line")
    svg = pictures.svg(fig)
    said = "A line" if described else "<Figure size 200x100>"
    plt.close(fig)
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    output = nbformat.v4.new_output
    nb = nbformat.v4.new_notebook()
    nb.metadata["papermill"] = {
        "parameters": {"seed": 7},
        "duration": 3.2,
        "start_time": "2026-01-02T03:04:05",
    }
    nb.cells = [
        markdown("# A sample\n\n**The question.** What is shown?\n\n**Time.** A minute; no more."),
        code("seed = 0", metadata={"tags": ["parameters"]}),
        code("seed = 7", metadata={"tags": ["injected-parameters"]}),
        markdown(
            "A clone is made. It reads out of bounds; see [this page](98_sample.ipynb). "
            f"{text}\n\n$$a = \\text{{b\\_c}}$$\n\n"
            ":::{admonition} Answer\n:collapsible: closed\nForty-two, in `code`.\n:::"
        ),
        code("raise SystemExit('this cell must not run')"),
        code(
            "outputs",
            outputs=[
                output("display_data", data={"image/svg+xml": svg, "text/plain": said}),
                output("display_data", data={"text/html": "<table class='dataframe'></table>"}),
                output("stream", name="stderr", text="\r 50%|####"),
                output("stream", name="stdout", text=f"{CHECKOUT}/omni_kv at 0x7f12345678ab\n"),
                output(
                    "stream",
                    name="stdout",
                    text="98.a: as recorded for this torch release\n"
                    "98.b: no record for torch 2.11.0 with no parameters\n",
                ),
            ],
        ),
    ]
    nbformat.write(nb, path)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_revision() -> Iterator[None]:
    """Commits that come in while the tests run must not tell two builds apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1790000000")
        patch.setattr(records, "revision", lambda: REVISION)
        yield


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored notebooks, which hold their outputs, and the sample."""
    folder = tmp_path_factory.mktemp("executed")
    for path in STORED:
        shutil.copy(path, folder)
    sample(folder / f"{SAMPLE}.ipynb")
    return folder


@pytest.fixture(scope="module")
def built(executed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    index = build_report(executed, out)
    assert index == out / "html" / "index.html"
    return out


@pytest.fixture(scope="module")
def site(built: Path) -> Path:
    return built / "html"


class Page(html.parser.HTMLParser):
    """What a page refers to, and what may be referred to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.pictures: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "img":
            self.pictures.append(given)
        for key in ("href", "src", "action", "data"):
            if given.get(key) is not None:
                self.links.append((tag, given[key] or ""))


def pages(site: Path) -> list[Page]:
    return [Page(p) for p in sorted(site.rglob("*.html")) if "_static" not in p.parts]


def bytes_of(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_every_notebook_is_a_page_in_the_order_of_their_names(executed: Path, site: Path) -> None:
    stems = [path.stem for path in sorted(executed.glob("*.ipynb"))]
    text = (site / "index.html").read_text()
    linked = re.findall(
        r'class="toctree-l1"><a class="reference internal" href="notebooks/(.+?)\.', text
    )
    assert linked == stems


def test_links_lead_to_pages_and_anchors_that_are_there(site: Path) -> None:
    by_path = {page.path.resolve(): page for page in pages(site)}
    assert len(by_path) > len(STORED)
    for page in by_path.values():
        for tag, link in page.links:
            where = urlsplit(link)
            if where.scheme in ("http", "https", "mailto"):
                continue
            assert not where.path.startswith("/"), (
                f"{page.path}: {link} works under one prefix only"
            )
            assert where.scheme in ("", "data"), f"{page.path}: {link}"
            if where.scheme:
                continue
            target = (page.path.parent / unquote(where.path)).resolve() if where.path else page.path
            assert target.is_file(), f"{page.path.name}: <{tag}> leads to {link}"
            other = by_path.get(target.resolve())
            if other is not None and where.fragment:
                assert unquote(where.fragment) in other.anchors, f"{page.path.name}: {link}"


def test_nothing_is_requested_from_another_host(site: Path) -> None:
    for page in pages(site):
        loaded = [link for tag, link in page.links if tag != "a"]
        assert not [link for link in loaded if "//" in link], page.path
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text()), style


def test_every_picture_says_what_it_shows(site: Path) -> None:
    shown = [(page.path, picture) for page in pages(site) for picture in page.pictures]
    assert shown
    for path, picture in shown:
        alt = picture.get("alt") or ""
        assert len(alt) > 5 and not alt.endswith((".svg", ".png")), f"{path}: {picture.get('src')}"


def test_a_page_shows_how_it_was_run_and_nothing_of_this_machine(site: Path) -> None:
    text = (site / "notebooks" / f"{SAMPLE}.html").read_text()
    text = re.sub(r"<[^>]+>", "", text)
    assert "Parameters: seed = 7." in text and "2026-01-02, in 3 s" in text
    assert "1 as recorded for this torch release, 1 without a record" in text
    assert "50%|" not in text and "0x7f12345678ab" not in text
    for page in site.rglob("*.html"):
        assert str(CHECKOUT) not in page.read_text(), page


def test_answers_are_folded_and_words_lead_to_the_glossary(site: Path) -> None:
    text = (site / "notebooks" / f"{SAMPLE}.html").read_text()
    assert re.search(r"<details[^>]*>\s*<summary[^>]*>Answer</summary>\s*<p>Forty-two", text)
    assert 'href="../glossary.html#term-clone"' in text
    assert 'href="../glossary.html#term-out-of-bounds"' in text
    assert "<math" in text and "b_c" in text


def test_links_between_notebooks_lead_to_pages(site: Path) -> None:
    assert 'href="#' in (text := (site / "notebooks" / f"{SAMPLE}.html").read_text())
    assert ".ipynb" not in re.sub(r"_downloads/[^\"]+", "", text)


def words(page: Path) -> str:
    """The text of a page, without its tags."""
    text = " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())
    return text.replace(" ,", ",")  # behind a word that the glossary explains


def test_the_site_states_versions_revision_and_every_outcome(site: Path) -> None:
    told = words(site / "records.html")
    assert f"torch {verdicts.torch_release()}" in told and REVISION in told
    front = words(site / "index.html")
    for layout, told in lookup.outcome_table(atlas.records(), FRONT_LAYOUTS).items():
        assert f"{layout} {' '.join(' '.join(told).split())}" in front


def test_building_the_site_twice_gives_the_same_bytes(
    executed: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    build_report(executed, tmp_path)
    assert bytes_of(tmp_path / "html") == bytes_of(built / "html")


def test_the_pdf_holds_every_notebook_and_every_answer(executed: Path, built: Path) -> None:
    pdf, pdftotext = built / PDF_NAME, shutil.which("pdftotext")
    if not pdf.exists() or pdftotext is None:
        pytest.skip("nothing can print here, or pdftotext (poppler-utils) is missing")
    done = subprocess.run([pdftotext, str(pdf), "-"], capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    for path in executed.glob("*.ipynb"):
        assert run_of(path).title in text
    assert "Forty-two, in code" in text
    assert "file:/" not in text


def test_without_anything_to_print_with_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BROWSER_VARIABLE, "")
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    (tmp_path / "page.html").write_text("<p>text")
    told = report_pdf.write_pdf(tmp_path / "page.html", tmp_path / "out.pdf")
    assert told == report_pdf.INSTALL and "\n" not in told
    assert not (tmp_path / "out.pdf").exists()


def test_no_executed_notebooks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there are no executed notebooks"):
        build_report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("described", "text", "said"),
    [
        (False, "", "98_sample.ipynb.*a picture without alternative text"),
        (True, "[gone](99_gone.ipynb)", "98_sample.ipynb.*99_gone"),
    ],
)
def test_what_is_not_clean_is_refused_with_the_first_warning(
    tmp_path: Path, described: bool, text: str, said: str
) -> None:
    sample(tmp_path / f"{SAMPLE}.ipynb", described=described, text=text)
    with pytest.raises(Refused, match=said):
        build_report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_is_read_off_the_executed_notebook(tmp_path: Path) -> None:
    run = run_of(sample(tmp_path / f"{SAMPLE}.ipynb"))
    assert (run.title, run.question, run.time) == (
        "A sample",
        "What is shown?",
        "A minute; no more.",
    )
    assert run.parameters == {"seed": 7}
    assert (run.as_recorded, run.no_record, run.changed) == (("98.a",), ("98.b",), ())
    assert not run.failed
    assert run.read == ()


@pytest.mark.parametrize(
    ("tag", "parameters", "read"),
    [
        ("recorded", {"device": "cuda"}, True),
        ("recorded-without-gpu", {}, True),
        ("recorded-without-gpu", {"device": "cuda"}, False),
        ("recorded-without-gpu", {"preset": "tiny"}, False),
        ("remove-input", {}, False),
    ],
)
def test_what_is_read_from_a_record_does_not_count_as_a_run(tmp_path, tag, parameters, read):
    line = "97.a: as recorded for this torch release\n"
    printed = nbformat.v4.new_output("stream", name="stdout", text=line)
    nb = nbformat.v4.new_notebook(metadata={"papermill": {"parameters": parameters}})
    nb.cells = [
        nbformat.v4.new_code_cell(
            'device, preset = "cpu", "full"\ndevice = "cpu"', metadata={"tags": ["parameters"]}
        ),
        nbformat.v4.new_code_cell("", outputs=[printed], metadata={"tags": [tag]}),
    ]
    nbformat.write(nb, tmp_path / "97_records.ipynb")
    run = run_of(tmp_path / "97_records.ipynb")
    assert (run.read, run.as_recorded) == ((("97.a",), ()) if read else ((), ("97.a",)))


def test_the_outcome_is_computed_from_the_records(data: Path) -> None:
    assert outcomes.outcome_lines() == []
    ran = {"ended": "returned", "output": "agrees with eager", "key rows wrong": "0 of 8"}
    lost = ran | {"value rows wrong": "5 of 8", "their values": {"neighbour": 5}}
    right = ran | {"value rows wrong": "0 of 8", "their values": {}}
    verdicts.record("9.1.0", "02.shared, neighbour", {"device": "cpu"}, lost)
    verdicts.record("9.2.0", "02.shared, neighbour", {"device": "cpu"}, right)
    verdicts.record("9.2.0", "02.separate, neighbour", {"device": "cpu"}, right)
    mapped, separate = outcomes.outcome_lines()
    assert "torch 9.1.0: nothing raised, and 5 of 8 slots of V hold memory from outside" in mapped
    assert "torch 9.2.0: right" in mapped
    assert "All 1 recorded runs right" in separate


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=find_chromium(), args=list(QUIET))


@pytest.fixture
def complaints() -> list[str]:
    """What a browser would show in red, and what it should not have asked for."""
    return []


def opened(browser: Browser, complaints: list[str], **options: Any) -> BrowserPage:
    """A tab that notes what goes wrong in it."""
    tab = browser.new_page(**options)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(request.url))
    tab.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    tab.on(
        "request",
        lambda request: (
            None if request.url.startswith(("file:", "data:")) else complaints.append(request.url)
        ),
    )
    return tab


BROKEN_PICTURES = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 1010, 390], ids=["wide", "between", "phone"])
def test_a_browser_shows_every_page_without_a_complaint(
    site: Path, browser: Browser, complaints: list[str], width: int, scheme: str
) -> None:
    tab = opened(browser, complaints, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for page in pages(site):
        tab.goto(page.path.resolve().as_uri())
        # Pictures further down are loaded when they come into view.
        tab.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
        tab.evaluate("Promise.all([...document.images].map(i => i.decode().catch(() => 0)))")
        assert tab.evaluate(BROKEN_PICTURES) == [], page.path
        assert not tab.evaluate(SIDEWAYS), f"{page.path} scrolls sideways at {width}"
        assert not complaints, page.path
    tab.close()


@needs_browser
def test_the_search_finds_pages_from_the_file_system(
    site: Path, browser: Browser, complaints: list[str]
) -> None:
    tab = opened(browser, complaints)
    tab.goto((site / "search.html").resolve().as_uri() + "?q=functionalization")
    tab.wait_for_selector("#search-results li a")
    links = tab.eval_on_selector_all("#search-results li a", "found => found.map(a => a.href)")
    assert any("glossary" in link for link in links)
    assert not complaints


@needs_browser
def test_a_folded_answer_opens_on_a_click(
    site: Path, browser: Browser, complaints: list[str]
) -> None:
    tab = opened(browser, complaints, viewport={"width": 390, "height": 900})
    tab.goto((site / "notebooks" / f"{SAMPLE}.html").resolve().as_uri())
    answer = tab.locator("details.admonition p", has_text="Forty-two")
    assert not answer.is_visible()
    tab.locator("details.admonition summary").click()
    assert answer.is_visible()


def test_staging_takes_whatever_notebooks_are_given(tmp_path: Path) -> None:
    given = [sample(tmp_path / f"{number}_x.ipynb") for number in ("07", "12")]
    stage(given, tmp_path / "source")
    text = (tmp_path / "source" / "index.md").read_text()
    assert text.index("notebooks/07_x") < text.index("notebooks/12_x")


@pytest.mark.parametrize(
    ("device", "preset", "marked"),
    [("cpu", "full", True), ("cuda", "full", False), ("cpu", "tiny", False)],
)
def test_only_what_was_read_from_a_record_is_marked_so(
    tmp_path: Path, device: str, preset: str, marked: bool
) -> None:
    code = nbformat.v4.new_code_cell
    nb = nbformat.v4.new_notebook()
    nb.cells = [
        nbformat.v4.new_markdown_cell("# A sample"),
        code(f"device = {device!r}\npreset = {preset!r}", metadata={"tags": ["parameters"]}),
        code("measured", metadata={"tags": ["recorded-without-gpu"]}),
        code("always", metadata={"tags": ["recorded"]}),
    ]
    path = tmp_path / f"{SAMPLE}.ipynb"
    nbformat.write(nb, path)
    for_site(path, run_of(path), tmp_path / "site.ipynb")
    cells = nbformat.read(tmp_path / "site.ipynb", as_version=4).cells
    tags = {cell.source: cell.metadata.get("tags") for cell in cells}
    assert tags["measured"] == (["recorded"] if marked else [])
    assert tags["always"] == ["recorded"]

"""The report: whole, without requests to other hosts, readable, and the same bytes twice."""

from __future__ import annotations

import hashlib
import html.parser
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import matplotlib.pyplot as plt
import nbformat
import pytest

from omni_kv.evidence import outcomes, verdicts
from omni_kv.publish.figures import svg as pictures
from omni_kv.publish.parameters import Refused
from omni_kv.publish.site import pdf as report_pdf
from omni_kv.publish.site.browser import BROWSER_VARIABLE, Browser, find_chromium
from omni_kv.publish.site.build import PDF_NAME, build_report, stage
from omni_kv.publish.site.pages import breakable, run_of

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
            ":::{admonition} Answer\n:class: dropdown\nForty-two, in `code`.\n:::"
        ),
        code("raise SystemExit('this cell must not run')"),
        code(
            "outputs",
            outputs=[
                output("display_data", data={"image/svg+xml": svg, "text/plain": "A line"}),
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
        patch.setattr(verdicts, "_revision", lambda: REVISION)
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
    assert re.search(r'<details class="fold"><summary>Answer</summary>\s*<p>Forty-two', text)
    assert 'href="../glossary.html#term-clone"' in text
    assert 'href="../glossary.html#term-out-of-bounds"' in text
    assert "<math " in text and "b_c" in text


def test_links_between_notebooks_lead_to_pages(site: Path) -> None:
    assert 'href="#' in (text := (site / "notebooks" / f"{SAMPLE}.html").read_text())
    assert ".ipynb" not in re.sub(r"_downloads/[^\"]+", "", text)


def test_the_front_page_states_versions_revision_and_outcomes(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert f"torch {verdicts.torch_release()}" in text
    assert REVISION in text
    for number, line in enumerate(outcomes.outcome_lines(), 1):
        first_words = re.sub(r"\*", "", line).split(",")[0].split(" ")[0]
        assert first_words in text, f"line {number}"


def test_building_the_site_twice_gives_the_same_bytes(
    executed: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    build_report(executed, tmp_path)
    assert bytes_of(tmp_path) == bytes_of(built)


def test_the_pdf_is_there_if_anything_can_print_it(built: Path) -> None:
    if not (built / PDF_NAME).exists():
        pytest.skip("neither Chromium nor WeasyPrint can print here")
    content = (built / PDF_NAME).read_bytes()
    assert content.startswith(b"%PDF-") and content.rstrip().endswith(b"%%EOF")
    assert b"file:" not in content
    assert len(re.findall(rb"/Type ?/Page\b", content)) > len(STORED) or b"/ObjStm" in content


def test_without_anything_to_print_with_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BROWSER_VARIABLE, "")
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    (tmp_path / "page.html").write_text("<p>text")
    told = report_pdf.write_pdf(tmp_path / "page.html", tmp_path / "out.pdf", 0)
    assert told == report_pdf.INSTALL and "\n" not in told
    assert not (tmp_path / "out.pdf").exists()


@pytest.mark.parametrize("route", ["Chromium", "WeasyPrint"])
def test_both_routes_print_the_same_bytes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    if route == "WeasyPrint":
        monkeypatch.setenv(BROWSER_VARIABLE, "")
        try:
            import weasyprint  # noqa: F401
        except (ImportError, OSError):
            pytest.skip("WeasyPrint does not work here: it needs Pango")
    elif find_chromium() is None:
        pytest.skip("no Chromium here")
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>t</title><h1>One</h1><p>text")
    written = []
    for name in ("a.pdf", "b.pdf"):
        assert route in report_pdf.write_pdf(page, tmp_path / name, 1_700_000_000)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


def test_structure_elements_in_a_pdf_are_numbered_in_their_order() -> None:
    before = b"[(node00000817) 5 0 R (node00009815) 6 0 R]/ID (node00000817)"
    after = report_pdf.numbered(before)
    assert after == b"[(node00000001) 5 0 R (node00000002) 6 0 R]/ID (node00000001)"
    assert report_pdf.numbered(before.replace(b"817", b"815")) == after


def test_hatches_are_lines_and_the_same_ones_each_time() -> None:
    """A pattern in an SVG becomes a bitmap in Chromium's PDF."""

    def bars() -> str:
        with plt.style.context(pictures.STYLE):
            fig, ax = plt.subplots(figsize=(2, 1))
            ax.bar([0], [1], hatch="///", edgecolor="w")
            plt.close(fig)
            return pictures.svg(fig)

    assert "<pattern" not in bars()
    assert bars().count("<clipPath") == 2  # the axes' and the bar's
    assert bars() == bars()


def test_dates_in_a_pdf_are_replaced_in_as_many_bytes() -> None:
    before = b"<</CreationDate (D:20260102030405+00'00')/ModDate (D:20260102030405+00'00')>>"
    after = report_pdf.dated(before, 0)
    assert len(after) == len(before) and after.count(b"D:19700101000000") == 2


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


def test_long_names_may_break_and_nothing_else_changes() -> None:
    name = "torch.ops.omni_kv.ar_diffusion_paged"
    given = (
        f"<style>#T_0123 .very_long_selector_here {{}}</style><td title='{name}'>{name} a_b</td>"
    )
    made = breakable(given)
    assert made.replace("<wbr>", "") == given
    assert made.count("<wbr>") == name.count("_") + name.count(".")
    assert f"title='{name}'" in made and "a_b" in made


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
    with Browser() as started:
        yield started


def complaints(browser: Browser) -> list[str]:
    """What a browser would show in red, and what it could not or should not have loaded."""
    found = []
    for method, told in browser.events:
        if method == "Runtime.exceptionThrown" or method == "Network.loadingFailed":
            found.append(str(told))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            found.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            found.append(str(told["args"]))
        elif method == "Network.requestWillBeSent":
            url = told["request"]["url"]
            found += [] if url.startswith(("file:", "data:")) else [f"requested {url}"]
        elif method == "Network.responseReceived" and told["response"]["status"] >= 400:
            found.append(told["response"]["url"])
    return found


BROKEN_PICTURES = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["wide", "phone"])
def test_a_browser_shows_every_page_without_a_complaint(
    site: Path, browser: Browser, width: int, dark: bool
) -> None:
    browser.window(width, 900, dark=dark)
    for page in pages(site):
        browser.open(page.path.resolve().as_uri())
        # Pictures further down are loaded when they come into view.
        browser.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
        browser.evaluate("Promise.all([...document.images].map(i => i.decode().catch(() => 0)))")
        assert browser.evaluate(BROKEN_PICTURES) == [], page.path
        assert not browser.evaluate(SIDEWAYS), f"{page.path} scrolls sideways at {width}"
        assert not complaints(browser), page.path


@needs_browser
def test_the_search_finds_pages_from_the_file_system(site: Path, browser: Browser) -> None:
    browser.window(1280, 900)
    browser.open((site / "search.html").resolve().as_uri() + "?q=functionalization")
    found = browser.evaluate(
        "new Promise(done => { const look = n => {"
        " const links = [...document.querySelectorAll('#search-results li a')].map(a => a.href);"
        " links.length || n > 50 ? done(links) : setTimeout(look, 100, n + 1) }; look(0) })"
    )
    assert any("glossary" in link for link in found)
    assert not complaints(browser)


@needs_browser
def test_a_folded_answer_opens_on_a_click(site: Path, browser: Browser) -> None:
    browser.window(390, 900)
    browser.open((site / "notebooks" / f"{SAMPLE}.html").resolve().as_uri())
    shown = "document.querySelector('details.fold p').checkVisibility()"
    assert browser.evaluate(shown) is False
    browser.evaluate("document.querySelector('details.fold summary').click()")
    assert browser.evaluate(shown) is True


def test_staging_takes_whatever_notebooks_are_given(tmp_path: Path) -> None:
    given = [sample(tmp_path / f"{number}_x.ipynb") for number in ("07", "12")]
    stage(given, tmp_path / "source")
    text = (tmp_path / "source" / "index.md").read_text()
    assert text.index("notebooks/07_x") < text.index("notebooks/12_x")

"""What the site needs of Sphinx beyond its own: formulas, boxes for figures, glossary links.

Notebooks stay plain Markdown that way, and read well in JupyterLab too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

logger = logging.getLogger(__name__)

#: Text inside these is left alone: code, headings, links, and what a cell printed.
UNLINKED = (
    nodes.literal,
    nodes.literal_block,
    nodes.reference,
    nodes.title,
    nodes.rubric,
    nodes.raw,
    nodes.term,
    nodes.thead,
    addnodes.pending_xref,
    addnodes.download_reference,
)


class FigureBoxes(SphinxTransform):
    """Put each picture into a box, which scrolls on a phone, and warn where one has no text."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Look at every picture of the page."""
        for image in list(self.document.findall(nodes.image)):
            if not image.get("alt", "").strip():
                logger.warning("a picture without alternative text", location=image)
            if not isinstance(image.parent, nodes.TextElement):
                image.replace_self(nodes.container("", image.deepcopy(), classes=["figure-box"]))


class GlossaryLinks(SphinxPostTransform):
    """Link the first mention of each glossary term in a section to its entry."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs: Any) -> None:
        """Replace mentions with references, section by section."""
        terms = self.env.domaindata["std"].get("terms", {})
        if not terms:
            return
        longest_first = sorted(terms, key=len, reverse=True)
        pattern = re.compile(
            rf"(?<![\w/.-])({'|'.join(map(re.escape, longest_first))})(?:s)?(?![\w/(-])",
            re.IGNORECASE,
        )
        # An entry of the glossary does not link to itself.
        seen = {
            (id(entry), term.astext().lower())
            for entry in self.document.findall(nodes.definition_list_item)
            for term in entry.findall(nodes.term)
        }
        for text in list(self.document.findall(nodes.Text)):
            if not _is_prose(text):
                continue
            pieces = list(_linked(text.astext(), pattern, id(_section(text)), seen))
            if len(pieces) > 1:
                text.parent.replace(text, pieces)


def _linked(
    text: str, pattern: re.Pattern[str], section: int, seen: set[tuple[int, str]]
) -> Iterator[nodes.Node]:
    end = 0
    for match in pattern.finditer(text):
        term = match[1].lower()
        if (section, term) in seen:
            continue
        seen.add((section, term))
        yield nodes.Text(text[end : match.start()])
        link = addnodes.pending_xref(
            "", refdomain="std", reftype="term", reftarget=term, refexplicit=True, refwarn=True
        )
        link += nodes.inline("", match[0], classes=["glossary-link"])
        yield link
        end = match.end()
    yield nodes.Text(text[end:])


def _is_prose(text: nodes.Text) -> bool:
    node: nodes.Node | None = text.parent
    inside_paragraph = False
    while node is not None:
        if isinstance(node, UNLINKED):
            return False
        classes = node.get("classes", []) if isinstance(node, nodes.Element) else []
        if "cell_output" in classes or "no-glossary" in classes:
            return False
        inside_paragraph = inside_paragraph or isinstance(node, nodes.paragraph)
        node = node.parent
    return inside_paragraph


def _section(node: nodes.Node) -> nodes.Node | None:
    """The section, or the entry of a glossary, that a text stands in."""
    while node is not None and not isinstance(node, (nodes.section, nodes.definition_list_item)):
        node = node.parent
    return node


def _inline_formula(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _formula(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="formula">{_mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def _mathml(latex: str, display: str) -> str:
    """Formulas as MathML, which browsers draw themselves: MathJax would come from another host."""
    from docutils.utils.math.latex2mathml import tex2mathml

    return tex2mathml(latex.replace(r"\_", "_"), as_block=display == "block")


def _link_preview(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Say what a link to the page looks like elsewhere; the picture needs the site's address."""
    site = app.config.html_baseurl.rstrip("/")
    properties = {
        "og:title": f"{context.get('title') or app.config.html_title}",
        "og:site_name": app.config.html_title,
        "og:type": "article",
        "og:description": "Why the clone is made, why it crashes, and what to do about it.",
    }
    if site:
        properties["og:image"] = f"{site}/_static/link-preview.png"
        properties["og:url"] = f"{site}/{page}.html"
    tags = (f'<meta property="{k}" content="{escape(v)}">' for k, v in properties.items())
    card = '<meta name="twitter:card" content="summary_large_image">'
    context["metatags"] = "\n".join([context.get("metatags", ""), *tags, card])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it with Sphinx."""
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_formula, None))
    app.add_transform(FigureBoxes)
    app.add_post_transform(GlossaryLinks)
    app.connect("html-page-context", _link_preview)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

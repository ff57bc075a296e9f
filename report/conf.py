"""How Sphinx builds the report. `omni-kv report` lays out the sources and runs it."""

import os

from omni_kv import __version__

project = "omni_kv"
html_title = "torch.compile and a paged KV pool"
author = "the omni_kv authors"
copyright = "the omni_kv authors, Apache-2.0"
release = version = __version__
language = "en"

extensions = ["myst_nb", "omni_kv.publish.site.sphinx"]
root_doc = "index"
exclude_patterns = ["print_theme"]

# The notebooks were executed before; nothing is run here.
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_output_stderr = "show"
nb_ipywidgets_js = {}  # would come from another host
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["report.css", "recorded.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_show_search_summary = False  # would read the pages over HTTP: search works from file:// too
html_permalinks_icon = "#"
html_math_renderer = "mathml"
html_domain_indices = False
html_use_index = False
html_baseurl = os.environ.get("OMNI_KV_SITE_URL", "")
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#005a91",
        "color-brand-content": "#005a91",
        "color-brand-visited": "#6b3f8f",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc4f4",
        "color-brand-content": "#7cc4f4",
        "color-brand-visited": "#c8a5ea",
    },
}
pygments_style = "default"
pygments_dark_style = "github-dark"

# All pages in one, for the PDF: no navigation, every answer unfolded.
if tags.has("paged"):  # noqa: F821 - Sphinx defines it
    html_theme = "print_theme"
    html_theme_path = ["."]
    html_theme_options = {}
    html_css_files = ["print.css"]

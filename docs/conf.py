"""The site: `make docs` builds it into build/docs, and every warning is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import normpass

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "normpass"
author = "normpass contributors"
project_copyright = author
version = release = normpass.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["generated/*.md"]  # parts of pages
html_extra_path = ["generated/report.html"]

# ---- pages

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Notebooks are kept with what they printed: `make notebooks` runs them, and so do tests.
nb_execution_mode = "off"

# ---- the reference, from docstrings

default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Types of torch's have pages elsewhere.
nitpicky = False


def plainly(
    _app: Sphinx, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text: `*n` is an axis, not the begin of emphasis, and what is set in is
    a block as it stands.
    """
    plain: list[str] = []
    for line in lines:
        before = plain[-1] if plain else ""
        sets_in = line.startswith("    ") and not before.strip()
        if sets_in and not any(before_it.startswith("    ") for before_it in plain[-2:-1]):
            plain += ["::", ""]
        plain.append(line.replace("*", r"\*") if not line.startswith("    ") else line)
    lines[:] = plain


def setup(app: Sphinx) -> None:
    # Before napoleon, which takes sections such as Args apart.
    app.connect("autodoc-process-docstring", plainly, priority=400)


# ---- how it looks

html_theme = "furo"
html_title = "normpass"
html_static_path = ["static"]
html_css_files = ["normpass.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "native"
copybutton_exclude = ".linenos, .gp, .go"

"""The documentation site: `make docs` builds it from this folder into build/docs.

Pages are plain Markdown that GitHub shows, too. So links between them are paths of the project.
Where a link leads out of this folder, the site needs another path, or has nothing to link to.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from sphinx.application import Sphinx

import hvd_pipe.tensorflow.keras
import hvd_pipe.tensorflow.pipedream
import hvd_pipe.torch.pipedream

ROOT = Path(__file__).resolve().parents[1]

PROJECT = (
    *("CONTRIBUTING.md", "SECURITY.md"),
    *("tests/README.md", "benchmarks/README.md", "CHANGELOG.md"),
)
"""Files whose text the page `project` shows, one after another."""

project = "hvd_pipe"
release = hvd_pipe.__version__
copyright = "the authors of hvd_pipe"
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["pictures"]

html_theme = "furo"
html_title = f"hvd_pipe {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
highlight_language = "text"  # of blocks that name no language, such as commands

myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
default_role = "py:obj"

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give a page its text, with links that lead somewhere on the site."""
    texts = []
    for name in PROJECT if docname == "project" else (f"docs/{docname}.md",):
        origin = ROOT / name
        app.env.note_dependency(os.fspath(origin), docname=docname)
        texts.append(_LINK.sub(partial(_site_link, origin, docname), origin.read_text()))
    source[0] = "\n".join(texts)


def _site_link(origin: Path, docname: str, link: re.Match[str]) -> str:
    picture, label, path, anchor = link[1], link[2], link[3], link[4] or ""
    target = (origin.parent / path).resolve()
    if not target.is_relative_to(ROOT) or not target.exists():
        return link[0]
    name = target.relative_to(ROOT).as_posix()
    pages = {**dict.fromkeys(PROJECT, "docs/project.md"), "README.md": "docs/index.md"}
    name = pages.get(name, name)
    if not name.startswith("docs/"):
        return label  # a folder or a source file, which the site does not show
    path = os.path.relpath(ROOT / name, ROOT / "docs" / Path(docname).parent)
    return f"{picture}[{label}]({path}{anchor})"


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", read_page)

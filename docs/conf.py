"""The site: `pip install -e ".[docs]"`, then `python -m sphinx docs site`, and open site/index.html.

Every chapter runs while the site is built, at small sizes, and stands there with what it printed and drew. What the
pages need of them is made first, by the modules in making/: they write into this folder what .gitignore names.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "making")]

import apidoc  # noqa: E402
import exercise_pages  # noqa: E402
import notebooks  # noqa: E402
import pages  # noqa: E402
import playground  # noqa: E402

project = "Scaling, written out"
html_title = project
copyright = "the authors of the project. The book is by Austin et al., Google DeepMind, 2025"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["making"]

nb_execution_mode = "off"  # the chapters have been run when Sphinx begins to read
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_merge_streams = False  # it would move text past tables: making/notebooks.py joins what is adjacent
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the signatures' docstrings, with shapes

smartquotes_action = "qe"  # quotes and ellipses, but no dashes: --mesh stays as it is typed

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_show_sphinx = False
html_copy_source = False


def setup(app) -> None:
    ran = notebooks.run_all(ROOT / "chapters", ROOT / "docs" / "chapters")
    pages.write_all(ROOT, ran)
    apidoc.write_all(ROOT)
    exercise_pages.write_all(ROOT / "docs" / "exercises")
    playground.prepare(ROOT)
    app.connect("source-read", pages.mend_links)
    app.connect("autodoc-process-docstring", apidoc.as_rst)

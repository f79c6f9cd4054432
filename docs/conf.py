"""How Sphinx builds the site: `make docs`, or `python -m sphinx -W docs FOLDER`.

What can be read off the code is read off it during the build (``_site/``): nothing generated is
committed, so nothing can be out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import hardpoint

project = "Hardpoint"
author = "the Hardpoint authors"
project_copyright = "the Hardpoint authors, Apache-2.0"
version = release = hardpoint.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "pages"]
exclude_patterns = ["_site", "_build"]
html_theme = "furo"
html_title = f"Hardpoint {version}"
smartquotes = False  # names and values stand as they are typed
html_copy_source = False
html_show_sphinx = False
highlight_language = "default"

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block"]

# Contracts are read in the order in which they are written: the order of a worker's life.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"

nitpicky = True  # a reference to something of ours that is not there is a warning
nitpick_ignore_regex = [("py:.*", r"(?!hardpoint).*")]

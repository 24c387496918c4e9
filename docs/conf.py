"""Sphinx settings. Nothing is downloaded; what can be generated is generated before the pages are read."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import _generate  # noqa: E402
import _notebooks  # noqa: E402
from pygments.lexers.shell import BashLexer  # noqa: E402
from sphinx.highlighting import lexers  # noqa: E402

import evenhand  # noqa: E402

lexers["console"] = BashLexer()  # commands without a prompt, so that they can be copied
_generate.everything(HERE / "reference" / "_generated")
_notebooks.write(HERE / "reference" / "_generated")

project = "evenhand"
author = "The evenhand authors"
project_copyright = author
version = release = evenhand.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["**/_*.md", "plugin-template/*", "reference/_generated/*", "_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["deflist", "colon_fence", "attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Formal guarantees", "notes_style"), ("Guarantee", "notes_style")]

smartquotes = False
html_theme = "furo"
html_title = f"evenhand {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["custom.css"]
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#00588c", "color-brand-content": "#00588c"},
    "dark_css_variables": {"color-brand-primary": "#6fb8ec", "color-brand-content": "#6fb8ec"},
}
copybutton_prompt_text = r"^\$ |^>>> "
copybutton_prompt_is_regexp = True

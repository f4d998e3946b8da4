"""Settings of the documentation site, which ``sphinx-build docs docs/_build/html`` builds."""

import pathlib
import shutil
import sys

DOCS = pathlib.Path(__file__).parent
# The repository itself, so that its library is documented and no installed copy, and the
# extensions below.
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_extensions")]

import simrf_jax
from setup import source_address

project = "simrf_jax"
author = "The simrf_jax maintainers"
project_copyright = author
version = release = simrf_jax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.bibtex",
    "sphinx-mathjax-offline",  # Formulas need no network.
    "myst_nb",  # MyST, and notebooks with their stored outputs.
    "comparison_tables",
    "name_links",
    "reference_lists",
    "repository_links",
    "source_signatures",
]
exclude_patterns = ["_build", "_extensions", "_templates"]
templates_path = ["_templates"]
nitpicky = True
# Types and exceptions that have no page of their own: arrays, records of Flax and JAX, and aliases.
nitpick_ignore_regex = [("py:(class|exc)", ".*")]
suppress_warnings = [
    "autosummary.import_cycle",  # Names with their modules on the page of a module.
    "ref.python",  # Types in signatures whose names several modules have.
]

# The address of the repository in setup.cfg, to which links to files that are no pages lead.
# Without one, such links become plain text.
repository_url = source_address() or ""

# Sphinx reads nothing outside of this folder. The copies keep the times of the files, so that a
# page is made again only if its notebook changed.
NOTEBOOKS = sorted(DOCS.parent.glob("colabs/*.ipynb"))
(DOCS / "notebooks").mkdir(exist_ok=True)
for path in NOTEBOOKS:
    shutil.copy2(path, DOCS / "notebooks")

# The page that holds each file of the repository, or most of it.
WRITTEN = [path.relative_to(DOCS) for path in (*DOCS.glob("*.md"), *DOCS.glob("*/*.md"))]
RESULTS = [path.parent.name for path in sorted(DOCS.parent.glob("experiments/*/README.md"))]
repository_pages = {
    **{f"docs/{page}": str(page.with_suffix("")) for page in WRITTEN},
    "README.md": "index",
    "BEYOND.md": "results/beyond_the_paper",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "ERRATA.md": "results/errata",
    "benchmarks/README.md": "results/benchmarks",
    "colabs/README.md": "notebooks",
    "examples/README.md": "how_to/own_model",
    **{f"experiments/{name}/README.md": f"results/{name}" for name in RESULTS},
    **{f"colabs/{path.name}": f"notebooks/{path.stem}" for path in NOTEBOOKS},
}

myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath", "html_image"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # Their outputs are stored, and tests/test_colabs.py compares them.

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # source_signatures writes them.
maximum_signature_line_length = 60
napoleon_use_rtype = False
napoleon_attr_annotations = False
napoleon_custom_sections = [("Attributes", "params_style")]

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"
bibtex_reference_style = "author_year"

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"simrf_jax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_show_sourcelink = False
html_copy_source = False
mathjax3_config = {"options": {"enableMenu": False}}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

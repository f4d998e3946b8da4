"""Executes every Python snippet of the site, page by page, and of the texts that it includes."""

import contextlib
import io
import re
import tokenize

import pytest

from tests.docs.pages import PAGES, TEXTS, fences, name, with_includes

# What a page leaves to its reader: a model, data, or the names of the page before.
GIVEN = {
    "docs/how_to/decode.md": """
import jax
from flax import nnx
from examples import linen_performer, nnx_performer

vocabulary, max_length, T = 7, 8, 3
model = nnx_performer.Transformer(vocabulary, max_length, rngs=nnx.Rngs(0))
prompt, token = jax.numpy.ones((2, T), int), jax.numpy.ones((2, 1), int)
Transformer = linen_performer.Transformer
variables = Transformer(vocabulary, max_length).init(jax.random.key(0), prompt)
""",
}
NOT_HERE = {
    "docs/contributing.md": "It shows the form of code, with dots in the place of the rest.",
    "docs/how_to/export_a_vit.md": "tests/experiments/vit/tools/test_export.py has a model.",
    "docs/how_to/models_of_others.md": "tests/examples/test_patterns.py has models for them.",
}

WITH_SNIPPETS = [path for path in PAGES if fences(with_includes(path), "python")]
# Many seconds each; .ci/run executes them with the site.
SLOW = {
    "docs/explanation/choosing_features.md",
    "docs/how_to/calibrate.md",
    "docs/how_to/decode.md",
    "docs/how_to/own_model.md",
    "docs/tutorial.md",
}
EXECUTED = [
    pytest.param(path, id=name(path), marks=[pytest.mark.slow] * (name(path) in SLOW))
    for path in WITH_SNIPPETS
    if name(path) not in NOT_HERE
]


def comments(code):
    """Returns the comments of some code as one line."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    found = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(" ".join(found).split())


@pytest.mark.slow
@pytest.mark.parametrize("path", EXECUTED)
def test_snippets_run_and_print_what_their_comments_say(path):
    namespace = {"__name__": "__main__"}
    exec(GIVEN.get(name(path), ""), namespace)
    for line, code in fences(with_includes(path), "python"):
        printed = io.StringIO()
        program = compile("\n" * (line - 1) + code, name(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        for row in printed.getvalue().splitlines():
            pattern = rf"(?<![^\s(]){re.escape(' '.join(row.split()))}(?![^\s).,;])"
            assert re.search(pattern, comments(code)), f"{name(path)}:{line} prints {row!r}"


@pytest.mark.fast
def test_every_snippet_of_the_repository_is_on_a_page():
    shown = {code for path in PAGES for _, code in fences(with_includes(path), "python")}
    for path in TEXTS:
        for line, code in fences(path.read_text(), "python"):
            assert code in shown, f"No page includes the snippet at {name(path)}:{line}"


@pytest.mark.fast
def test_the_pages_that_are_treated_apart_exist():
    assert {*GIVEN, *NOT_HERE, *SLOW} <= {name(path) for path in WITH_SNIPPETS}


@pytest.mark.fast
def test_a_snippet_that_prints_something_else_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    page.write_text("```python\nprint(1 + 1)  # 2\n```\n")
    test_snippets_run_and_print_what_their_comments_say(page)
    page.write_text("```python\nprint(1 + 1)  # 3\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:2 prints '2'"):
        test_snippets_run_and_print_what_their_comments_say(page)

"""Checks that docstrings open with a verb or a subject, and that the README stays short."""

import ast
import itertools
import pathlib
import re

import pytest

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[1]

# Folders whose docstrings are checked. The list grows until it names the whole project.
PACKAGES = (
    "simrf_jax",
    "experiments",
    "benchmarks",
    "docs",
    "examples",
    "colabs",
    "tests/benchmarks",
    "tests/docs",
    "tests/examples",
    "tests/experiments/beyond",
    "tests/experiments/char_lm",
    "tests/experiments/complexity",
    "tests/experiments/conformity",
    "tests/experiments/gram",
    "tests/experiments/harness",
    "tests/experiments/kernel_mse",
    "tests/experiments/kernel_regression",
    "tests/experiments/recall",
    "tests/experiments/swap",
    "tests/features",
    "tests/integrations",
    "tests/models",
    "tests/projections",
    "tests/property",
    "tests/selection",
    "tests/theory",
)

# Words that open a fragment of a sentence.
FRAGMENT_OPENINGS = """
    all as from how likewise of that those to what where whether which with
"""
# Words that end in s as verbs in the third person do, but are not verbs.
NOT_VERBS = """
    Always Angles Arguments Axes Axis Basis Bias Biases Blocks Bytes Characters Coefficients Columns
    Conformities Cosines Devices Directions Entries Features Figs Heads Images Indices Its Keys
    Layers Lengths Logarithms Logits Losses Matrices Microseconds Milliseconds Moments
    Multiplications Norms Numbers Operations Patches Phases Plus Positions Projections Quartiles
    Queries Ratios Rows Seconds Segments Sizes States Steps Tables Terms This Tokens Trials Units
    Values Vectors Windows Zeros
"""
# Sections of Google-style docstrings that hold entries "name: description", or plain text.
ENTRY_SECTIONS = ("Args", "Attributes", "Raises")
TEXT_SECTIONS = ("Returns", "Yields")
ENTRY = re.compile(r"[*`\w., ]+(?: \([^)]*\))?:\s*(.*)")


def faults(source):
    """Yields (line number, fault) for each docstring or description that opens badly."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        lines = [(i, line) for i, line in enumerate(docstring.splitlines()) if line.strip()]
        for i, fault in [*summary_faults(node, lines), *description_faults(lines)]:
            yield node.body[0].lineno + i, fault


def summary_faults(node, lines):
    """Yields (index of the line, fault) if the first line of a docstring opens badly."""
    if not lines:
        yield 0, "The docstring is empty."
        return
    i, summary = lines[0]
    if is_fragment(summary):
        yield i, f"The docstring opens with a fragment: {summary.strip()!r}"
    elif needs_verb(node) and not is_verb(summary.split()[0]):
        yield i, f"The docstring of a function must open with a verb: {summary.strip()!r}"


def description_faults(lines):
    """Yields (index of the line, fault) for each description in a section that opens badly."""
    for section, body in sections(lines):
        for i, text in descriptions(section, body):
            if is_fragment(text):
                yield i, f"The description in {section} opens with a fragment: {text.strip()!r}"


def sections(lines):
    """Yields the name of each section and its lines."""
    for position, (_, line) in enumerate(lines):
        name, colon, rest = line.strip().partition(":")
        if name in (*ENTRY_SECTIONS, *TEXT_SECTIONS) and colon and not rest:
            yield name, deeper(lines[position + 1 :], indent(line))


def deeper(lines, margin):
    """Returns the leading lines that are indented by more than ``margin``."""
    return list(itertools.takewhile(lambda line: indent(line[1]) > margin, lines))


def descriptions(section, body):
    """Yields (index of the line, text) of the first line of each description in a section."""
    if section in TEXT_SECTIONS:
        yield from body[:1]
        return
    for position, (i, line) in enumerate(body):
        entry = ENTRY.fullmatch(line.strip())
        if entry and indent(line) == indent(body[0][1]):
            # The description may begin on the line below the name.
            yield from [(i, entry[1])] if entry[1] else body[position + 1 : position + 2]


def indent(line):
    return len(line) - len(line.lstrip())


def is_fragment(text):
    """Returns whether a text begins with a word that opens a fragment."""
    return re.match(r"[\w'-]*", text.strip())[0].lower() in FRAGMENT_OPENINGS.split()


def is_verb(word):
    """Returns whether a word looks like a verb in the third person, such as "Returns"."""
    word = word.rstrip(".,:;")
    return bool(re.fullmatch(r"[A-Z][\w-]*[a-rt-z]s", word)) and word not in NOT_VERBS.split()


def needs_verb(node):
    """Returns whether a docstring belongs to a function that is neither a property nor a test."""
    if isinstance(node, ast.Module | ast.ClassDef) or node.name.startswith("test_"):
        return False
    decorators = [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
    return not {"property", "cached_property", "setter"} & {*decorators}


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_open_well(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths, f"There are no modules in {package}."
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in paths
        for line, fault in faults(path.read_text())
    ]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


PLACES = {
    "module": '"""{}"""\n',
    "class": 'class C:\n    """{}"""\n',
    "function": 'def f(x):\n    """{}"""\n',
    "method": 'class C:\n    async def f(self):\n        """\n        {}\n        """\n',
    "property": 'class C:\n    @property\n    def f(self):\n        """{}"""\n',
    "test": 'def test_f():\n    """{}"""\n',
    "argument": 'def f(x):\n    """Returns x.\n\n    Args:\n      y: A.\n      x: {}\n    """\n',
    "type": 'def f(x):\n    """Returns x.\n\n    Args:\n      x (int): {}\n    """\n',
    "keywords": 'def f(x):\n    """Returns x.\n\n    Args:\n      **x: {}\n    """\n',
    "below": 'def f(x):\n    """Returns x.\n\n    Args:\n      x:\n        {}\n    """\n',
    "attribute": 'class C:\n    """Record.\n\n    Attributes:\n      x: {}\n    """\n',
    "result": 'def f():\n    """Returns x.\n\n    Returns:\n      {}\n\n    Example:\n    """\n',
    "error": 'def f():\n    """Returns x.\n\n    Raises:\n      TypeError: {}\n    """\n',
}

REFUSED = [
    ("function", "What the device that many before has, around the end."),
    ("function", "What two flat mappings do not share, one sentence an entry."),
    ("function", "Segments are runs: those that both halves have part in hold the last."),
    ("function", "Side of the middle square that is evaluated, over the shorter side."),
    ("function", "Likewise."),
    ("function", "Loss of a batch."),
    ("function", ":math:`1 - x`, to full relative accuracy."),
    ("function", "``minimize_resultant`` in float64 NumPy."),
    ("function", ""),
    ("method", "Squared lengths of the rows."),
    ("property", "Of the array."),
    ("test", "As the function above."),
    ("class", "How a rotation is drawn."),
    ("module", "What stands for a projection without being one array."),
    ("argument", "As `draw_projection`."),
    ("argument", "As ``draw_projection``."),
    ("argument", "Likewise."),
    ("argument", "Whether to return the logarithm."),
    ("type", "All the arrays."),
    ("keywords", "Those of ``draw_projection``."),
    ("below", "Which rows are drawn."),
    ("attribute", "From (key, vectors) to rows."),
    ("result", "With the leading axes of ``x``, an array."),
    ("error", "As ``draw_projection``."),
]

ACCEPTED = [
    ("function", "Returns the value held `by` devices earlier, wrapping around."),
    ("function", "Describes each difference between two flat configs."),
    ("function", "All-gathers the keys."),
    ("method", "Returns the squared lengths of the rows."),
    ("property", "Shape of the array, ``[..., num_features, dim]``."),
    ("test", "The exact value is within five standard errors."),
    ("class", "Running sums over keys."),
    ("module", "Interface of projections that are not one array."),
    ("argument", "Boolean key-padding mask, `[..., N, T, S]`; see `random_feature_attention`."),
    ("type", "If true, return the logarithm."),
    ("keywords", "Keyword arguments of ``draw_projection``."),
    ("below", "The rows that are drawn."),
    ("attribute", "Evaluation center crop: crop side divided by the shorter image side."),
    ("attribute", "Seconds until the surviving processes exit after one dies."),
    ("result", "Array with the leading axes of ``x``."),
    ("error", "If ``draw_projection`` raises it."),
]


@pytest.mark.parametrize(("place", "text"), REFUSED)
def test_refuses_fragments(place, text):
    source = PLACES[place].format(text)
    line = PLACES[place].partition("{}")[0].count("\n") + 1
    assert [found for found, _ in faults(source)] == [line]


@pytest.mark.parametrize(("place", "text"), ACCEPTED)
def test_accepts_sentences(place, text):
    assert not list(faults(PLACES[place].format(text)))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180

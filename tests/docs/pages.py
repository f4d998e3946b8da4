"""The pages of the site as text, with the files that they include."""

import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Pages that Sphinx makes are in folders that git ignores.
PAGES = sorted(
    path for path in DOCS.rglob("*.md") if not {"_build", "api"} & {*path.relative_to(DOCS).parts}
)
# Every text with snippets or commands that a reader may try.
TEXTS = sorted(
    [
        *PAGES,
        *ROOT.glob("*.md"),
        *ROOT.glob("experiments/*/README.md"),
        *(ROOT / folder / "README.md" for folder in ("benchmarks", "colabs", "examples")),
    ]
)
INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::.*\n)*)```$", re.MULTILINE)
OPTION = re.compile(r"^:([a-z-]+): *(.*)$", re.MULTILINE)
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def name(path):
    """Returns the name of a text in the messages of the tests."""
    return str(path.relative_to(ROOT))


def included(path, match):
    """Returns the part of a file that a directive of a page includes."""
    text = (path.parent / match[1]).resolve().read_text()
    options = dict(OPTION.findall(match[2]))
    start, end = (
        options.get(key, "").strip("\"'").replace("\\n", "\n")
        for key in ("start-after", "end-before")
    )
    for marker in (start, end):
        assert marker in text, f"{name(path)} includes {match[1]}, which lacks {marker!r}"
    rest = text.partition(start)[2] if start else text
    return rest.partition(end)[0] if end else rest


def with_includes(path):
    """Returns the text of a page with the files that it includes."""
    return INCLUDE.sub(lambda match: included(path, match), path.read_text())


def fences(text, *languages):
    """Returns (number of the first line, code) for each block of code in some languages."""
    return [
        (text.count("\n", 0, match.start(3)) + 1, textwrap.dedent(match[3]))
        for match in FENCE.finditer(text)
        if match[2] in languages
    ]

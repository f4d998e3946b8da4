"""Links the public names of the library, wherever a text has one in code style, to their pages."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_signature
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode


def meanings(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the full names that each name or end of one may stand for.

    >>> meanings(["a.f", "a.b.f"])
    {'a.f': ['a.f'], 'f': ['a.f', 'a.b.f'], 'a.b.f': ['a.b.f'], 'b.f': ['a.b.f']}
    """
    found = collections.defaultdict(list)
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            found[".".join(parts[first:])].append(name)
    return dict(found)


def choose(candidates: Sequence[str], module: str | None) -> str | None:
    """Returns the one of some full names that is meant in a text about a module, if that is clear.

    >>> choose(["a.f", "a.b.f"], None), choose(["a.f", "a.b.f"], "a.b"), choose(["a.f"], "a.b")
    (None, 'a.b.f', 'a.f')
    """
    near = [name for name in candidates if name.rpartition(".")[0] == module]
    return next((group[0] for group in (candidates, near) if len(group) == 1), None)


class NameLinks(SphinxPostTransform):
    """Makes links of the public names in code style."""

    default_priority = 700

    def run(self, **options: Any) -> None:
        """Replaces the names in one page."""
        objects = self.env.domains.python_domain.objects
        public = {name: entry for name, entry in objects.items() if not entry.aliased}
        kinds = ("class", "data", "function")
        known = meanings(name for name, entry in public.items() if entry.objtype in kinds)
        known |= {name: [name] for name, entry in public.items() if entry.objtype == "module"}
        module = next((node["module"] for node in self.document.findall(desc_signature)), None)
        for node in list(self.document.findall(nodes.literal)):
            name = choose(known.get(node.astext().removesuffix("()"), ()), module)
            if name is None or _is_inside(node, (nodes.reference, nodes.title, desc_signature)):
                continue
            entry, here = objects[name], self.env.docname
            if entry.docname != here:
                content = node.deepcopy()
                link = make_refnode(self.app.builder, here, entry.docname, entry.node_id, content)
                node.replace_self(link)


def _is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Returns whether a node is a part of one of some kinds of nodes."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    app.add_post_transform(NameLinks)
    return {"parallel_read_safe": True}

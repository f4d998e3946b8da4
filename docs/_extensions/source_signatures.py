"""Shows the types in signatures as the source writes them: ``Float[Array, "*batch dim"]``."""

from __future__ import annotations

import inspect
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature


def on_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: object,
    signature: str | None,
    return_annotation: str | None,
) -> tuple[str | None, str | None]:
    """Returns the arguments and the result of a function or a class that autodoc documents.

    The modules' annotations are strings, which autodoc evaluates: each ``ArrayLike`` becomes a line
    of types.
    """
    if signature is None:
        return signature, return_annotation
    if inspect.isclass(obj):
        return _of_class(obj), None
    found = _without_self(inspect.signature(obj))
    result = found.return_annotation
    shown = stringify_signature(found, show_return_annotation=False)
    return shown, result if isinstance(result, str) else None


def _of_class(cls: type) -> str:
    """Returns the arguments of a class, which its metaclass may hide."""
    if getattr(cls, "_is_protocol", False):
        return ""
    has_init = cls.__init__ is not object.__init__  # Named tuples have none.
    found = _without_self(inspect.signature(cls.__init__)) if has_init else inspect.signature(cls)
    return stringify_signature(found, show_return_annotation=False)


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature of a method without the instance, and any other one as it is."""
    parameters = list(signature.parameters.values())
    is_of_instance = bool(parameters) and parameters[0].name == "self"
    return signature.replace(parameters=parameters[is_of_instance:])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    app.connect("autodoc-process-signature", on_signature)
    return {"parallel_read_safe": True}

"""``with fx_actcomp.annotate("int4")`` inside a model's forward: the nearest way to say how a region's tensors are saved."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import fx

from ._torch import annotate_nodes

_KEY = "actcomp"


def annotate(codec: str | Mapping[str, object] | None) -> AbstractContextManager[None]:
    """Mark what is computed inside, for the compiler: save these tensors with ``codec``.

    It stands above ``overrides``, which stand above the policy. Outside of ``torch.compile`` it does nothing.

    Args:
        codec: A codec or policy name, with or without parameters, as in ``overrides``; None leaves the tensors alone.
    """
    if codec is None:
        return annotate_nodes({_KEY: "none"})
    if isinstance(codec, str):
        return annotate_nodes({_KEY: codec})
    # Dynamo traces this; the backend checks what it says
    given = {str(key): str(value) for key, value in codec.items()}
    name = given.pop("codec", "")
    return annotate_nodes({_KEY: f"{name}:{','.join([f'{key}={value}' for key, value in given.items()])}"})


def annotation(node: fx.Node) -> str | None:
    """The codec that ``annotate`` asks for at this node; None where nothing was said."""
    asked = (node.meta.get("custom") or {}).get(_KEY)
    return asked if isinstance(asked, str) else None

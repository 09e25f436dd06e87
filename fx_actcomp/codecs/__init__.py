"""The codecs, by name. A new one is a class with three methods (``base.Codec``) and a line here."""

from __future__ import annotations

from .base import Codec as Codec
from .base import Parts as Parts
from .base import Traits as Traits
from .bits import Bits, Narrow, Ternary
from .layout import Layout as Layout
from .pool import Division, Pool
from .quantize import Quantize

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        *(Bits(), Ternary(), Narrow()),
        *(Quantize("int8", 8), Quantize("int4", 4), Quantize("int2", 2), Quantize("int1", 1)),
        *(Pool("pool2", 2), Pool("pool4", 4), Division()),
    )
}
"""Every codec; the ones with ``bits`` are lossy."""


def codec_named(name: str) -> Codec:
    """Look up a codec.

    Raises:
        ValueError: There is none of that name; the message lists what there is.
    """
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; there are: {', '.join(sorted(CODECS))}")
    return CODECS[name]

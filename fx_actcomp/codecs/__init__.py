"""The codecs, by name. A new one is a class with three methods (``base.Codec``) and a line in ``registry.py``."""

from .base import Codec as Codec
from .base import Parts as Parts
from .base import Reference as Reference
from .base import Traits as Traits
from .layout import Layout as Layout
from .noise import Noise as Noise
from .registry import CODECS as CODECS
from .registry import Spec as Spec
from .registry import codec_named as codec_named
from .registry import codec_sources as codec_sources
from .registry import codec_spec as codec_spec
from .registry import register_codec as register_codec

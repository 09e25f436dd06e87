"""fx_actcomp: ``torch.compile(model, backend="actcomp")`` trains in less memory.

What forward saves for backward is compressed in the graph: values may be lossy, decisions never are.
"""

from importlib.metadata import version as _version

from .annotate import annotate as annotate
from .backend import actcomp as actcomp
from .codecs import Codec as Codec
from .codecs import Layout as Layout
from .codecs import Parts as Parts
from .codecs import Traits as Traits
from .codecs import register_codec as register_codec
from .explain import explain as explain
from .explain import print_saved_activations as print_saved_activations
from .explain import report as report
from .gradient import GradientError as GradientError
from .gradient import gradient_error as gradient_error
from .policy import Policy as Policy
from .report import Report as Report
from .steps import manual_seed as manual_seed

__version__ = _version("fx_actcomp")

"""The records that flow between the stages: plain, frozen, printable data; no graph and no tensor in them.

saved.py  -> Boundary(saved=[SavedActivation], decisions=[Decision])
policy.py -> Plan(choices=[Choice], pins=[Pin])
report.py -> rows
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .invert import Inverse

EXACT_BITS = 99
"""Precision asked of a value that must come back exactly; more than any lossy codec keeps."""


class Kind(enum.Enum):
    """What a saved tensor is, which decides whether it is ours to compress at all."""

    ACTIVATION = "activation"
    MASK = "mask"
    INDEX = "index"
    STEP = "piecewise constant value"
    STATISTIC = "statistic"
    PARAMETER = "parameter or buffer"
    INPUT = "input"
    OUTPUT = "output"
    RANDOM = "random state"
    OTHER = "other"


ALIVE_ANYWAY = frozenset({Kind.PARAMETER, Kind.INPUT, Kind.OUTPUT})
"""Kinds whose memory someone else holds: saving them costs nothing, and compressing them would add a copy."""


class Role(enum.Enum):
    """What backward does with a value; the allow-table of uses, one member a row."""

    WEIGHT_GRAD = "operand of a weight gradient"
    CONV_WEIGHT_GRAD = "input of a convolution's weight gradient"
    NORM = "x-hat of a norm"
    NONLINEAR = "input of a nonlinear derivative"
    PRODUCT = "factor of an activation gradient"
    ATTENTION = "operand of attention"
    DECISION = "decision"
    SIZE = "only its size is read"
    EXACT = "must be exact"
    UNKNOWN = "use not known"


MIN_BITS = {
    Role.WEIGHT_GRAD: 1,
    Role.CONV_WEIGHT_GRAD: 1,
    Role.NORM: 1,
    Role.SIZE: 1,
    Role.NONLINEAR: 8,
    Role.PRODUCT: 8,
    Role.ATTENTION: 8,
    Role.DECISION: 1,  # decisions are pinned or sign-exact; policy.py sees to it before it accepts a lossy codec
    Role.EXACT: EXACT_BITS,
    Role.UNKNOWN: EXACT_BITS,
}
"""Fewest bits a lossy codec must keep for a value in each role."""


@dataclass(frozen=True)
class Use:
    """One use of a saved value in backward.

    Attributes:
        op: The ATen operator, as in ``aten.mm``.
        module: Path of the module whose backward this is; empty where unknown.
        role: The row of the allow-table.
        reason: Why, where the role forbids lossy values.
        spatial: Whether the user works over height and width (convolution, pooling, batch norm).
        pointwise: Whether it is a convolution of 1x1 with stride 1 and no padding.
    """

    op: str
    module: str
    role: Role
    reason: str = ""
    spatial: bool = False
    pointwise: bool = False


@dataclass(frozen=True)
class SavedActivation:
    """One tensor that the forward graph saves for the backward graph.

    Attributes:
        number: Position among the saved tensors, from 0.
        name: Name of the node, the same in the forward and the backward graph.
        module: Path of the module that made it, without a ``self.`` head; empty at top level.
        op: The ATen operator that made it.
        source: ``file:line`` of the user's code, empty where unknown.
        shape: Sizes; a string is a symbolic size.
        dtype: As torch prints it, without the ``torch.`` head.
        nbytes: Bytes that this tensor alone keeps alive; 0 where it shares the storage of another saved tensor.
        kind: What it is.
        base: Name of the forward node whose storage it shares (itself where it owns its storage).
        uses: What backward does with it.
        sign_exact: Whether its producer proves that it is never negative.
        shares: Whether its producer proves that it holds shares of a whole: a softmax's probabilities.
        upper: For integers: a proved inclusive bound on the values (never negative); None where there is no proof.
        symbolic: Whether a size is symbolic; ``nbytes`` is then of the sizes seen at compile time.
        annotation: Codec asked for by ``fx_actcomp.annotate`` around its producer.
    """

    number: int
    name: str
    module: str
    op: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    nbytes: int
    kind: Kind
    base: str
    uses: tuple[Use, ...]
    sign_exact: bool = False
    shares: bool = False
    upper: int | None = None
    symbolic: bool = False
    annotation: str | None = None

    @property
    def min_bits(self) -> int:
        """Fewest bits that every use bears."""
        return max((MIN_BITS[use.role] for use in self.uses), default=1)

    @property
    def target(self) -> str:
        """``module::aten.op``, what an override names."""
        return f"{self.module}::{self.op}"


@dataclass(frozen=True)
class Decision:
    """A mask, predicate or index that backward would compute from saved values.

    Attributes:
        name: Name of the backward node.
        op: Its ATen operator.
        module: Path of the module.
        sources: Names of the saved tensors that it depends on.
        shape: Sizes; a string is symbolic.
        bits: Bits an element when packed; None where it can't be pinned.
        nbytes: Bytes of it packed.
        obstacle: Why it can't be pinned.
        sign_of: The saved tensor whose ``x > 0`` this is, where it is just that (a sign-exact code keeps it).
    """

    name: str
    op: str
    module: str
    sources: tuple[str, ...]
    shape: tuple[int | str, ...]
    bits: int | None
    nbytes: int
    obstacle: str = ""
    sign_of: str | None = None


@dataclass(frozen=True)
class Image:
    """A saved tensor that is an affine function of another saved one, as a norm's output is of x-hat.

    Attributes:
        name: The tensor.
        source: The one that it can be made from.
        chain: The forward nodes from the source (not itself) to the tensor, in order.
        carried: What the chain reads beside: parameters, or views of them, and saved statistics; of a product the other
            factors.
        affine: Whether it is affine in the source; else it is another pointwise function of it and what is carried.
        extra: Which of the carried ones nobody saves or holds yet, with their bytes.
    """

    name: str
    source: str
    chain: tuple[str, ...]
    carried: tuple[str, ...]
    affine: bool = True
    extra: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Derivative:
    """Where backward multiplies by the derivative of a function; names of backward nodes.

    Attributes:
        made: The product.
        gradient: What the derivative is multiplied with.
        inside: The nodes from the function's input to the product, which nothing else reads.
    """

    made: str
    gradient: str
    inside: frozenset[str]


@dataclass(frozen=True)
class Inversion:
    """A saved tensor that can be restored from a saved function of it.

    Attributes:
        name: The tensor, the function's input.
        source: The function's output.
        inverse: How.
        permuted: Whether the source is a permuted view of the output, whose memory is in order.
        derivative: Where the function's derivative is all that backward reads it for, and comes from the output at less cost.
    """

    name: str
    source: str
    inverse: Inverse
    permuted: bool = False
    derivative: Derivative | None = None


@dataclass(frozen=True)
class Normalized:
    """The saved input of a batch norm in training, whose statistics are at hand; names of forward nodes.

    Attributes:
        name: The input.
        mean: Its mean for each channel.
        rstd: One over its standard deviation.
        weight: The norm's weight, where it has one.
        bias: The norm's bias, where it has one.
        rectified: The ReLU of the norm's output, where it is saved too.
        nbytes: Bytes of these statistics and parameters that nobody saves or holds yet.
    """

    name: str
    mean: str
    rstd: str
    weight: str | None
    bias: str | None
    rectified: str | None
    nbytes: int

    @property
    def references(self) -> tuple[str, ...]:
        """Statistics and parameters, in the order of the fields."""
        return tuple(name for name in (self.mean, self.rstd, self.weight, self.bias) if name is not None)

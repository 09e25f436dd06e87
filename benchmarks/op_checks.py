"""What a policy may do to a case of :mod:`op_cases`, held against policy ``"none"``; what doesn't count, and why."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fnmatch
import math
from collections.abc import Callable, Sequence

import torch
from op_cases import KINDS, Case, Entry, NoGradientError, Outcome, run
from torch import Tensor

Stage = Callable[[str, str], None]
"""Told which case and which policy begin."""

BESIDE = ("bfloat16", "complex64", "noncontiguous", "bare")
"""Kinds of samples of which fewer are taken."""

PLAIN = "aot_eager_decomp_partition"
"""torch's own backend with the decompositions and the partitioner that Inductor uses, and no Inductor."""

BOUNDS = {"int8": 1 / 32}
"""Of the relative error of a case's whole gradient, by policy.

Of values spread evenly over their group's range, 8-bit codes are off by 1/256 of their norm; in the worst group, where one value
is large and the other 255 are not, by 1/32 (each by half a step, 1/512 of the large one). A gradient is a sum of products of
saved values, each of which brings its error once. So 1/32 is one factor from the worst group, or ``FEW`` from even ones. Where
more tensors are compressed (a recurrent layer saves dozens) it grows with the root of their number, as independent errors do.
"""

FEW = 8
"""So many compressed tensors that the bound holds as it stands."""

EACH = 16
"""So many times the bound for each gradient alone: a small one beside large ones may be off by more of itself."""


STEEP = {"nn.Transformer*": 8, "nn.MultiheadAttention": 8, "nn.functional.*_attention*": 8}
"""So many times the bound for entries whose samples are steeper than what is trained.

Attention's scores are exponentiated, and 8 bits of q and k move a score by up to 1/128 of its size. These samples are drawn from
[-9, 9] and have scores up to 50, so their probabilities move by a third.
"""


CANCELS = ("*softmax*", "*softmin*", "*Softmax*", "*Softmin*")
"""Entries whose gradient ``p (dy - sum(p dy))`` may cancel, whole rows to zero; its terms are as large as the output ``p``.

An error is held against the larger of the two. A logarithm of p has an output that is no less than its gradient, and no 8 bits.
"""


class Refusal(enum.Enum):
    """Why a sample doesn't count; nothing else is accepted."""

    NO_TYPE = "the data base has no gradient of it on CPUs"
    NO_GRADIENT = "no output of it takes a gradient"
    FAILS_EAGERLY = "eager fails on it"
    FAILS_WITHOUT_US = "plain torch.compile fails on it"
    NOT_CAPTURED = "Dynamo leaves it to eager"
    NOT_DETERMINISTIC = "differs between two runs of policy none"


@dataclasses.dataclass
class Result:
    """What became of one entry.

    Attributes:
        name: Its name.
        ran: Samples that were compared.
        lossy: How many of them saved something lossy under some policy.
        saving: How many saved something for backward that nobody else holds.
        refused: How many of the others there are, by reason.
        failures: One line for each failure.
        worst: Largest relative error of a gradient, by policy.
    """

    name: str
    ran: int = 0
    lossy: int = 0
    saving: int = 0
    refused: collections.Counter[Refusal] = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """``"failed"``, ``"passed"`` or the reason of the refusal."""
        if self.failures:
            return "failed"
        return "passed" if self.ran else self.refused.most_common(1)[0][0].value


def sweep(entry: Entry, policies: Sequence[str], most: int, beside: int, seed: int, stage: Stage = lambda *_: None) -> Result:
    """Run the samples of one entry.

    Args:
        entry: The entry.
        policies: Held against "none".
        most: So many samples of it as the data base has them in fp32.
        beside: So many in each of the other kinds.
        seed: Chooses the samples, and seeds every run.
        stage: Told what begins.
    """
    result = Result(entry.name)
    kinds = [kind for kind in KINDS.values() if entry.takes(kind)]
    for kind in kinds:
        for case in entry.cases(kind, beside if kind.name in BESIDE and kind is not kinds[0] else most, seed):
            _sweep_case(case, policies, seed, result, stage)
    if not kinds:
        result.refused[Refusal.NO_TYPE] += 1
    return result


def _sweep_case(case: Case, policies: Sequence[str], seed: int, result: Result, stage: Stage) -> None:
    stage(case.name, "none")
    try:
        exact = _run(case, "none", seed)
    except Exception as error:
        refusal = _blame(case, seed, error, stage)
        if refusal is None:
            result.failures.append(f"{case.name}: policy none: {_said(error)}")
        else:
            result.refused[refusal] += 1
        return
    if exact.report is None or not exact.report.graphs:
        result.refused[Refusal.NOT_CAPTURED] += 1
        return
    faults: list[str] = []
    lossy = False
    for policy in policies if exact.report.saved else ():  # where nothing is saved, every policy compiles the same graphs
        stage(case.name, policy)
        try:
            found = _run(case, policy, seed)
        except Exception as error:
            faults.append(f"{case.name}: policy {policy}: {_said(error)}")
            continue
        mine = lossy_tensors(found)
        lossy |= mine > 0
        fault, error = compare(exact, found, _bound(policy, result.name, mine), _terms(result.name, exact))
        result.worst[policy] = max(error, result.worst.get(policy, 0.0))
        if fault:
            faults.append(f"{case.name}: policy {policy}: {fault}")
    if faults and compare(exact, _run(case, "none", seed), 0.0)[0]:
        result.refused[Refusal.NOT_DETERMINISTIC] += 1
        return
    result.ran += 1
    result.lossy += lossy
    result.saving += any(not row.alive_anyway for row in exact.report.saved)
    result.failures += faults


def _bound(policy: str, name: str, compressed: int) -> float:
    steep = max((times for glob, times in STEEP.items() if fnmatch.fnmatch(name, glob)), default=1)
    return BOUNDS.get(policy, 0.0) * steep * math.sqrt(max(compressed / FEW, 1)) if compressed else 0.0


def _terms(name: str, exact: Outcome) -> float:
    """Norm of what a gradient is the small difference of; 0 where it is none."""
    if not any(fnmatch.fnmatchcase(name, glob) for glob in CANCELS):
        return 0.0
    return math.hypot(*(x.nan_to_num(0, 0, 0).abs().double().norm().item() for x in exact.outputs))


def _run(case: Case, policy: str, seed: int) -> Outcome:
    return run(case, seed=seed, policy=policy, compiler="aot_eager", min_bytes=0, strict=True)


def _blame(case: Case, seed: int, error: Exception, stage: Stage) -> Refusal | None:
    """Why policy "none" fails; None where it is our fault."""
    if isinstance(error, NoGradientError):
        return Refusal.NO_GRADIENT
    for backend, refusal in ((None, Refusal.FAILS_EAGERLY), (PLAIN, Refusal.FAILS_WITHOUT_US)):
        stage(case.name, "none")
        try:
            run(case, backend, seed)
        except Exception:
            return refusal
    return None


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def lossy_tensors(outcome: Outcome) -> int:
    """How many tensors come back changed, by the report."""
    assert outcome.report is not None
    return sum(row.lossy for row in outcome.report.saved)


def compare(exact: Outcome, found: Outcome, bound: float, terms: float = 0.0) -> tuple[str, float]:
    """Hold one run against the reference.

    Args:
        exact: The reference.
        found: The other one.
        bound: Of the gradients' relative error; 0 asks for the same bits.
        terms: Norm of what the gradients are small differences of.

    Returns:
        What is wrong, empty where nothing is, and the error.
    """
    if not same_bits(exact.outputs, found.outputs):
        return "outputs differ", 0.0
    if [g is None for g in exact.gradients] != [g is None for g in found.gradients]:
        return "other inputs take a gradient", 0.0
    if same_bits(exact.gradients, found.gradients):
        return "", 0.0
    if not bound:
        return "gradients differ and nothing lossy was saved", math.inf
    error, worst = gradient_errors(exact.gradients, found.gradients, terms)
    fault = "" if error <= bound and worst <= EACH * bound else f"gradient error {error:.2e}, of one input alone {worst:.2e}"
    return fault, error


def same_bits(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    """Whether two lists of tensors are the same to the last bit, NaN and negative zero included."""

    def bits(x: Tensor) -> Tensor:
        dense = x.resolve_conj().resolve_neg() if x.layout is torch.strided else x.to_dense()
        return dense.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)

    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(bits(a), bits(b)):
            return False
    return True


def gradient_errors(exact: Sequence[Tensor | None], found: Sequence[Tensor | None], terms: float = 0.0) -> tuple[float, float]:
    """Relative error ``|g - g0| / max(|g0|, terms)`` of all gradients together, and the largest of one.

    Both are infinite where an infinity or NaN isn't where it was; elsewhere these elements don't count.
    """
    pairs = []
    for a, b in zip(exact, found, strict=True):
        if a is None or b is None:
            continue
        a, b = (x.to_dense() if x.layout is not torch.strided else x for x in (a, b))
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return math.inf, math.inf
        wide = torch.complex128 if a.is_complex() else torch.float64
        pairs.append((a[finite].to(wide), b[finite].to(wide)))
    distances, norms = [(b - a).norm().item() for a, b in pairs], [max(a.norm().item(), terms) for a, _ in pairs]
    each = [_ratio(distance, norm) for distance, norm in zip(distances, norms, strict=True)]
    return _ratio(math.hypot(*distances), math.hypot(*norms)), max(each, default=0.0)


def _ratio(distance: float, norm: float) -> float:
    return distance / norm if norm else math.inf if distance else 0.0

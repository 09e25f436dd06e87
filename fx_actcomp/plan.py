"""Stage 3: saved activations + policy + overrides -> a plan. It chooses and gives reasons; it never edits a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .codecs import CODECS, Codec, Traits, codec_named
from .options import Settings
from .overrides import find_override
from .policy import Policy, policy_of
from .records import ALIVE_ANYWAY, EXACT_BITS, MIN_BITS, Decision, Kind, Role, SavedActivation
from .saved import Boundary


@dataclass(frozen=True)
class Choice:
    """What becomes of one saved tensor.

    Attributes:
        saved: The tensor.
        codec: Name of the codec; None where it is saved as it is, or not at all.
        traits: What the codec may build on.
        reason: Why it is left alone, or why another codec was taken than the one asked for; empty where neither.
        nbytes: Bytes that it takes now.
        dropped: Whether it is not saved at all, since its decisions are pinned and nothing else reads it.
        unit: Name of the forward node that is compressed: the tensor itself, or the base that several views share.
    """

    saved: SavedActivation
    codec: str | None
    traits: Traits
    reason: str
    nbytes: int
    unit: str
    dropped: bool = False


@dataclass(frozen=True)
class Pin:
    """A decision that forward takes from exact values and saves packed."""

    decision: Decision
    codec: str


@dataclass(frozen=True)
class Plan:
    """What the rewrite stage does, and what the report says.

    Attributes:
        policy: Name of the policy.
        choices: One for each saved tensor, in their order.
        pins: Decisions that move to forward.
        matched: Patterns of the overrides that applied to some tensor.
    """

    policy: str
    choices: tuple[Choice, ...]
    pins: tuple[Pin, ...]
    matched: frozenset[str]


Measure = Callable[[str, Codec, Traits], int | str]
"""Bytes that a codec makes of a forward node, by its name, or the reason why it doesn't fit."""


def make_plan(boundary: Boundary, settings: Settings, measure: Measure, shared: Mapping[str, str | None]) -> Plan:
    """Choose a codec for each saved tensor, and pin what the choices ask for.

    Args:
        boundary: What is saved.
        settings: Policy, overrides and threshold.
        measure: Bytes of a codec on a node; see :data:`Measure`.
        shared: For each base that several saved tensors view: the reason why they can't be made from it again in backward,
            or None where they can.

    Returns:
        The plan. Every tensor that is left alone has a reason.
    """
    wishes = {saved.name: _wish(saved, settings) for saved in boundary.saved}
    choices = [_choose(unit, wishes, settings, measure, shared) for unit in _units(boundary.saved, shared)]
    flat = {choice.saved.name: choice for group in choices for choice in group}
    pins = _settle_decisions(boundary, flat, settings)
    matched = frozenset(wish.pattern for wish in wishes.values() if wish.pattern)
    return Plan(settings.policy.name, tuple(flat[saved.name] for saved in boundary.saved), pins, matched)


@dataclass(frozen=True)
class _Wish:
    """The policy that applies to one tensor, and the override that it comes from."""

    policy: Policy
    pattern: str = ""


def _wish(saved: SavedActivation, settings: Settings) -> _Wish:
    override = find_override(settings.overrides, saved)
    pattern = override[0] if override else ""
    name = saved.annotation or (override[1] if override else None)
    return _Wish(settings.policy if name is None else policy_of(name), pattern)


def _units(saved: tuple[SavedActivation, ...], shared: Mapping[str, str | None]) -> list[list[SavedActivation]]:
    """Tensors that are chosen for together: the views of one storage."""
    groups: dict[str, list[SavedActivation]] = {}
    for one in saved:
        groups.setdefault(one.base if one.base in shared else one.name, []).append(one)
    return list(groups.values())


def _choose(
    unit: list[SavedActivation], wishes: dict[str, _Wish], settings: Settings, measure: Measure,
    shared: Mapping[str, str | None],
) -> list[Choice]:  # fmt: skip
    first = unit[0]
    node = first.base if first.base in shared else first.name
    spatial = len(unit) == 1 and any(use.spatial for use in first.uses)
    roles = frozenset(use.role for s in unit for use in s.uses) - {Role.DECISION, Role.SIZE}
    pointwise = all(use.pointwise for s in unit for use in s.uses if use.role is Role.CONV_WEIGHT_GRAD)
    traits = Traits(all(s.sign_exact for s in unit), spatial, roles, pointwise=pointwise, upper=first.upper)
    before = sum(s.nbytes for s in unit)
    reason = _why_alone(unit, before, wishes[first.name], settings, shared)
    codec: Codec | None = None
    after = before
    refused = ""
    candidates, note = ([], reason) if reason else _candidates(unit, wishes[first.name].policy)
    for candidate in candidates:
        measured = measure(node, candidate, traits)
        if isinstance(measured, int) and measured < before:
            codec, after = candidate, measured
            break
        refused = refused or (
            measured if isinstance(measured, str) else f"{candidate.name} would make {measured} bytes of its {before}"
        )
    reason = (refused or note) if codec is None or codec is not candidates[0] or note else ""
    name = codec.name if codec else None
    return [
        Choice(s, name, traits, reason, (after if s is first else 0) if codec else s.nbytes, node if codec else s.name)
        for s in unit
    ]


def _why_alone(
    unit: list[SavedActivation], before: int, wish: _Wish, settings: Settings, shared: Mapping[str, str | None]
) -> str:
    first = unit[0]
    if first.kind is Kind.OUTPUT:
        return "the caller holds it: a user output or an alias of one"
    if first.kind in ALIVE_ANYWAY:
        return f"{first.kind.value} (or a view or cast of one): alive anyway"
    if wish.policy.values is None and not wish.policy.exact:
        return f"left alone by override {wish.pattern!r}" if wish.pattern else f"policy {wish.policy.name!r}"
    if first.kind in (Kind.STATISTIC, Kind.RANDOM):
        return f"a {first.kind.value} stays exact"
    if first.kind is Kind.OTHER:
        return f"{first.dtype} is left alone"
    if before == 0:
        return "it shares the storage of another saved tensor"
    if before < settings.min_bytes:
        return f"below min_bytes ({settings.min_bytes})"
    obstacle = shared.get(first.base)
    return obstacle or ""


def _candidates(unit: list[SavedActivation], policy: Policy) -> tuple[list[Codec], str]:
    """The codecs that the policy has for such tensors, in its order; and why there is none, or not the one asked for."""
    first = unit[0]
    if first.kind in (Kind.MASK, Kind.INDEX):
        if not policy.exact:
            return [], f"policy {policy.name!r} doesn't pack masks and indices"
        return [CODECS["bits" if first.kind is Kind.MASK else "narrow"]], ""
    if policy.values is None:
        return [], f"policy {policy.name!r} keeps values exact"
    strictest = max((use for s in unit for use in s.uses), key=lambda use: MIN_BITS[use.role], default=None)
    needed = MIN_BITS[strictest.role] if strictest else 1
    if strictest is not None and needed >= EXACT_BITS:
        return [], strictest.reason or strictest.role.value
    names = dict.fromkeys((policy.values, *policy.fallbacks))
    enough = [codec for codec in map(codec_named, names) if codec.bits is not None and codec.bits >= needed]
    if strictest is None or (enough and enough[0].name == policy.values):
        return enough, ""
    return enough, f"{policy.values} has too few bits for: {strictest.role.value}"


def _settle_decisions(boundary: Boundary, choices: dict[str, Choice], settings: Settings) -> tuple[Pin, ...]:
    """Pin the decisions that lossy values would change; keep the values exact where a decision can't be pinned.

    Keeping one value exact may free another one's decisions, so this runs to a fixed point.
    """
    while True:
        lossy = {name for name, choice in choices.items() if choice.codec and codec_named(choice.codec).bits is not None}
        needed = [d for d in boundary.decisions if lossy.intersection(d.sources) and not _sign_exact(d, choices)]
        stuck = [d for d in needed if d.bits is None] or _too_dear(needed, lossy, choices)
        if not stuck:
            break
        for decision in stuck:
            for name in lossy.intersection(decision.sources):
                why = decision.obstacle or "its packed decisions and codes would take more than it does"
                _keep(choices, name, f"decision {decision.op} can't be pinned: {why}")
    pinned = {d.name: d for d in needed}
    pinned.update(_drop_decided(boundary, choices, settings, pinned))
    return tuple(_pin(d) for d in boundary.decisions if d.name in pinned)


def _sign_exact(decision: Decision, choices: dict[str, Choice]) -> bool:
    choice = choices.get(decision.sign_of or "")
    return choice is not None and choice.traits.sign_exact and choice.codec is not None and codec_named(choice.codec).keeps_sign


def _pin(decision: Decision) -> Pin:
    return Pin(decision, "bits" if decision.bits == 1 else "ternary")


def _too_dear(needed: list[Decision], lossy: set[str], choices: dict[str, Choice]) -> list[Decision]:
    """Decisions whose bits, with the codes of the value they are taken from, outweigh the value itself."""
    for name in lossy:
        mine = [d for d in needed if name in d.sources]
        before = sum(c.saved.nbytes for c in choices.values() if c.unit == choices[name].unit)
        after = sum(c.nbytes for c in choices.values() if c.unit == choices[name].unit)
        if mine and before and after + sum(d.nbytes for d in mine) >= before:
            return mine
    return []


def _keep(choices: dict[str, Choice], name: str, reason: str) -> None:
    """Save a tensor, and whatever is compressed together with it, as it is."""
    unit = choices[name].unit
    for other, choice in choices.items():
        if choice.unit == unit and choice.codec is not None:
            choices[other] = replace(choice, codec=None, reason=reason, nbytes=choice.saved.nbytes, unit=choice.saved.name)


def _drop_decided(
    boundary: Boundary, choices: dict[str, Choice], settings: Settings, pinned: Mapping[str, Decision]
) -> dict[str, Decision]:
    """Values that backward reads for decisions alone: save the decisions instead, which loses nothing."""
    extra: dict[str, Decision] = {}
    for name, choice in choices.items():
        mine = [d for d in boundary.decisions if name in d.sources]
        if not mine or not _only_decides(choice) or any(d.bits is None for d in mine):
            continue
        cost = sum(d.nbytes for d in mine if d.name not in {**pinned, **extra})
        too_small = choice.saved.nbytes < settings.min_bytes and cost
        if not _wish(choice.saved, settings).policy.exact or too_small or cost >= choice.nbytes:
            continue
        extra.update({d.name: d for d in mine})
        choices[name] = replace(
            choice, codec=None, nbytes=0, dropped=True, reason="backward only takes decisions from it; they are pinned"
        )
    return extra


def _only_decides(choice: Choice) -> bool:
    ours = choice.saved.kind in (Kind.ACTIVATION, Kind.STATISTIC) and choice.unit == choice.saved.name
    return ours and {use.role for use in choice.saved.uses} == {Role.DECISION}

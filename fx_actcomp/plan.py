"""Stage 3: saved activations + policy + overrides -> a plan. It chooses and gives reasons; it never edits a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .choice import Choice, Measure, Plan
from .codecs import CODECS, Codec, Traits, codec_named
from .options import Settings
from .overrides import find_override
from .policy import Policy, policy_of
from .records import ALIVE_ANYWAY, EXACT_BITS, MIN_BITS, Image, Kind, Normalized, Role, SavedActivation
from .saved import Boundary
from .settle import settle_decisions
from .share import share_images, share_inverted, share_rectified


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
    norms = {norm.name: norm for norm in boundary.norms}
    choices = [_choose(unit, wishes, settings, measure, shared, norms) for unit in _units(boundary.saved, shared)]
    flat = {choice.saved.name: choice for group in choices for choice in group}

    def ours(saved: SavedActivation, wish: _Wish | None = None) -> bool:
        """Whether the policy may do with the tensor, alone, what it likes."""
        wish = wish or wishes[saved.name]
        return saved.base not in shared and not _why_alone([saved], saved.nbytes, wish, settings, shared)

    def inverted(saved: SavedActivation, asks: SavedActivation) -> bool:
        told = asks is not saved and (wishes[saved.name].pattern or saved.annotation)  # something else, of its own
        return wishes[asks.name].policy.invert and not told and ours(saved, wishes[asks.name])

    def wished(saved: SavedActivation) -> str | None:
        codecs, _ = _candidates([saved], wishes[saved.name].policy)
        return codecs[0].name if codecs and ours(saved) else None

    def shared_image(image: Image) -> bool:
        policy = wishes[image.name].policy
        return (policy.images if image.affine else policy.invert) and ours(flat[image.name].saved)

    def droppable(choice: Choice, cost: int) -> bool:
        return wishes[choice.saved.name].policy.exact and (choice.saved.nbytes >= settings.min_bytes or not cost)

    share_rectified(boundary, flat, wished)
    share_images(boundary, flat, shared_image)
    share_inverted(boundary, flat, inverted, measure)
    pins = settle_decisions(boundary, flat, droppable)
    matched = frozenset(wish.pattern for wish in wishes.values() if wish.pattern)
    return Plan(settings.policy.name, tuple(flat[saved.name] for saved in boundary.saved), pins, matched)


_MOVES = {"prims.device_put", "ao.wait_tensor"}
"""What torch's activation offloading puts behind a saved tensor, synchronously or on a stream of its own."""


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
    shared: Mapping[str, str | None], norms: Mapping[str, Normalized],
) -> list[Choice]:  # fmt: skip
    first = unit[0]
    node = first.base if first.base in shared else first.name
    spatial = len(unit) == 1 and any(use.spatial for use in first.uses)
    roles = frozenset(use.role for s in unit for use in s.uses) - {Role.DECISION, Role.SIZE}
    pointwise = all(use.pointwise for s in unit for use in s.uses if use.role is not Role.DECISION)
    traits = Traits(
        sign_exact=all(s.sign_exact for s in unit), spatial=spatial, roles=roles, pointwise=pointwise,
        shares=all(s.shares for s in unit), upper=first.upper, normed=node in norms,
    )  # fmt: skip
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
    if codec is None:
        return [Choice(s, None, traits, reason, s.nbytes, s.name) for s in unit]
    norm = norms[node] if codec.referenced else None
    after += norm.nbytes if norm else 0
    return [Choice(s, codec.name, traits, reason, after if s is first else 0, node, norm=norm) for s in unit]


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
    if first.kind in (Kind.STEP, Kind.STATISTIC, Kind.RANDOM):
        return f"a {first.kind.value} stays exact"
    if first.kind is Kind.OTHER:
        return f"{first.dtype} is left alone"
    if first.op in _MOVES:
        return "torch offloads it already"  # and may still be copying: it isn't to be read before backward waits for it
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

"""Part of stage 3: decisions are exact. Lossy values have theirs pinned in forward, or aren't lossy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .choice import Choice, Pin
from .codecs import codec_named
from .records import Decision, Kind, Role
from .saved import Boundary


def settle_decisions(boundary: Boundary, choices: dict[str, Choice], droppable: Callable[[Choice, int], bool]) -> tuple[Pin, ...]:
    """Pin the decisions that lossy values would change; keep the values exact where a decision can't be pinned.

    Keeping one value exact may free another one's decisions, so this runs to a fixed point.

    Args:
        boundary: What is saved.
        choices: By name; changed where a value has to be kept exact, or isn't needed any more.
        droppable: Whether the policy lets a tensor's decisions, at a cost in bytes, stand in for it.

    Returns:
        The decisions that move to forward.
    """
    while True:
        lossy = {name for name, choice in choices.items() if choice.moves_decisions}
        unread = _unread(choices)
        taken = [d for d in boundary.decisions if d.name not in unread and lossy.intersection(d.sources)]
        needed = [d for d in taken if not _sign_exact(d, choices)]
        stuck = [(name, d) for d in needed if d.bits is None for name in d.sources if name in lossy]
        stuck = stuck or _too_dear(needed, lossy, choices)
        if not stuck:
            break
        for name, decision in stuck:
            why = decision.obstacle or "its packed decisions and codes would take more than it does"
            _keep(choices, name, f"decision {decision.op} can't be pinned: {why}")
    pinned = {d.name: d for d in needed}
    pinned.update(_drop_decided(boundary, choices, droppable, pinned))
    return tuple(_pin(d) for d in boundary.decisions if d.name in pinned)


def _unread(choices: Mapping[str, Choice]) -> set[str]:
    """Nodes of backward that a derivative taken from the output replaces, decisions among them."""
    inversions = [choice.inversion for choice in choices.values() if choice.inversion is not None]
    return {name for inversion in inversions if inversion.derivative is not None for name in inversion.derivative.inside}


def _sign_exact(decision: Decision, choices: dict[str, Choice]) -> bool:
    choice = choices.get(decision.sign_of or "")
    if choice is None or choice.codec is None or not choice.traits.sign_exact:
        return False
    codec = codec_named(choice.codec)
    return codec.keeps_sign and (choice.rectified or not codec.referenced)  # of a norm's input it keeps no sign


def _pin(decision: Decision) -> Pin:
    return Pin(decision, "bits" if decision.bits == 1 else "ternary")


def _too_dear(needed: list[Decision], lossy: set[str], choices: dict[str, Choice]) -> list[tuple[str, Decision]]:
    """Values that their own codes outweigh, with the bits of the decisions taken from them; and the first of these each.

    Each is judged alone, whatever becomes of the others that a decision is taken from: so their order doesn't matter.
    """
    found = []
    for name in (name for name in choices if name in lossy):
        mine = [d for d in needed if name in d.sources]
        before = sum(c.saved.nbytes for c in choices.values() if c.unit == choices[name].unit)
        after = sum(c.nbytes for c in choices.values() if c.unit == choices[name].unit)
        if mine and before and after + sum(d.nbytes for d in mine) >= before:
            found.append((name, mine[0]))
    return found


def _keep(choices: dict[str, Choice], name: str, reason: str) -> None:
    """Save a tensor, and whatever is compressed or made again together with it, as it is."""
    unit = choices[name].unit
    for other, choice in choices.items():
        if choice.unit == unit and (choice.codec is not None or choice.image is not None):
            choices[other] = replace(
                choice, codec=None, reason=reason, nbytes=choice.saved.nbytes, unit=choice.saved.name, norm=None, image=None,
                inversion=None,
            )  # fmt: skip


def _drop_decided(
    boundary: Boundary, choices: dict[str, Choice], droppable: Callable[[Choice, int], bool], pinned: Mapping[str, Decision]
) -> dict[str, Decision]:
    """Values that backward reads for decisions alone: save the decisions instead, which loses nothing."""
    extra: dict[str, Decision] = {}
    images = [choice.image for choice in choices.values() if choice.image is not None]
    needed = {name for image in images for name in (image.source, *image.carried)}
    needed |= {choice.inversion.source for choice in choices.values() if choice.inversion is not None}
    for name, choice in choices.items():
        mine = [d for d in boundary.decisions if name in d.sources]
        if not mine or not _only_decides(choice) or any(d.bits is None for d in mine):
            continue
        cost = sum(d.nbytes for d in mine if d.name not in {**pinned, **extra})
        if cost >= choice.nbytes or not droppable(choice, cost) or name in needed:
            continue
        extra.update({d.name: d for d in mine})
        choices[name] = replace(
            choice, codec=None, nbytes=0, dropped=True, reason="backward only takes decisions from it; they are pinned"
        )
    return extra


def _only_decides(choice: Choice) -> bool:
    ours = choice.saved.kind in (Kind.ACTIVATION, Kind.STEP, Kind.STATISTIC) and choice.unit == choice.saved.name
    return ours and {use.role for use in choice.saved.uses} == {Role.DECISION}

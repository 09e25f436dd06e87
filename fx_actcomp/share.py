"""Part of stage 3: one tensor replaces two, where the second can be made again from the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .choice import Choice, Measure
from .codecs import CODECS, codec_named
from .records import Image, Role, SavedActivation
from .saved import Boundary

_ALONE = "no saved tensor is an invertible function of it; where torch recomputes that one, saving it would gain nothing"
Wanted = Callable[[SavedActivation, SavedActivation], bool]
Takes = Callable[[SavedActivation], str | None]
"""The codec that the policy has for a tensor and that bears its uses; None where it is to be left alone."""


def share_rectified(boundary: Boundary, choices: dict[str, Choice], wished: Takes) -> None:
    """Let the codes of a batch norm's input serve for the ReLU of its output, where both are to have that codec."""
    for norm in boundary.norms:
        source, rectified = choices[norm.name], choices.get(norm.rectified or "")
        if rectified is None or source.norm is None or wished(rectified.saved) != source.codec:
            continue
        choices[norm.name] = replace(source, traits=replace(source.traits, rectified=True))
        choices[rectified.saved.name] = Choice(
            rectified.saved, source.codec, replace(source.traits, rectified=True, sign_exact=True),
            f"made again from the codes of {norm.name}", 0, source.unit, norm=norm,
        )  # fmt: skip


def share_images(boundary: Boundary, choices: dict[str, Choice], shared: Callable[[Image], bool]) -> None:
    """Make an image of saved tensors again in backward, instead of saving it.

    Args:
        boundary: What is saved.
        choices: By name; changed for the images.
        shared: Whether the policy asks for that, and may touch the tensor at all.
    """
    counted: set[str] = set()
    needed: set[str] = set()
    for image in boundary.images:
        source, mine = choices[image.source], choices[image.name]
        read = [choices[name] for name in (image.source, *image.carried) if name in choices]
        if image.name in needed or (not image.affine and not all(map(_exact, read))):
            continue
        bits = codec_named(source.codec).bits if source.codec else None
        too_few = bits is not None and bits < mine.saved.min_bits
        if mine.norm or source.image or source.rectified or source.unit != source.saved.name or too_few or not shared(image):
            continue
        how = f"the {source.codec} codes of {image.source}" if source.codec else image.source
        how += f" and {len(read) - 1} more" if len(read) > 1 and not image.affine else ""
        nbytes = sum(nbytes for name, nbytes in image.extra if name not in counted)
        counted.update(name for name, _ in image.extra)
        needed.update((image.source, *image.carried))
        choices[image.name] = replace(
            mine, codec=source.codec, reason=f"made again from {how}", nbytes=nbytes, unit=source.unit, image=image
        )


def share_inverted(boundary: Boundary, choices: dict[str, Choice], wanted: Wanted, measure: Measure) -> None:
    """Restore the input of an invertible function from its output, where that is saved exactly.

    Args:
        boundary: What is saved.
        choices: By name; changed for the inputs.
        wanted: Whether the policy of the second one asks for that, and may touch the first.
        measure: Bytes of a codec on a node.
    """
    images = [choice.image for choice in choices.values() if choice.image]
    sources = {name for image in images for name in (image.source, *image.carried)}
    names = {inversion.name for inversion in boundary.inversions}
    for name, choice in choices.items():
        bent = any(use.role is Role.NONLINEAR for use in choice.saved.uses)
        if bent and name not in names and _exact(choice) and wanted(choice.saved, choice.saved):
            choices[name] = replace(
                choice, reason="no saved tensor is an invertible function of it (torch may recompute that one)"
            )
    for inversion in boundary.inversions:
        mine, output = choices[inversion.name], choices[inversion.source]
        asked = wanted(mine.saved, mine.saved) or wanted(mine.saved, output.saved)
        if not asked or not _exact(output) or not _exact(mine) or mine.saved.name in sources:
            continue
        traits = replace(mine.traits, inverse=inversion.inverse)
        nbytes = measure(mine.saved.name, CODECS["invert"], traits)
        if isinstance(nbytes, int) and nbytes < mine.saved.nbytes:
            what = "its derivative taken" if inversion.derivative else "restored"
            reason = f"{what} from {inversion.source}, {inversion.inverse} of it"
            choices[mine.saved.name] = replace(
                mine, codec="invert", traits=traits, reason=reason, nbytes=nbytes, inversion=inversion
            )
            sources.add(inversion.source)


def _exact(choice: Choice) -> bool:
    """Whether the tensor is saved, as it is."""
    return choice.codec is None and choice.image is None and not choice.dropped

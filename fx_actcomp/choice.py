"""What the planning stage gives to the rewriting one: plain, frozen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .codecs import Codec, Traits, codec_named
from .records import Decision, Image, Inversion, Normalized, SavedActivation


@dataclass(frozen=True)
class Choice:
    """What becomes of one saved tensor.

    Attributes:
        saved: The tensor.
        codec: Name of the codec; None where it is saved as it is, or not at all.
        traits: What the codec may build on.
        reason: Why it is left alone, or why another codec was taken than the one asked for; empty where neither.
        nbytes: Bytes that it takes now.
        unit: Name of the forward node that is compressed: the tensor itself, or the base that several views share, or the
            tensor that this one is made again from.
        dropped: Whether it is not saved at all, since its decisions are pinned and nothing else reads it.
        norm: The batch norm whose statistics a referenced codec builds on.
        image: How it is made again from other saved tensors; then it isn't saved itself.
        inversion: The saved function of it that it is restored from.
    """

    saved: SavedActivation
    codec: str | None
    traits: Traits
    reason: str
    nbytes: int
    unit: str
    dropped: bool = False
    norm: Normalized | None = None
    image: Image | None = None
    inversion: Inversion | None = None

    @property
    def lossy(self) -> bool:
        """Whether it comes back changed."""
        return self.codec is not None and codec_named(self.codec).bits is not None

    @property
    def moves_decisions(self) -> bool:
        """Whether a decision that backward takes from it might come out otherwise: a compiler may round a repetition anew."""
        return self.lossy or (self.image is not None and not self.image.affine)

    @property
    def rectified(self) -> bool:
        """Whether it is the ReLU that comes back from the code of its batch norm's input."""
        return self.norm is not None and self.norm.rectified == self.saved.name


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
        draws: Random tensors that torch's partitioner would have drawn anew in backward, and that are saved instead.
        copies: Tensors of which a copy is saved, since forward overwrites them.
        repeating: Random tensors among whose numbers torch's kernels may repeat some.
        offloaded: Bytes of what is saved that torch's offloading moves to host memory.
    """

    policy: str
    choices: tuple[Choice, ...]
    pins: tuple[Pin, ...]
    matched: frozenset[str]
    draws: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    repeating: tuple[str, ...] = ()
    offloaded: int = 0


Measure = Callable[[str, Codec, Traits], int | str]
"""Bytes that a codec makes of a forward node, by its name, or the reason why it doesn't fit."""

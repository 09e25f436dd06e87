"""A policy is data: which codec values take, and whether masks and indices are packed."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .codecs import CODECS, Spec, codec_named, codec_spec


@dataclass(frozen=True)
class Policy:
    """How saved activations are saved, unless an override or an annotation says otherwise.

    It compares, hashes, prints, and goes to a dict and back.

    Attributes:
        name: What a report calls it.
        values: Codec for floating-point values, with its parameters (see :func:`fx_actcomp.codecs.codec_spec`); None leaves
            them alone. Where a use asks for more bits than the codec has, the next codec of ``fallbacks`` that has them is
            taken.
        exact: Whether masks are packed, indices narrowed and values that only serve decisions replaced by these, all of
            which changes no bit of any gradient.
        fallbacks: Codecs for uses that ask for more bits, fewest bits first.
        images: Whether a norm's output is made again from its saved input or x-hat, instead of being saved beside it.
        invert: Whether the input of an invertible function is restored from its saved output, and a product of saved
            tensors (SwiGLU) is made again from these.
    """

    name: str
    values: str | None = None
    exact: bool = True
    fallbacks: tuple[str, ...] = ("int8",)
    images: bool = False
    invert: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", None if self.values is None else codec_spec(self.values))
        object.__setattr__(self, "fallbacks", tuple(map(codec_spec, self.fallbacks)))
        for codec in (self.values, *self.fallbacks):
            if codec is not None and codec_named(codec).bits is None:
                lossy = [name for name, known in CODECS.items() if known.bits is not None]
                raise ValueError(f"codec {codec!r} is for masks and indices; for values there are: {', '.join(sorted(lossy))}")

    def to_dict(self) -> dict[str, object]:
        """Plain data for a file."""
        return {**dataclasses.asdict(self), "fallbacks": list(self.fallbacks)}

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Policy:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: A key or a value is not one of a policy's; the message lists what there is.
        """
        kinds: dict[str, tuple[type, ...]] = {
            "name": (str,), "values": (str, dict, type(None)), "exact": (bool,), "fallbacks": (list, tuple),
            "images": (bool,),
            "invert": (bool,),
        }  # fmt: skip
        for key, given in data.items():
            if key not in kinds:
                raise ValueError(f"unknown policy key {key!r}; there are: {', '.join(kinds)}")
            if not isinstance(given, kinds[key]):
                raise ValueError(f"policy key {key!r} is {given!r}; expected {' or '.join(k.__name__ for k in kinds[key])}")
        for codec in _sequence(data.get("fallbacks", ())):
            if not isinstance(codec, (str, Mapping)):
                raise ValueError(f"unknown codec {codec!r} in 'fallbacks'; there are: {', '.join(sorted(CODECS))}")
        known = {**data, "fallbacks": tuple(_sequence(data.get("fallbacks", ("int8",))))}
        return Policy(**{"name": "custom", **known})  # type: ignore[arg-type] # checked above


def _sequence(given: object) -> list[object]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


POLICIES: dict[str, Policy] = {
    "none": Policy("none", exact=False),
    "lossless": Policy("lossless"),
    "int8": Policy("int8", "int8"),
    "int4": Policy("int4", "int4"),
    "int2": Policy("int2", "int2"),
    "fp8": Policy("fp8", "fp8"),
    "pool2": Policy("pool2", "pool2", fallbacks=()),
    "pool4": Policy("pool4", "pool4", fallbacks=()),
    "division": Policy("division", "division"),
    "blpa8": Policy("blpa8", "blpa8", images=True),
    "blpa4": Policy("blpa4", "blpa4", fallbacks=("int4", "int8"), images=True),
    "invert": Policy("invert", images=True, invert=True),
}
"""The presets, by name."""


def policy_of(codec: Spec) -> Policy:
    """The policy of a preset's or codec's name: that preset, with the parameters that the name carries; or the codec's own.

    Raises:
        TypeError: A dict isn't a codec's.
        ValueError: The name or a parameter is unknown; the message lists what there is.
    """
    if isinstance(codec, str) and codec in POLICIES:
        return POLICIES[codec]
    spec = codec_spec(codec)
    preset = POLICIES.get(spec.partition(":")[0])
    if preset is not None:
        return preset if spec == preset.name else dataclasses.replace(preset, name=spec, values=spec)
    return Policy(spec, spec if codec_named(spec).bits is not None else None)


def policy_named(given: Spec | os.PathLike[str] | Policy) -> Policy:
    """A preset's or codec's name, a path to a ``.toml`` or ``.json`` policy file, or a policy itself -> the policy.

    Raises:
        TypeError: A dict isn't a codec's.
        ValueError: There is no such preset (the message lists them), or the file isn't a policy.
        FileNotFoundError: There is no such file.
    """
    if isinstance(given, Policy):
        return given
    if isinstance(given, Mapping) or (isinstance(given, str) and given.partition(":")[0] in {*POLICIES, *CODECS}):
        return policy_of(given)
    path = Path(given)
    if path.suffix not in (".toml", ".json"):
        raise ValueError(
            f"unknown policy {str(given)!r}; there are: {', '.join({**POLICIES, **CODECS})}, a Policy, or a path to a .toml or "
            ".json file"
        )
    content = path.read_bytes()
    try:
        text = content.decode()
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"policy file {path} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"policy file {path} holds {type(data).__name__}; expected a table with the keys of a policy")
    return Policy.from_dict({"name": path.stem, **data})

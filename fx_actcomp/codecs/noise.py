"""Random numbers that are a function of position, tensor and step: a pass over the data needs no state and no generator.

torch's own generators are the user's: drawing from them would change dropout. A number here is an integer hash of the
element's position, the tensor's salt and a step counter, so that it can be made anywhere, in any order, by any compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B  # below 2**27: the product with 32 bits stays inside int64, where overflow would be undefined
_GOLDEN = 0x9E3779B1  # 2**32 over the golden ratio: neighbouring steps land far apart


@dataclass(frozen=True)
class Noise:
    """The source of one tensor's random numbers.

    Attributes:
        step: 0-d int64, another number at each call of forward.
        salt: A number of the tensor's own.
    """

    step: Tensor
    salt: int

    def uniform(self, x: Tensor) -> Tensor:
        """fp32 numbers in [0, 1), multiples of 2**-24, one for each element of ``x``, independent of its values."""
        index = torch.zeros((), dtype=torch.int64, device=x.device)
        for d, size in enumerate(x.shape):
            place = torch.arange(size, dtype=torch.int64, device=x.device)
            index = index * size + place.view(*[1] * d, size, *[1] * (x.dim() - 1 - d))
        # the key is hashed on its own first: positions and steps that differ by the same amount mustn't meet
        key = _mix((self.step * _GOLDEN + self.salt) & _MASK)
        return (_mix((index & _MASK) ^ key) >> 8).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, each of which depends on all (T. Mueller's hash: two rounds of shift, xor and multiply)."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _MULTIPLIER) & _MASK
    return x ^ (x >> 16)

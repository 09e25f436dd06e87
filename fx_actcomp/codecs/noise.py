"""Random numbers that are a function of position, tensor and step: a pass over the data needs no state and no generator.

torch's own generators are the user's: drawing from them would change dropout. A number here is an integer hash of the
element's position, the tensor's salt and a step counter, so that it can be made anywhere, in any order, by any compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIER = 0x45D9F3B
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
        index = torch.zeros((), dtype=torch.int32, device=x.device)  # 32 bits: no CPU multiplies vectors of 64 well
        for d, size in enumerate(x.shape):
            place = torch.arange(size, dtype=torch.int32, device=x.device)
            index = index * size + place.view(*[1] * d, size, *[1] * (x.dim() - 1 - d))
        # the key is hashed on its own first: positions and steps that differ by the same amount mustn't meet
        low = (self.step % 2**31 * _GOLDEN + self.salt) % 2**32
        key = _mix((low - 2**31).to(torch.int32))
        return ((_mix(index ^ key) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, each of which depends on all (T. Mueller's hash: two rounds of shift, xor and multiply).

    Products wrap, as torch's int32 does with every compiler; the masks make arithmetic shifts logical ones.
    """
    for _ in range(2):
        x = (x ^ ((x >> 16) & 0xFFFF)) * _MULTIPLIER
    return x ^ ((x >> 16) & 0xFFFF)

"""Round the noisy sum to a grid that does not depend on the records.

**The problem.** A float32 sum of signal and noise can take values that noise alone cannot take:
noise is computed from 32-bit uniforms, and ``fl(s + w)`` has other low bits than ``fl(w)``. Without
the one record that touches it, an embedding row is pure noise. So a single value that noise cannot
reach proves that the record was present, whatever epsilon is (Mironov, 2012). Rounding the noisy
sum to multiples of g removes those bits.

**Guarantee.** Let s be the clipped, mapped sum and w the noise, both divided by the expected batch
size, v = fl(s + w) the computed noisy sum, and ``r = g · round(v / g)`` the released value. Let τ
be the standard deviation of w given everything released before: the noise scale, divided by the
diagonal entry of the strategy matrix, which is 1 for independent noise and at most `DIAGONAL` for
correlated noise. g is a power of two, at most τ / 64, and a function of the plan alone.

1. *The grid is public.* g depends on noise multiplier, clip, sensitivity, expected batch size and,
   for correlated noise, the number of steps, and on no record. Division and multiplication by a
   power of two are exact, so r is a multiple of g.
2. *Rounding costs no privacy.* r is a function of v, so a bound for the release of v holds for r
   (post-processing). The same holds after the cast of r to the parameter's dtype, the map after
   the noise, and the optimizer.
3. *The set of reachable values does not depend on s.* Between -8τ and 8τ the values that w can take
   are at most 2⁻¹⁷ τ apart: the float32 angle of Box-Muller has a spacing of at most 2⁻²¹, is
   multiplied by a radius below 9.5, and the product is rounded to 24 bits (on the CPU and on other
   devices alike, see `dpkfc.normals`). Adding s rounds to the
   spacing of floats near v, at most g/4 for ``|v| < 2²² g``, that is at least 32,000 τ for
   independent noise. So two neighbouring reachable v differ by less than g, no cell of the grid is
   skipped, and *every* multiple of g within 8τ of s is reachable. A value that is reachable from s
   and not from the sum s' of a neighbouring data set is more than 8τ from s', and so more than
   8τ - |s - s'| from s, with |s - s'| ≤ τ/σ: for σ ≥ 1 at least 7τ, a probability below 3e-12 per
   coordinate and step. (For ``|v| ≥ 2²² g``, floats near v are about as coarse as the grid, and w
   is fine enough to reach all of them.)
4. *The probabilities are those of the Gaussian mechanism up to rounding.* A cell has the
   probability that ``s + w`` falls between two bounds, each of which is displaced by at most
   η = 2⁻²¹ max(|v|, ρτ), ρ the radius of Box-Muller, by the rounding of w and of the sum. So the
   probability of each cell is that of the exact Gaussian mechanism times ``1 ± 2η/g``, about
   1 ± 2⁻¹³ for |v| and ρτ around τ. This factor is not part of epsilon. Its sign depends on the
   lowest bits of s. Against an attacker who knows all other records to the last bit, its expected
   cost is about ½ (2η/g)² = 2⁻²⁷ nats per coordinate that a record reaches and step that it joins:
   for 10⁷ coordinates and 10 steps 0.7 nats, for 10⁵ coordinates 0.007.

**Assumes** that the cipher's output cannot be distinguished from uniform bits, that float32
``log``, ``sqrt``, ``cos`` and ``sin`` are accurate to a few units in the last place, rounding to
nearest, and that the duration of a step is not observed.

Rounding adds a variance of g²/12, at most 2e-5 of the noise variance of a step. Correlated noise
cancels over the steps and rounding errors do not. So there g is smaller by √steps (at most 256),
and the errors of up to 65,536 steps together stay as small. The factor 2⁻¹³ of point 4 grows by the
same factor, and 2⁻²⁷ by its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FRACTION = 2.0**-6  # upper bound of the spacing, relative to the noise of one step
DIAGONAL = 2.0  # upper bound of the diagonal entries of every strategy matrix (tested for all)
MOST_STEPS = 2**16  # more steps do not refine the grid: point 3 needs a spacing above 2⁻¹⁷ τ


def spacing(noise: float, steps: int = 1) -> float:
    """The spacing g of the grid: the largest power of two up to ``FRACTION · noise / √steps``.

    Args:
        noise: τ, the standard deviation of the noise. 0 means no noise and no grid.
        steps: steps over which rounding errors add up; 1 for independent noise.

    >>> spacing(1.0), spacing(0.9), spacing(1.0, steps=100)
    (0.015625, 0.0078125, 0.0009765625)
    """
    if noise == 0:
        return 0.0
    _, exponent = math.frexp(noise * FRACTION / math.sqrt(min(steps, MOST_STEPS)))
    return math.ldexp(1.0, exponent - 1)


def round_to_grid_(tensors: Iterable[Tensor], grid: float) -> None:
    """Round every entry to the nearest multiple of `grid`, in place. A grid of 0 changes nothing.

    >>> import torch
    >>> x = torch.tensor([0.3, -0.3, 7.77])
    >>> round_to_grid_([x], 0.25)
    >>> x
    tensor([ 0.2500, -0.2500,  7.7500])
    """
    if grid:
        for tensor in tensors:
            tensor.mul_(1 / grid).round_().mul_(grid)

"""One per-sample gradient for a parameter that was used several times."""

from __future__ import annotations

import torch

from dpkfc.per_sample.base import IDENTITY_MAP, LinearMap, PerSampleGrad
from dpkfc.per_sample.dense import DenseGrad
from dpkfc.per_sample.outer import OuterProductGrad
from dpkfc.per_sample.rows import RowSparseGrad, TiedEmbeddingGrad


def combine(grads: list[PerSampleGrad], preconditioner: LinearMap = IDENTITY_MAP) -> PerSampleGrad:
    """The sum over all uses of a parameter, with its cross terms: ``‖g + h‖² ≠ ‖g‖² + ‖h‖²``.

    Uses of the same layer are joined along the shared positions; an embedding and the head tied to
    it through the products of their rows; anything else by forming the gradients.
    """
    if len(grads) == 1:
        return grads[0]
    outers = [grad for grad in grads if isinstance(grad, OuterProductGrad)]
    rows = [grad for grad in grads if isinstance(grad, RowSparseGrad)]
    orientations = {outer.transposed for outer in outers}
    mapped = {grad.preconditioned for grad in grads}
    if len(outers) == len(grads) and len(orientations) == 1 and len(mapped) == 1:
        return OuterProductGrad.concat(outers)
    if any(mapped):  # for example one position in one use, several in another
        each = [
            grad.per_sample() if grad.preconditioned else preconditioner.apply(grad.per_sample())
            for grad in grads
        ]
        sums = [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]
        return DenseGrad(sums, preconditioned=True)
    if len(rows) == len(grads):
        return RowSparseGrad.concat(rows)
    if len(outers) + len(rows) == len(grads) and orientations == {False}:
        return TiedEmbeddingGrad(OuterProductGrad.concat(outers), RowSparseGrad.concat(rows))
    each = [grad.per_sample() for grad in grads]
    return DenseGrad([torch.stack(parts).sum(0) for parts in zip(*each, strict=True)])

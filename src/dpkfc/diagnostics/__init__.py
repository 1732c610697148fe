"""Measurements on your own model: the effect of clipping, noise and geometry, layer by layer.

Every function works on a copy of the model. Weights, buffers, `.grad`, modes and the global random
generators stay as they were, also in the middle of a private run. The field `privacy` of every
result says whether it may be published: epsilon does not cover what is computed from records.

- `layer_snr`: signal and noise of one private step (Figure 1 of the paper);
- `clip_effect`: the effect of clipping on given records;
- `kronecker_spectrum`: eigenvalues of ``A ⊗ G`` from several sources (Figures 2 and 6);
- `factor_alignment`: agreement of the factors of different sources (Figures 3, 8 and 9);
- `hessian_density`: the spectrum of the Hessian itself, by Lanczos quadrature (Figure 7).
"""

from dpkfc.diagnostics.alignment import Alignment, FactorAlignment, factor_alignment
from dpkfc.diagnostics.clip import ClipEffect, Clipping, clip_effect
from dpkfc.diagnostics.lanczos import HessianDensity, Quadrature, hessian_density
from dpkfc.diagnostics.snr import SNR, LayerSNR, layer_snr
from dpkfc.diagnostics.spectrum import LayerSpectrum, Spectra, kronecker_spectrum

__all__ = [
    "SNR",
    "Alignment",
    "ClipEffect",
    "Clipping",
    "FactorAlignment",
    "HessianDensity",
    "LayerSNR",
    "LayerSpectrum",
    "Quadrature",
    "Spectra",
    "clip_effect",
    "factor_alignment",
    "hessian_density",
    "kronecker_spectrum",
    "layer_snr",
]

"""Measurements on a user's own model: what clip, noise and geometry do to it, layer by layer.

Every function works on a copy of the model and leaves no trace: weights, buffers, `.grad`, modes, and the global
generators are as before, also in the middle of a private run. Every result says in `privacy` whether it may be
shown: what is computed from records is not covered by epsilon.

- `layer_snr`: signal and noise of one private step (Figure 1 of the paper);
- `clip_effect`: what clipping does to given records;
- `kronecker_spectrum`: eigenvalues of ``A ⊗ G`` from several sources (Figures 2 and 6);
- `factor_alignment`: how well the factors of one source agree with those of another (Figures 3, 8 and 9);
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

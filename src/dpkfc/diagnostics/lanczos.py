"""The spectrum of the Hessian or the Gauss-Newton matrix of a loss (Figure 7).

The method is stochastic Lanczos quadrature. m steps of Lanczos from a random unit vector v turn the
matrix H into a tridiagonal matrix T. The eigenvalues θ_k of T and the squared first entries ω_k of
its eigenvectors are the nodes and weights of a Gauss quadrature (Golub and Welsch):
``Σ_k ω_k f(θ_k) = vᵀ f(H) v`` exactly for polynomials f of degree up to 2m - 1. The mean over
several v estimates ``tr f(H) / d``, so nodes and weights together estimate the density of the
eigenvalues (Ghorbani et al., 2019).

H is only multiplied with vectors, by differentiating twice. Every new Lanczos vector is
orthogonalised twice against all earlier ones: without that, rounding errors bring back converged
directions as copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpkfc.diagnostics.passes import AnyLoss, Examples, copy_of
from dpkfc.diagnostics.result import DiagnosticResult, empty_table, is_probe, privacy_statement
from dpkfc.geometry.probing import Probing
from dpkfc.probes.arguments import check_integer, check_number
from dpkfc.probes.probe import call, to
from dpkfc.probes.targets import probe_losses
from dpkfc.tables import TextTable

Matrix = Literal["hessian", "ggn"]
Product = Callable[[Tensor], Tensor]
# A remainder below this share of ‖T‖ is zero: the vectors span the Krylov space of v.
EXHAUSTED = 1e-10


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of all start vectors together; the weights sum to 1."""

    nodes: tuple[float, ...]  # increasing
    weights: tuple[float, ...]
    size: int  # d, the number of eigenvalues

    def moment(self, power: int) -> float:
        """An estimate of ``tr(H^power) / d``."""
        return math.fsum(
            weight * node**power for node, weight in zip(self.nodes, self.weights, strict=True)
        )

    @property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest node: within the true spectrum, and near its ends."""
        return self.nodes[0], self.nodes[-1]

    @property
    def negative(self) -> float:
        """The share of ``Σ |λ|`` from negative eigenvalues.

        Their number says little, since most are close to 0.
        """
        sizes = [weight * abs(node) for node, weight in zip(self.nodes, self.weights, strict=True)]
        below = math.fsum(size for node, size in zip(self.nodes, sizes, strict=True) if node < 0)
        return below / math.fsum(sizes) if any(sizes) else 0.0

    def density(
        self, points: int = 512, width: float | None = None
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Positions, and the density there: each node is smoothed by a Gaussian.

        Args:
            points: number of positions.
            width: standard deviation of the Gaussian, 1% of the range by default.
        """
        check_integer("points", points, 2)
        low, high = self.extremes
        spread = 0.01 * (high - low) or 0.01 * max(abs(high), 1e-12)
        width = spread if width is None else check_number("width", width, above=0)
        positions = torch.linspace(low - 4 * width, high + 4 * width, points, dtype=torch.float64)
        nodes, weights = self._tensors()
        exponents = ((positions[:, None] - nodes) / width) ** 2
        gaussians = torch.exp(-exponents / 2) / (width * math.sqrt(2 * math.pi))
        return tuple(positions.tolist()), tuple((gaussians @ weights).tolist())

    def magnitudes(self, points: int = 256) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ranks from 1 to d, and the magnitudes of the eigenvalues at these ranks.

        Node k stands for d ω_k eigenvalues. Rank 1 is the largest node even if its weight is tiny:
        there is an eigenvalue at least as large.
        """
        check_integer("points", points, 2)
        nodes, weights = self._tensors()
        order = nodes.abs().argsort(descending=True)
        counts = self.size * weights[order].cumsum(0)
        exponents = torch.linspace(0, 1, points, dtype=torch.float64)
        ranks = (float(self.size) ** exponents).round().long().clamp(1, self.size).unique()
        index = torch.searchsorted(counts, ranks - 0.5).clamp(max=len(nodes) - 1)
        index[0] = 0
        return tuple(ranks.tolist()), tuple(nodes.abs()[order][index].tolist())

    def _tensors(self) -> tuple[Tensor, Tensor]:
        """Nodes and weights in float64."""
        nodes = torch.tensor(self.nodes, dtype=torch.float64)
        return nodes, torch.tensor(self.weights, dtype=torch.float64)


@dataclass(frozen=True)
class HessianDensity(DiagnosticResult):
    """The spectrum of the loss on every source."""

    matrix: Matrix
    sources: dict[str, Quadrature]
    steps: int
    vectors: int
    private_sources: tuple[str, ...]  # those that read records
    privacy: str

    def table(self) -> TextTable:
        name = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}[self.matrix]
        size = next(iter(self.sources.values())).size
        title = (
            f"Spectrum of the {name}: {size:,} eigenvalues, {self.vectors} vectors, "
            f"{self.steps} steps"
        )
        headings = ["smallest", "largest", "mean", "root mean square", "negative"]
        table = empty_table(title, self.privacy, ["source"], headings)
        for source, spectrum in self.sources.items():
            figures = (*spectrum.extremes, spectrum.moment(1), math.sqrt(spectrum.moment(2)))
            table.add_row(source, *(f"{x:.3g}" for x in figures), f"{spectrum.negative:.1%}")
        return table

    def plot(self, file: str | Path) -> None:
        """Write a plot of the density and the sorted magnitudes to `file`."""
        from dpkfc.diagnostics.plots import plot_density

        plot_density(self, Path(file))


def hessian_density(
    model: nn.Module,
    source: Any,
    *,
    loss: AnyLoss = "cross_entropy",
    matrix: Matrix = "hessian",
    steps: int = 64,
    vectors: int = 4,
    probes: int | None = None,
    seed: int = 0,
) -> HessianDensity:
    """The spectrum of the Hessian or the Gauss-Newton matrix of a loss, at the present weights.

    Args:
        model: stays unchanged.
        source: a batch of records, a probe, or several probes by name. All of it goes through the
            model at once, and the graph is kept: choose the batch accordingly.
        loss: ``(model, batch) -> scalar`` for records; for probes a probe loss, as in `KFC`, which
            is averaged.
        matrix: "hessian", or "ggn": ``Jᵀ (∇² of the loss in the outputs) J``, which has no negative
            eigenvalues if the loss is convex in the model's output.
        steps: m of Lanczos: products with the matrix per start vector.
        vectors: number of start vectors; the density is the mean over them.
        probes: number of probes; the default of the probe if not given.
        seed: of the probes and the start vectors.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import hessian_density
    >>> density = hessian_density(torch.nn.Linear(4, 2), dpkfc.probes.Tabular(4), steps=10)
    >>> density.sources["Gaussian features"].size
    10
    """
    if matrix not in ("hessian", "ggn"):
        raise ValueError(f"matrix={matrix!r}: must be 'hessian' or 'ggn'")
    check_integer("steps", steps, 1)
    check_integer("vectors", vectors, 1)
    if isinstance(source, Mapping) and source and all(map(is_probe, source.values())):
        named = dict(source)
    else:
        named = {source.name if is_probe(source) else "records": source}
    spectra = {}
    for name, examples_source in named.items():
        examples = Examples(examples_source, loss, "mean", probes, seed)
        with _products(copy_of(model), examples, matrix) as (product, like, size):
            spectra[name] = quadrature(product, size, steps, vectors, like, seed)
    private = tuple(name for name, x in named.items() if not is_probe(x) or not x.public)
    privacy = privacy_statement(named.values())
    return HessianDensity(matrix, spectra, steps, vectors, private, privacy)


def quadrature(
    product: Product, size: int, steps: int, vectors: int, like: Tensor, seed: int = 0
) -> Quadrature:
    """Nodes and weights for the symmetric matrix of `product`, from Gaussian start vectors.

    Args:
        product: v ↦ H v.
        size: d, the length of v.
        steps: m of Lanczos.
        vectors: number of start vectors.
        like: a tensor on the device of the products.
        seed: of the start vectors.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(vectors):
        start = torch.randn(size, generator=generator, dtype=torch.float64).to(like.device)
        diagonal, beside = tridiagonal(product, start, min(steps, size))
        matrix = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
        nodes, vectors_of_t = torch.linalg.eigh(matrix)
        parts.append((nodes, vectors_of_t[0].square() / vectors))  # ω_k: squared first entries
    nodes, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = nodes.argsort()
    return Quadrature(tuple(nodes[order].tolist()), tuple(weights[order].tolist()), size)


def tridiagonal(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """α and β of ``T = Vᵀ H V`` after at most `steps` steps of Lanczos, on the CPU.

    Everything is computed in float64 except the products.
    """
    basis = start.new_zeros(steps, len(start))
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for k in range(steps):
        image = product(basis[k]).to(start)
        alphas.append(float(image @ basis[k]))  # α_k = v_kᵀ H v_k
        if not math.isfinite(alphas[-1]):
            raise ValueError(
                "the product of the Hessian with a vector is not finite: the weights have "
                "diverged, or the loss has no second derivative at one of the examples"
            )
        # Two passes of Gram-Schmidt are enough (Parlett).
        for _ in range(2):
            image = image - basis[: k + 1].T @ (basis[: k + 1] @ image)
        beta = float(image.norm())  # β_k = ‖H v_k - α_k v_k - β_{k-1} v_{k-1}‖
        if k + 1 == steps or beta <= EXHAUSTED * max(map(abs, [*alphas, *betas])):
            break
        betas.append(beta)
        basis[k + 1] = image / beta
    return torch.tensor(alphas, dtype=torch.float64), torch.tensor(betas, dtype=torch.float64)


@contextmanager
def _products(
    model: nn.Module, examples: Examples, matrix: Matrix
) -> Iterator[tuple[Product, Tensor, int]]:
    """Yield v ↦ H v over all trainable parameters, one parameter (for its device), and d.

    The graph of one forward pass serves all products. Attention runs in its plain form, since the
    fused kernels cannot be differentiated twice.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            "the model has no trainable parameter: set requires_grad on the parameters of the "
            "Hessian"
        )
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    device = parameters[0].device
    with torch.random.fork_rng(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        with sdpa_kernel([SDPBackend.MATH]):
            value = _value(model, examples, outputs)
        if matrix == "hessian":
            product = _hessian_product(parameters, _gradients([value], parameters))
        else:
            product = _gauss_newton_product(parameters, value, _logits(outputs))
        yield product, parameters[0], sum(p.numel() for p in parameters)


def _value(model: nn.Module, examples: Examples, outputs: list[Any]) -> Tensor:
    """The loss over the examples, with its graph."""
    source = examples.source
    if not is_probe(source):
        torch.manual_seed(examples.seed)
        return examples.value_of_records(model, lambda: bool(outputs))
    probing = Probing(examples.count, None, examples.loss, examples.seed)  # type: ignore[arg-type]
    generator = probing.generator(0, "diagnostics")
    reference = next(p for p in model.parameters() if p.is_floating_point())
    probes = source.draw(examples.count or source.count, generator)
    probes = to(probes, reference.device, reference.dtype)
    torch.manual_seed(examples.seed)
    output = call(model, probes.inputs)
    classes = getattr(source, "classes", None)
    return probe_losses(probing.loss, output, probes, generator, classes).mean()


def _hessian_product(parameters: list[nn.Parameter], gradients: list[Tensor]) -> Product:
    """``H v = ∇ (∇L · v)``."""

    def product(v: Tensor) -> Tensor:
        return _flat(_gradients(gradients, parameters, _split(v, parameters), keep=False))

    return product


def _gauss_newton_product(parameters: list[nn.Parameter], value: Tensor, logits: Tensor) -> Product:
    """``Jᵀ (∇²_z L) J v``; ``J v`` is the derivative of the linear map ``u ↦ Jᵀ u`` along v."""
    (gradient,) = _gradients([value], [logits])
    u = torch.zeros_like(logits, requires_grad=True)
    vector_jacobian = _gradients([logits], parameters, [u])

    def product(v: Tensor) -> Tensor:
        (jacobian_v,) = _gradients(vector_jacobian, [u], _split(v, parameters), keep=False)
        (curved,) = _gradients([gradient], [logits], [jacobian_v], keep=False)
        return _flat(_gradients([logits], parameters, [curved], keep=False))

    return product


def _gradients(
    outputs: list[Tensor],
    inputs: list[Any],
    along: list[Tensor] | None = None,
    keep: bool = True,
) -> list[Tensor]:
    """Gradients of `outputs` with respect to `inputs`; zero where nothing depends.

    They can be differentiated again if `keep`.
    """
    used = [k for k, x in enumerate(outputs) if x.requires_grad]
    if not used:
        return [torch.zeros_like(x) for x in inputs]
    gradients = torch.autograd.grad(
        [outputs[k] for k in used],
        inputs,
        None if along is None else [along[k] for k in used],
        retain_graph=True,
        create_graph=keep,
        allow_unused=True,
    )
    return [
        torch.zeros_like(x) if gradient is None else gradient
        for gradient, x in zip(gradients, inputs, strict=True)
    ]


def _logits(outputs: list[Any]) -> Tensor:
    """The output of the one forward pass, on which the loss depends."""
    output = outputs[0]
    if isinstance(output, Mapping):
        output = output.get("logits")
    else:
        output = getattr(output, "logits", output)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if len(outputs) != 1 or not isinstance(output, Tensor) or not output.requires_grad:
        raise ValueError(
            'matrix="ggn" needs a loss of one output tensor (or `logits`) of one forward pass, but '
            f"the model ran {len(outputs)} times and returned {type(outputs[0]).__name__}. Use "
            "matrix='hessian'"
        )
    return output


def _split(v: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Cut a flat vector into tensors shaped like the parameters."""
    parts = v.split([p.numel() for p in parameters])
    return [part.view_as(p).to(p.dtype) for part, p in zip(parts, parameters, strict=True)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])

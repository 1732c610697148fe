"""The spectrum of the Hessian, or of the Gauss-Newton matrix, of a loss: stochastic Lanczos quadrature (Figure 7).

m steps of Lanczos from a random unit vector v turn the matrix H into a tridiagonal T. The eigenvalues θ_k of T and the
squared first entries ω_k of its eigenvectors are the nodes and weights of a Gauss quadrature (Golub and Welsch):
``Σ_k ω_k f(θ_k) = vᵀ f(H) v`` exactly for polynomials f of degree up to 2m - 1. The mean over several v estimates
``tr f(H) / d``, so nodes and weights together are an estimate of the density of eigenvalues (Ghorbani et al., 2019).

H is only ever multiplied with vectors, by differentiating twice. Every new Lanczos vector is orthogonalised against
all earlier ones, twice: without that, rounding brings back converged directions as copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpkfc.diagnostics.passes import AnyLoss, Examples, copy_of
from dpkfc.diagnostics.result import Result, is_probe, privacy_of, table_of
from dpkfc.errors import PrivacyError
from dpkfc.geometry.probing import Probing
from dpkfc.probes.arguments import check_integer, check_number
from dpkfc.probes.probe import call, to
from dpkfc.probes.targets import probe_losses

Matrix = Literal["hessian", "ggn"]
Product = Callable[[Tensor], Tensor]
EXHAUSTED = (
    1e-10  # a remainder below this share of ‖T‖: the vectors so far span all that v can reach
)


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of all start vectors together; the weights add up to 1."""

    nodes: tuple[float, ...]  # increasing
    weights: tuple[float, ...]
    size: int  # d, the eigenvalues that there are

    def moment(self, power: int) -> float:
        """An estimate of ``tr(H^power) / d``."""
        return math.fsum(
            weight * node**power for node, weight in zip(self.nodes, self.weights, strict=True)
        )

    @property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest node: inside the true spectrum, and soon close to its ends."""
        return self.nodes[0], self.nodes[-1]

    @property
    def negative(self) -> float:
        """The part of ``Σ |λ|`` from negative eigenvalues. (Their number says little: most are next to 0.)"""
        sizes = [weight * abs(node) for node, weight in zip(self.nodes, self.weights, strict=True)]
        below = math.fsum(size for node, size in zip(self.nodes, sizes, strict=True) if node < 0)
        return below / math.fsum(sizes) if any(sizes) else 0.0

    def density(
        self, points: int = 512, width: float | None = None
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Places, and the density there: every node as a Gaussian of standard deviation `width` (1% of the range)."""
        check_integer("points", points, 2)
        low, high = self.extremes
        spread = 0.01 * (high - low) or 0.01 * max(abs(high), 1e-12)
        width = spread if width is None else check_number("width", width, above=0)
        places = torch.linspace(low - 4 * width, high + 4 * width, points, dtype=torch.float64)
        nodes, weights = (torch.tensor(x, dtype=torch.float64) for x in (self.nodes, self.weights))
        bells = torch.exp(-(((places[:, None] - nodes) / width) ** 2) / 2) / (
            width * math.sqrt(2 * math.pi)
        )
        return tuple(places.tolist()), tuple((bells @ weights).tolist())

    def magnitudes(self, points: int = 256) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ranks from 1 to d, and the eigenvalues there, sorted by size: node k stands for d ω_k of them.

        Rank 1 is the largest node, however little weight it has: there is an eigenvalue at least as large.
        """
        check_integer("points", points, 2)
        nodes, weights = (torch.tensor(x, dtype=torch.float64) for x in (self.nodes, self.weights))
        order = nodes.abs().argsort(descending=True)
        counted = self.size * weights[order].cumsum(0)
        exponents = torch.linspace(0, 1, points, dtype=torch.float64)
        ranks = (float(self.size) ** exponents).round().long().clamp(1, self.size).unique()
        place = torch.searchsorted(counted, ranks - 0.5).clamp(max=len(nodes) - 1)
        place[0] = 0
        return tuple(ranks.tolist()), tuple(nodes.abs()[order][place].tolist())


@dataclass(frozen=True)
class HessianDensity(Result):
    """The spectrum of the loss on every source."""

    matrix: Matrix
    sources: dict[str, Quadrature]
    steps: int
    vectors: int
    private_sources: tuple[str, ...]  # those that read records
    privacy: str

    def __rich__(self) -> Table:
        name = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}[self.matrix]
        size = next(iter(self.sources.values())).size
        title = f"Spectrum of the {name}: {size:,} eigenvalues, {self.vectors} vectors, {self.steps} steps"
        headings = ["smallest", "largest", "mean", "root mean square", "negative"]
        table = table_of(title, self.privacy, ["source"], headings)
        for source, one in self.sources.items():
            figures = (*one.extremes, one.moment(1), math.sqrt(one.moment(2)))
            table.add_row(source, *(f"{x:.3g}" for x in figures), f"{one.negative:.1%}")
        return table

    def plot(self, file: str | Path) -> None:
        """The density, and the sorted magnitudes, as an image."""
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
    """The spectrum of the loss over a batch of records, a probe, or several probes by name, at the present weights.

    Args:
        source: all of it goes through the model at once, and its graph is kept: choose the batch accordingly.
        loss: ``(model, batch) -> scalar`` for records, as it is; for probes a probe loss, of which the mean is taken.
        matrix: "hessian", or "ggn": ``Jᵀ (∇² of the loss in the outputs) J``, without negative eigenvalues if the
            loss is convex in the model's output.
        steps: of Lanczos, m: products with the matrix for each start vector.
        vectors: start vectors; the density is their mean.

    >>> import torch, dpkfc
    >>> from dpkfc.diagnostics import hessian_density
    >>> found = hessian_density(torch.nn.Linear(4, 2), dpkfc.probes.Tabular(4), steps=10)
    >>> found.sources["Gaussian features"].size
    10
    """
    if matrix not in ("hessian", "ggn"):
        raise PrivacyError(f"matrix={matrix!r}: must be 'hessian' or 'ggn'")
    check_integer("steps", steps, 1)
    check_integer("vectors", vectors, 1)
    several = (
        isinstance(source, Mapping) and len(source) > 0 and all(map(is_probe, source.values()))
    )
    named = dict(source) if several else {source.name if is_probe(source) else "records": source}
    found = {}
    for name, one in named.items():
        with _product(copy_of(model), Examples(one, loss, "mean", probes, seed), matrix) as (
            product,
            like,
            size,
        ):
            found[name] = quadrature(product, size, steps, vectors, like, seed)
    private = tuple(name for name, one in named.items() if not is_probe(one) or not one.public)
    return HessianDensity(matrix, found, steps, vectors, private, privacy_of(named.values()))


def quadrature(
    product: Product, size: int, steps: int, vectors: int, like: Tensor, seed: int = 0
) -> Quadrature:
    """Nodes and weights for the symmetric matrix behind `product`, from `vectors` Gaussian start vectors."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(vectors):
        start = torch.randn(size, generator=generator, dtype=torch.float64).to(like.device)
        diagonal, beside = tridiagonal(product, start, min(steps, size))
        nodes, bases = torch.linalg.eigh(
            torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
        )
        found.append((nodes, bases[0].square() / vectors))  # ω_k: the squared first entries
    nodes, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = nodes.argsort()
    return Quadrature(tuple(nodes[order].tolist()), tuple(weights[order].tolist()), size)


def tridiagonal(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """α and β of ``T = Vᵀ H V`` after at most `steps` steps of Lanczos, on the CPU; in float64 but for the products."""
    basis = start.new_zeros(steps, len(start))
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for k in range(steps):
        image = product(basis[k]).to(start)
        alphas.append(float(image @ basis[k]))  # α_k = v_kᵀ H v_k
        if not math.isfinite(alphas[-1]):
            raise PrivacyError(
                "the product of the Hessian with a vector is not finite: the weights have diverged, or the loss has no "
                "second derivative at a point that the examples reach"
            )
        for _ in range(2):  # twice is enough (Parlett)
            image = image - basis[: k + 1].T @ (basis[: k + 1] @ image)
        beta = float(image.norm())  # β_k = ‖H v_k - α_k v_k - β_{k-1} v_{k-1}‖
        if k + 1 == steps or beta <= EXHAUSTED * max(map(abs, [*alphas, *betas])):
            break
        betas.append(beta)
        basis[k + 1] = image / beta
    return torch.tensor(alphas, dtype=torch.float64), torch.tensor(betas, dtype=torch.float64)


@contextmanager
def _product(
    model: nn.Module, examples: Examples, matrix: Matrix
) -> Iterator[tuple[Product, Tensor, int]]:
    """v ↦ H v over the trainable parameters, laid end to end; one parameter, for its device; and their number.

    The graph of one forward pass serves all products. Attention runs in its plain form, which can be differentiated
    twice; the fused ones cannot.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise PrivacyError(
            "the model has no trainable parameter: set requires_grad on what the Hessian is to be of"
        )
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    device = parameters[0].device
    with torch.random.fork_rng(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        with sdpa_kernel([SDPBackend.MATH]):
            value = _value(model, examples, outputs)
        if matrix == "hessian":
            slopes = _differentiate([value], parameters, None)
            product = _second(parameters, slopes)
        else:
            product = _gauss_newton(parameters, value, _logits(outputs))
        yield product, parameters[0], sum(p.numel() for p in parameters)


def _value(model: nn.Module, examples: Examples, outputs: list[Any]) -> Tensor:
    source = examples.source
    if not is_probe(source):
        torch.manual_seed(examples.seed)
        return examples.value_of_records(model, lambda: bool(outputs))
    probing = Probing(examples.count, None, examples.loss, examples.seed)  # type: ignore[arg-type]
    generator = probing.generator(0, "diagnostics")
    reference = next(p for p in model.parameters() if p.is_floating_point())
    drawn = to(
        source.draw(examples.count or source.count, generator), reference.device, reference.dtype
    )
    torch.manual_seed(examples.seed)
    output = call(model, drawn.inputs)
    return probe_losses(
        probing.loss, output, drawn, generator, getattr(source, "classes", None)
    ).mean()


def _second(parameters: list[nn.Parameter], slopes: list[Tensor]) -> Product:
    """``H v = ∇ (∇L · v)``."""

    def product(v: Tensor) -> Tensor:
        return _flat(_differentiate(slopes, parameters, _like(v, parameters), keep=False))

    return product


def _gauss_newton(parameters: list[nn.Parameter], value: Tensor, logits: Tensor) -> Product:
    """``Jᵀ (∇²_z L) J v``; ``J v`` by differentiating ``u ↦ Jᵀ u``, which is linear, along v."""
    (slope,) = _differentiate([value], [logits], None)
    u = torch.zeros_like(logits, requires_grad=True)
    back = _differentiate([logits], parameters, [u])

    def product(v: Tensor) -> Tensor:
        (forward,) = _differentiate(back, [u], _like(v, parameters), keep=False)
        (curved,) = _differentiate([slope], [logits], [forward], keep=False)
        return _flat(_differentiate([logits], parameters, [curved], keep=False))

    return product


def _differentiate(
    of: list[Tensor], by: list[Any], along: list[Tensor] | None, keep: bool = True
) -> list[Tensor]:
    """Gradients that can be differentiated again if `keep`; zero where nothing depends."""
    pairs = [(x, None if along is None else along[k]) for k, x in enumerate(of) if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in by]
    found = torch.autograd.grad(
        [x for x, _ in pairs],
        by,
        None if along is None else [y for _, y in pairs],
        retain_graph=True,
        create_graph=keep,
        allow_unused=True,
    )
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, by, strict=True)]


def _logits(outputs: list[Any]) -> Tensor:
    """What the loss is a function of: the output of one forward pass."""
    found = outputs[0]
    found = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
    found = found[0] if isinstance(found, tuple | list) and found else found
    if len(outputs) != 1 or not isinstance(found, Tensor) or not found.requires_grad:
        raise PrivacyError(
            'matrix="ggn" needs a loss of one output tensor (or `logits`) of one forward pass, but the model ran '
            f"{len(outputs)} times and returned {type(outputs[0]).__name__}. Use matrix='hessian'"
        )
    return found


def _like(v: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    parts = v.split([p.numel() for p in parameters])
    return [part.view_as(p).to(p.dtype) for part, p in zip(parts, parameters, strict=True)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])

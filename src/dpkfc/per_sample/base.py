"""The protocols and records that capture, layers and geometries share.

Notation: a layer with T shared positions has the inputs a_t (`activations`) and the gradients δ_t
at its outputs (`backprops`). The gradient of sample i with respect to the layer's parameters is
g_i. A preconditioner maps it to U g_i before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from dpkfc.errors import PrivacyError
from dpkfc.per_sample.workspace import Allocate, Workspace
from dpkfc.sharding import is_sharded

# What is preconditioned together: one parameter, or the weight and the bias of one layer.
ParamKey = tuple[nn.Parameter, ...]
PreconditionerOf = Callable[[ParamKey], "LinearMap"]


class LinearMap(Protocol):
    """A linear map ``g -> U g`` of the gradients of one `ParamKey`, independent of the private
    data.
    """

    @property
    def gain(self) -> float:
        """``‖U‖`` or an upper bound: the factor by which U can enlarge rounding errors of g."""

    @property
    def condition(self) -> float:
        """``‖U‖ ‖U⁻¹‖`` or an upper bound."""

    @property
    def work(self) -> tuple[int, int]:
        """Multiplications needed to map one vector left_t, and one vector right_t."""

    @property
    def factored(self) -> bool:
        """True if the map acts on the two factors of an outer product separately."""

    def map_factors(
        self,
        left: Tensor,
        right: Tensor,
        bias_input: Tensor | None,
        workspaces: tuple[Allocate, Allocate] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Map the factors of ``Σ_t left_t right_tᵀ`` ([B, T, features] each).

        Args:
            left, right: the factors.
            bias_input: [B, T], one more coordinate of `right`, whose column is the bias gradient.
            workspaces: where large results are written, for the left and for the right factor.
        """

    def outer_squared_norms(self, left: Tensor, right: Tensor, bias_input: Tensor | None) -> Tensor:
        """``‖U (left rightᵀ)‖²`` for [B, features] each, if the map is not `factored`."""

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        """Map the rows `ids` ([n]) of a gradient that is zero elsewhere.

        `values` is [n, features].
        """

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Map gradients of the parameters; leading dimensions are batch dimensions."""


class _IdentityMap:
    gain = condition = 1.0
    work = (0, 0)
    factored = True

    def map_factors(
        self,
        left: Tensor,
        right: Tensor,
        bias_input: Tensor | None,
        workspaces: tuple[Allocate, Allocate] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return left, right, bias_input

    def outer_squared_norms(self, left: Tensor, right: Tensor, bias_input: Tensor | None) -> Tensor:
        raise TypeError("the identity is factored: take the norms of the factors")

    def rows(self, ids: Tensor, values: Tensor) -> Tensor:
        return values

    def apply(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return list(grads)


IDENTITY_MAP: LinearMap = _IdentityMap()


def no_preconditioner(key: ParamKey) -> LinearMap:
    """The identity, for every parameter."""
    return IDENTITY_MAP


class PerSampleGrad(Protocol):
    """The gradients g_i of one `ParamKey` for all samples i of a batch, in a compact form."""

    @property
    def preconditioned(self) -> bool:
        """True if this holds U g_i rather than g_i, so that U must not be applied again."""
        ...

    def squared_norms(self, preconditioner: LinearMap) -> Tensor:
        """Upper bounds on ``‖U g_i‖²``, [batch].

        Never less than the squared norm of what sample i contributes to ``U · weighted_sum`` with
        weight 1, rounding included, up to `clipping.MARGIN`.
        """
        ...

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """``Σ_i v_i g_i`` for weights v_i.

        U is applied once, to the sum: ``Σ_i v_i U g_i = U Σ_i v_i g_i``. If `preconditioned`, this
        is ``Σ_i v_i U g_i`` already.
        """
        ...

    def per_sample(self) -> list[Tensor]:
        """The g_i themselves, [B, *shape] for each parameter."""
        ...

    def sum_of_squares(self) -> list[Tensor]:
        """``Σ_i g_i²``, entry by entry."""
        ...

    def masked(self, keep: Tensor) -> PerSampleGrad:
        """The same with every entry of the samples that are not kept set to zero, NaN included."""
        ...


GradsByName = Mapping[tuple[str, ...], PerSampleGrad]


@dataclass(eq=False)
class LayerCall:
    """One call of a module in a forward pass whose backward pass has reached it: (a, δ).

    If the parameters were replaced by one copy per sample instead, `activations` is None and
    `backprops` is the gradient of those copies: the per-sample gradient of the only entry of
    `params`.
    """

    hooked: HookedModule
    params: Mapping[str, nn.Parameter]  # the trainable ones, by their names in the module
    batch_size: int
    activations: Tensor | None  # a
    backprops: Tensor  # δ
    preconditioner_of: PreconditionerOf = field(default=no_preconditioner)

    @property
    def module(self) -> nn.Module:
        return self.hooked.module

    @property
    def shared(self) -> bool:
        """A parameter of the module is used by other modules too."""
        return self.hooked.shared

    @property
    def workspace(self) -> Workspace:
        return self.hooked.workspace

    def preconditioner(self, *names: str) -> LinearMap:
        """The map that the gradients of these parameters will be multiplied by."""
        return self.preconditioner_of(tuple(self.params[name] for name in names))


@dataclass(frozen=True)
class KroneckerForm:
    """How a layer is a matrix product over shared positions, ``y_t = W a_t + b``.

    Args:
        shape: the number of groups, and the inputs (without bias) and outputs per group, of a
            module.
        vectors: a and δ of one call, each as [batch, T, groups, features].
    """

    shape: Callable[[nn.Module], tuple[int, int, int]]
    vectors: Callable[[LayerCall], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerAdapter:
    """Everything that the library has to know about one kind of layer.

    Exactly one of `per_sample_grads` and `per_sample_forward` is given.

    Args:
        per_sample_grads: per-sample gradients from (a, δ), by parameter names. Parameters that are
            preconditioned together (weight and bias) share one key. Only names in `call.params` are
            wanted; with `call.shared`, every parameter must have a key of its own.
        per_sample_forward: ``forward(module, params, batch_size, args, kwargs)``, the output of the
            module with parameters ``params[name][i]`` for sample i.
        activations: what to keep of the arguments ``(args, kwargs)`` of a call as the layer's a;
            None: the first argument. It is called before the layer runs too, and raises
            `PrivacyError` for a call that the adapter does not cover.
        params: the names of all parameters that the layer may own itself; None: any.
        kronecker: how KFC sees the layer; None if it has no Kronecker factors.
        transposed: the weight is [in, out].
    """

    per_sample_grads: Callable[[LayerCall], GradsByName] | None = None
    per_sample_forward: Callable[..., Any] | None = None
    activations: Callable[[tuple[Any, ...], dict[str, Any]], Tensor] | None = None
    params: tuple[str, ...] | None = ("weight", "bias")
    kronecker: KroneckerForm | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if (self.per_sample_grads is None) == (self.per_sample_forward is None):
            raise ValueError("LayerAdapter: give one of per_sample_grads and per_sample_forward")


@dataclass(eq=False)
class HookedModule:
    """A module and the parameters whose gradients are captured at its calls."""

    name: str  # in the model
    module: nn.Module
    # layer: (a, δ) from hooks; expanded: own parameters replaced by one copy per sample; vmap: runs
    # as a whole with one copy of its parameters per sample
    kind: Literal["layer", "expanded", "vmap"]
    params: dict[str, nn.Parameter]  # by their names in the module
    adapter: LayerAdapter | None = None
    built_in: bool = True  # the adapter is the library's own
    verified: bool = True  # False: compare the adapter with autograd at the next call
    shared: bool = False  # a parameter belongs to another hooked module too
    # under vmap: arguments, as (number of tensors and values, place), that all samples share
    shared_inputs: set[tuple[int, int]] = field(default_factory=set)
    workspace: Workspace = field(default_factory=Workspace)
    # for each call under way, the trainable parameters to restore after it
    lent: list[dict[str, nn.Parameter]] = field(default_factory=list)

    def gathered(self, name: str) -> nn.Parameter:
        """The parameter as the module has it now: under FSDP2, put together from all ranks."""
        if not is_sharded(self.params[name]):
            return self.params[name]
        present = self.module.get_parameter(name)
        if is_sharded(present):
            raise PrivacyError(
                f"parameter '{name}' of module '{self.name}' is still divided over the ranks when "
                "the module runs: call the model itself, and fully_shard on whole modules. A "
                "module that runs under vmap must not contain one that fully_shard was called on"
            )
        return present

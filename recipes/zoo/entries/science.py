"""Scientific models: physics-informed networks, neural differential equations, equivariant networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.benchmarks.steps import burgers, collocation, perceptron
from recipes.zoo.batches import many
from recipes.zoo.registry import Case, Scale, entry


@entry("science/mlp")
def mlp(scale: Scale) -> Case:
    """The smallest thing that people train."""
    size = scale.pick(32, 256)
    batches = many(lambda: (torch.randn(size, 16), torch.randn(size, 1)))
    return Case(perceptron(16, 64, 1, 2, nn.SiLU), batches, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@entry("science/pinn")
def pinn(scale: Scale) -> Case:
    """Burgers' equation, whose residual needs second derivatives."""
    generator = torch.Generator().manual_seed(0)
    batches = many(lambda: collocation(generator, size=scale.pick(64, 4096)))
    return Case(perceptron(2, scale.pick(16, 64), 1, 4, nn.Tanh), batches, lambda model, batch: burgers(model, *batch))


class _Field(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = perceptron(4, width, 4, 2, nn.Tanh)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.body(y)
        return out


def _differential(method: str, *, adjoint: bool, **options: Any) -> Any:
    def make(scale: Scale) -> Case:
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            found = solve(model, batch["y0"], batch["t"], method=method, **options)
            return (found - batch["y"]).square().mean()

        def batch() -> dict[str, Tensor]:
            size = scale.pick(16, 128)
            return {"y0": torch.randn(size, 4), "t": torch.linspace(0, 1, 6), "y": torch.randn(6, size, 4)}

        return Case(_Field(scale.pick(16, 64)), many(batch), loss)

    return make


_ORDER = "on a CPU, autograd's engine runs operators of the solver's backward pass in an order that changes"
entry("science/ode_rk4", "torchdiffeq", core=True)(_differential("rk4", adjoint=False))
entry("science/ode_rk4_adjoint", "torchdiffeq", refused=_ORDER)(_differential("rk4", adjoint=True))
entry("science/ode_dopri5", "torchdiffeq", refused="the solver chooses its steps by what it finds")(
    _differential("dopri5", adjoint=False, rtol=1e-3, atol=1e-4)
)


@entry("science/e3nn_tensor_product", "e3nn", core=True)
def tensor_product(scale: Scale) -> Case:
    """An equivariant layer: spherical harmonics, a tensor product whose weights a network computes."""
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    irreps, harmonics = o3.Irreps("8x0e + 8x1o"), o3.Irreps.spherical_harmonics(2)
    product = o3.FullyConnectedTensorProduct(irreps, harmonics, irreps, shared_weights=False)
    model = nn.ModuleDict({
        "product": product, "weights": FullyConnectedNet([3, 16, product.weight_numel], torch.relu),
        "head": o3.Linear(irreps, "1x0e"),
    })  # fmt: skip
    size = scale.pick(16, 256)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        angles = o3.spherical_harmonics(harmonics, batch["edge"], normalize=True, normalization="component")
        weight = model["weights"](batch["edge"].square())
        return F.mse_loss(model["head"](model["product"](batch["x"], angles, weight)), batch["y"])

    def batch() -> dict[str, Tensor]:
        return {"x": irreps.randn(size, -1), "edge": torch.randn(size, 3), "y": torch.randn(size, 1)}

    return Case(model, many(batch), loss)


class _Spectral(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.float())
        kept = torch.einsum("bix,iox->box", spectrum[..., : self.modes], self.weight)
        return torch.fft.irfft(F.pad(kept, (0, spectrum.shape[-1] - self.modes)), n=x.shape[-1])


@entry("science/fourier_operator")
def fourier(scale: Scale) -> Case:
    """A Fourier neural operator in one dimension, with complex weights."""
    width, size = scale.pick((8, 4), (32, 16))
    layers = [layer for _ in range(3) for layer in (_Spectral(width, 8), nn.GELU())]
    model = nn.Sequential(nn.Conv1d(1, width, 1), *layers, nn.Conv1d(width, 1, 1))
    batches = many(lambda: (torch.randn(size, 1, 64), torch.randn(size, 1, 64)))
    return Case(model, batches, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@entry("science/functional_ensemble")
def ensemble(scale: Scale) -> Case:
    """An ensemble through torch.func: stacked parameters under vmap."""
    from torch.func import functional_call, stack_module_state

    members = [perceptron(8, 32, 1, 2, nn.ReLU) for _ in range(4)]
    stacked, _ = stack_module_state(members)
    base = members[0]
    names = {name.replace(".", "_"): name for name in stacked}
    model = nn.ParameterDict({flat: nn.Parameter(stacked[name].detach().clone()) for flat, name in names.items()})

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        given = {name: model[flat] for flat, name in names.items()}
        said = torch.vmap(lambda own: functional_call(base, own, (batch[0],)))(given)
        return F.mse_loss(said, batch[1].expand_as(said))

    size = scale.pick(32, 256)
    return Case(model, many(lambda: (torch.randn(size, 8), torch.randn(size, 1))), loss)

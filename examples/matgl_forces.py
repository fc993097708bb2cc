"""An interatomic potential of matgl, trained on energies and forces; and its Hessian.

    python examples/matgl_forces.py [--backend eager] [--whole] [--atoms 16] [--steps 200]
                                    [--hessian]

Forces are gradients of the energy at the positions, so that a loss on forces takes second
derivatives of the model, and so does the Hessian. matgl's Potential computes both by autograd
around the model. The model is compiled, or with --whole the potential around it: its call of
torch.autograd.grad is then traced into compiled code, which is faster. matgl's own option
compile_model leaves Hessians to eager mode, "because torch.compile cannot trace double-backward".

The data are crystals of rock salt with displaced atoms, labelled by a Morse potential. Needs matgl.
"""

# %%
from __future__ import annotations

import argparse
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from matgl.apps.pes import Potential
from matgl.ext.pymatgen import Structure2Graph
from matgl.models import TensorNet
from matgl.utils.cutoff import polynomial_cutoff
from pymatgen.core import Lattice, Structure
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_geometric.data import Data

ELEMENTS, CUTOFF, CRYSTALS, BATCH = ("Na", "Cl"), 5.0, 64, 4

# %% [markdown]
# The data: crystals, and their energies and forces by a formula.


# %%
class Morse(nn.Module):
    """The energy of one crystal as a sum over pairs of atoms: the labels."""

    def forward(self, g: Data, **_: Any) -> Tensor:
        i, j = g.edge_index.long()
        r = (g.pos[j] + g.pbc_offshift - g.pos[i]).norm(dim=1)
        decay = torch.exp(2.8 - r)
        return ((decay - 2) * decay * polynomial_cutoff(r, CUTOFF)).sum()


def crystals(count: int, atoms: int) -> list[Data]:
    """Graphs of crystals with displaced atoms, 8 or a multiple of 8 in each."""
    sites = [[0, 0, 0], [0.5, 0.5, 0.5]]
    cell = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ELEMENTS, sites)
    graphs = []
    for seed in range(count):
        displaced = (cell * (atoms // 8, 1, 1)).perturb(0.2, seed=seed)
        graph, graph.cell, _ = Structure2Graph(ELEMENTS, CUTOFF).get_graph(displaced)
        graphs.append(graph)
    return graphs


# %% [markdown]
# Training on energies and forces, and the Hessian.


# %%
def tensornet(units: int, blocks: int) -> TensorNet:
    return TensorNet(ELEMENTS, units, nblocks=blocks, cutoff=CUTOFF, is_intensive=False)


def training(
    compile: Callable[[Any], Any],
    atoms: int = 16,
    units: int = 64,
    blocks: int = 2,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], Tensor]:
    """A function that takes one step of training and returns its loss. whole: compiles energies and
    forces instead of the model.
    """
    torch.manual_seed(0)
    graphs = crystals(CRYSTALS, atoms)
    label = Potential(Morse(), calc_stresses=False).to(dtype).eval()
    for graph in graphs:
        energy, graph.forces, *_ = label(graph, graph.cell)
        graph.energy = energy.detach()
    mean = torch.stack([graph.energy for graph in graphs]).mean()
    scale = torch.cat([graph.forces for graph in graphs]).std()
    model = tensornet(units, blocks)
    potential = Potential(model if whole else compile(model), mean, scale, calc_stresses=False)
    potential = compile(potential.to(dtype)) if whole else potential.to(dtype)
    optimizer = torch.optim.Adam(potential.parameters(), 1e-3)
    order = torch.Generator().manual_seed(0)
    batches = chain.from_iterable(repeat(DataLoader(graphs, BATCH, shuffle=True, generator=order)))

    def step() -> Tensor:
        batch = next(batches)
        energy, forces, *_ = potential(batch, batch.cell)
        loss = F.mse_loss(energy, batch.energy) / atoms + F.mse_loss(forces, batch.forces)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def hessian(
    compile: Callable[[Any], Any],
    atoms: int = 8,
    units: int = 64,
    blocks: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], Tensor]:
    """A function that returns the Hessian of a crystal's energy at the atoms' positions."""
    torch.manual_seed(0)
    model = tensornet(units, blocks).requires_grad_(False)
    potential = Potential(compile(model), calc_stresses=False, calc_hessian=True).to(dtype)
    (graph,) = DataLoader(crystals(1, atoms))

    def step() -> Tensor:
        return potential(graph, graph.cell)[3]

    return step


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--whole", action="store_true", help="compile energies and forces")
    parser.add_argument("--atoms", type=int, default=16, help="of a crystal, a multiple of 8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hessian", action="store_true", help="of one crystal, before training")
    options = parser.parse_args(argv)
    torch._dynamo.config.trace_autograd_ops = options.whole

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    if options.hessian:
        stiffness = torch.linalg.eigvalsh(hessian(compile, options.atoms)())
        print(f"eigenvalues from {stiffness[0]:.2e} to {stiffness[-1]:.2e} eV/A^2")
        return
    step = training(compile, options.atoms, whole=options.whole)
    for i in range(options.steps):
        loss = step()
        if i % 20 == 0:
            print(f"step {i}: loss {loss.item():.5f}")


# %%
if __name__ == "__main__":
    main()

"""Learns energies and forces of small clusters of atoms: docs/tutorial.md explains it."""

import argparse

import torch
from parsl.app.app import python_app

from parsl_freetrain import freetrain_app


def clusters(count, seed):
    """Positions (count, 5, 3), energies (count,) and forces (count, 5, 3); a made-up potential."""
    positions = 2 * torch.randn(count, 5, 3, generator=torch.Generator().manual_seed(seed))
    positions.requires_grad_()
    squares = torch.stack([(a - b).square().sum(-1) for a, b in pairs(positions)])
    energies = (torch.exp(-squares) - 0.5 * torch.exp(-squares / 4)).sum(0)
    forces = -torch.autograd.grad(energies.sum(), positions)[0]
    return positions.detach(), energies.detach(), forces


def pairs(positions):
    atoms = positions.unbind(1)
    return [(atoms[i], atoms[j]) for i in range(5) for j in range(i)]


class Potential(torch.nn.Module):
    """The energy as a sum over pairs of atoms."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1, width), torch.nn.SiLU(), torch.nn.Linear(width, 1)
        )

    def forward(self, positions):
        squares = torch.stack([(a - b).square().sum(-1) for a, b in pairs(positions)])
        return self.layers(torch.exp(-squares / 4)[..., None])[..., 0].sum(0)


def errors(model, batch):
    """Squared errors of each cluster: of its energy, and of its forces."""
    positions, energies, forces = batch
    positions = positions.requires_grad_()
    found = model(positions)
    found_forces = -torch.autograd.grad(found.sum(), positions, create_graph=True)[0]
    return (found - energies).square(), (found_forces - forces).square().mean((1, 2))


@freetrain_app(min_nodes=1, max_nodes=2, total_epochs=30)
def train(ctx, width, lr, seed):
    torch.manual_seed(seed)
    training = torch.utils.data.TensorDataset(*clusters(512, seed=1))
    held_out = torch.utils.data.TensorDataset(*clusters(128, seed=2))
    model = Potential(width)
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=lr))

    def measure(model, batch):
        energy, force = errors(model, batch)
        return {'validation_energy': energy, 'validation_force': force}

    def end_of_epoch():
        found = ctx.evaluate(model, held_out, measure, batch_size=64, gradients=True)
        ctx.report(**found)
        ctx.checkpoint(best=found['validation_force'])
        if found['validation_force'] < 1e-4:
            ctx.finish_early('the forces are good enough')

    ctx.each_epoch(end_of_epoch)
    for batch in ctx.loop(training, batch_size=32):
        optimizer.zero_grad()
        energy, force = errors(model, batch)
        loss = energy.mean() + 10 * force.mean()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())


@python_app
def spread(width, *paths):
    """How much the trained networks disagree on new clusters: the standard deviation."""
    import torch  # an ordinary app of Parsl imports what it uses
    from forces import Potential, clusters

    from parsl_freetrain import load_weights

    positions, _, _ = clusters(64, seed=3)
    energies = []
    for path in paths:
        model = Potential(width)
        model.load_state_dict(load_weights(path))
        energies.append(model(positions).detach())
    return float(torch.stack(energies).std(0).mean())


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--width', type=int, default=16)
    parser.add_argument('--lr', type=float, default=0.01)
    parser.add_argument('--seeds', type=int, default=3)
    given = parser.parse_args()
    futures = [
        train(given.width, given.lr, seed, trainer_name=f'seed-{seed}')
        for seed in range(given.seeds)
    ]
    for future in futures:
        print(future.result().metrics)
    print('they differ by', spread(given.width, *(f.result().path for f in futures)).result())

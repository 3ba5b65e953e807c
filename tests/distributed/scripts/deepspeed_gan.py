"""A generator and a discriminator in two engines, at every stage, against plain torch."""

import contextlib

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed()
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
score = nn.BCEWithLogitsLoss()
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.5, 0.999]}}
BATCH, STEPS = 8, 5


def networks():
    """Return a generator, with a normalisation, and a discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 6))
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return generator, discriminator


def batch(step):
    """Return samples and noise of all ranks."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=draw) + 1, torch.randn(BATCH, 4, generator=draw)


def penalty_of(net, samples):
    """Return the distance of the slopes from 1, whose gradient has second derivatives."""
    inputs = samples.clone().requires_grad_(True)
    (slopes,) = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean()


def told_of(net, samples, fake, loop):
    """Return the loss of a discriminator."""
    yes, no = torch.ones(len(samples), 1), torch.zeros(len(samples), 1)
    told = score(net(samples), yes) + score(net(fake.detach()), no)
    return told + penalty_of(net, samples) if loop == "penalty" else told


def plain(loop):
    """Train on the joined batches."""
    nets = generator, discriminator = networks()
    steps = [torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.999)) for net in nets]
    losses = []
    for step in range(STEPS):
        samples, noise = batch(step)
        fake = generator(noise)
        steps[1].zero_grad()
        told = told_of(discriminator, samples, fake, loop)
        told.backward()
        steps[1].step()
        steps[0].zero_grad()
        fooled = score(discriminator(fake), torch.ones(BATCH, 1))
        fooled.backward()
        steps[0].step()
        losses.append([told.item(), fooled.item()])
    return losses, *(weights(net) for net in nets)


def weights(net):
    """Return the values of a network by name."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def engine_of(net, zero, loop):
    """Return an engine with an optimizer of the configuration, or of the script."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 0,
        "zero_optimization": zero,
    }
    optimizer = None
    if loop == "optimizers":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.999))
    else:
        config["optimizer"] = ADAM
    return deepspeed.initialize(
        model=net, model_parameters=net.parameters(), optimizer=optimizer, config=config
    )[0]


def freezing(net, loop):
    """Return a context in which the parameters of a network take no gradients."""
    stack = contextlib.ExitStack()
    if loop == "frozen":
        net.requires_grad_(False)
        stack.callback(net.requires_grad_, True)
    return stack


def engines(zero, loop):
    """Train on the rank's share, with one of the loops that public scripts have."""
    generator, discriminator = (engine_of(net, zero, loop) for net in networks())
    losses = []
    for step in range(STEPS):
        samples, noise = (part.chunk(ranks)[rank] for part in batch(step))
        yes, no = torch.ones(len(samples), 1), torch.zeros(len(samples), 1)
        discriminator.zero_grad()
        fake = generator(noise)
        if loop == "two passes":
            real = score(discriminator(samples), yes)
            discriminator.backward(real)
            other = score(discriminator(fake.detach()), no)
            discriminator.backward(other)
            told = real + other
        else:
            told = told_of(discriminator, samples, fake, loop)
            discriminator.backward(told)
        discriminator.step()
        generator.zero_grad()
        with freezing(discriminator.module, loop):
            fooled = score(discriminator(fake), yes)
        if loop == "tensor":
            fooled.backward()
        else:
            generator.backward(fooled)
        generator.step()
        total = torch.stack([told.detach(), fooled.detach()])
        dist.all_reduce(total)
        losses.append((total / ranks).tolist())
    found = [engine.module_state_dict() for engine in (generator, discriminator)]
    return losses, *({name: x.clone() for name, x in one.items()} for one in found)


host = {"device": "cpu"}
zeros = [{"stage": stage} for stage in range(4)]
zeros += [{"stage": 3, "offload_optimizer": host, "offload_param": host}]
for loop in ("tensor", "engine", "two passes", "frozen", "optimizers", "penalty"):
    expected, first = plain(loop), None
    for zero in zeros:
        found = engines(zero, loop)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=f"{loop} {zero}")
        first = first or found
        torch.testing.assert_close(found, first, rtol=0, atol=0, msg=f"{loop} {zero}")

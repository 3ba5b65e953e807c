"""Loops of Lightning Fabric: each runs under plain Fabric and under the strategy of zfun."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import zfun.interop.lightning  # noqa: F401, registers the strategies
from tests.interop.lightnings import as_rank
from zfun.collectives import Group


def fabric_of(strategy: Any, size: int = 1, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def net() -> nn.Sequential:
    torch.manual_seed(0)
    bare = nn.Linear(3, 4, bias=False)  # statistics follow
    return nn.Sequential(bare, nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows(fabric: Fabric, count: int, width: int = 3) -> Tensor:
    """Batches of 4 rows, other ones on each rank."""
    generator = torch.Generator().manual_seed(fabric.global_rank)
    return torch.randn(count, 4, width, generator=generator, dtype=torch.float64)


def shared_rows(fabric: Fabric, count: int) -> Tensor:
    """Batches of 4 rows, of which each rank has a part."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(count, 4, 3, generator=generator, dtype=torch.float64)
    return whole.chunk(fabric.world_size, 1)[fabric.global_rank]


def of(fabric: Fabric, *modules: nn.Module) -> list[Any]:
    """Values to compare: under DDP rank 0 has the buffers of all ranks."""
    values = [dict(module.state_dict()) for module in modules]
    if fabric.global_rank == 0:
        return values
    pairs = zip(modules, values, strict=True)
    return [{name: own[name].clone() for name, _ in m.named_parameters()} for m, own in pairs]


def accumulation(fabric: Fabric) -> Any:
    """Groups, a schedule, clipping, micro-batches, and a file in the middle."""
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.02}]
    inner = torch.optim.AdamW(groups, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    wrapped, optimizer, schedule = fabric.setup(model, inner, scheduler=schedule)
    found: list[Any] = []
    path = Path(fabric.broadcast(tempfile.mkdtemp())) / "a.ckpt"
    batches = rows(fabric, 6)
    losses: list[Tensor] = []
    for index, batch in enumerate(batches):
        for number, part in enumerate(batch.split(2)):
            with fabric.no_backward_sync(wrapped, enabled=number == 0):
                loss = wrapped(part).square().mean()
                fabric.backward(loss / 2)
                losses.append(loss.detach())
        found += [losses[-1], fabric.clip_gradients(wrapped, optimizer, max_norm=0.2)]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if index == 2:
            fabric.save(path, {"model": wrapped, "optimizer": optimizer, "epoch": 3})
    state = {"model": wrapped, "optimizer": optimizer, "epoch": 0}
    assert fabric.load(path, state) == {}
    wrapped.eval()
    with torch.no_grad():
        found += [wrapped(batches[0]), state["epoch"]]
    saved = torch.load(path, weights_only=False)
    return found, saved, optimizer.state_dict(), of(fabric, model)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        fake = self.generator(noise)
        if real is None:
            return F.softplus(-self.critic(fake)).mean()
        return (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake.detach()))).mean()


def optimizers_of(model: Gan) -> list[Any]:
    adam = torch.optim.Adam(model.generator.parameters(), 0.01, betas=(0.5, 0.9))
    return [adam, torch.optim.SGD(model.critic.parameters(), 0.1, momentum=0.9)]


def two_models(fabric: Fabric) -> Any:
    model = Gan()
    adam, sgd = optimizers_of(model)
    generator, adam = fabric.setup(model.generator, adam)
    critic, sgd = fabric.setup(model.critic, sgd)
    found = []
    for noise in rows(fabric, 4):
        fake = generator(noise)
        sgd.zero_grad()
        loss = F.softplus(critic(fake.detach()) - 1).mean()
        fabric.backward(loss)
        norm = fabric.clip_gradients(critic, sgd, max_norm=0.2)
        sgd.step()
        adam.zero_grad()
        fabric.backward(-critic(fake).mean())
        adam.step()
        found += [loss.detach(), norm]
    return found, of(fabric, model)


def two_optimizers(fabric: Fabric) -> Any:
    model = Gan()
    wrapped, adam, sgd = fabric.setup(model, *optimizers_of(model))
    found = []
    for noise in rows(fabric, 4):
        for optimizer, real in ((sgd, noise[:, :2]), (adam, None)):
            # DDP asks for a gradient of each parameter.
            loss = wrapped(noise, real) + 0.0 * sum(p.sum() for p in model.parameters())
            fabric.backward(loss)
            optimizer.step()
            wrapped.zero_grad()
            found.append(loss.detach())
    return found, adam.state_dict(), sgd.state_dict(), of(fabric, model)


def muon_and_adamw(fabric: Fabric) -> Any:
    """Two optimizers of one model, with statistics and a parameter that is in none of them."""
    model = net()
    model[0].weight.requires_grad_(False)
    (matrix,) = (p for p in model[1:].parameters() if p.dim() == 2)
    vectors = [p for p in model[1:].parameters() if p.dim() == 1]
    pair = torch.optim.Muon([matrix], 0.02), torch.optim.AdamW(vectors, 0.01)
    wrapped, muon, adamw = fabric.setup(model, *pair)
    found = []
    for index, batch in enumerate(rows(fabric, 4)):
        loss = wrapped(batch).square().mean()
        fabric.backward(loss)
        found += [loss.detach(), fabric.clip_gradients(wrapped, adamw, max_norm=0.2)]
        muon.step()
        muon.zero_grad()
        if index % 2:
            adamw.step()
            adamw.zero_grad()
    wrapped.eval()
    with torch.no_grad():
        found.append(wrapped(torch.ones(1, 3, dtype=torch.float64)))
    return found, muon.state_dict(), adamw.state_dict(), of(fabric, model)


def one_optimizer_of_two_models(fabric: Fabric) -> Any:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    lower, upper = fabric.setup_module(first), fabric.setup_module(second)
    params = [*first.parameters(), *second.parameters()]
    optimizer: Any = fabric.setup_optimizers(torch.optim.Adam(params, 0.1))
    for batch in rows(fabric, 4):
        fabric.backward(upper(lower(batch).tanh()).square().mean())
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict(), of(fabric, first, second)


def closures(fabric: Fabric) -> Any:
    model = net()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    found = []
    for batch in rows(fabric, 3):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = wrapped(batch).square().mean()
            loss.backward()
            return loss

        found.append(optimizer.step(closure).detach())
    return found, of(fabric, model)


def gradients(fabric: Fabric) -> Any:
    """Reads gradients, scales them, and drops those of a batch."""
    model = net()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    found: list[Any] = []
    for index, batch in enumerate(rows(fabric, 5)):
        fabric.backward(wrapped(batch).square().mean())
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if index == 1:
            optimizer.zero_grad()
            continue
        if index == 2:
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    return found, of(fabric, model)


def clips(fabric: Fabric) -> Any:
    """Clips each micro-batch, asks for the norm alone, and drops what it has clipped."""
    model = net()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    found: list[Any] = []
    for index, batch in enumerate(rows(fabric, 4)):
        for part in batch.split(2):
            fabric.backward(10 * wrapped(part).square().mean())
            bounds = (0.2 if index != 1 else 1e-3, float("inf"))
            found += [fabric.clip_gradients(wrapped, optimizer, max_norm=x) for x in bounds]
        if index != 1:
            optimizer.step()
        optimizer.zero_grad()
    return found, of(fabric, model)


def unfreezing(fabric: Fabric) -> Any:
    """Frozen parameters of the optimizer, and a group of later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    inner = torch.optim.Adam(model[2].parameters(), 0.1, amsgrad=True)
    wrapped, optimizer = fabric.setup(model, inner)
    for index, batch in enumerate(shared_rows(fabric, 6)):
        if index == 2:
            model[2].bias.requires_grad_(True)
        if index == 4:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        fabric.backward(wrapped(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict(), of(fabric, model)


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = net(), nn.Linear(3, 1).double()

    def forward(self, x: Tensor, is_whole: bool) -> Tensor:
        return self.body(x) + (self.branch(x) if is_whole else 0.0)


def zeroes(fabric: Fabric) -> Any:
    """Gradients set to zero: of a branch that DDP lets one rank leave out, and of a whole step."""
    model = Branched()
    inner = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
    wrapped, optimizer = fabric.setup(model, inner)
    for index, batch in enumerate(rows(fabric, 5)):
        if index != 3:
            is_whole = fabric.world_size > 1 or index % 2 == 0
            fabric.backward(wrapped(batch, is_whole).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return optimizer.state_dict(), of(fabric, model)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self.net(batch).square().mean() + self.penalty()

    def penalty(self) -> Tensor:
        return sum((p.square().sum() for p in self.parameters()), torch.zeros(()))


def a_lightning_module(fabric: Fabric) -> Any:
    model = Module()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for index, batch in enumerate(rows(fabric, 3)):
        fabric.backward(wrapped.training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()
    return of(fabric, model)


def phase(fabric: Fabric, model: Any, *optimizers: Any) -> list[Tensor]:
    found = []
    for batch in rows(fabric, 3):
        loss = model(batch).square().mean()
        fabric.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        for part in [*optimizers, *([model] if isinstance(model, nn.Module) else [])]:
            part.zero_grad()
        found.append(loss.detach())
    return found


def adam_of(*parts: nn.Module) -> Any:
    return torch.optim.Adam([p for part in parts for p in part.parameters()], 0.02, eps=1e-3)


def later_optimizers(fabric: Fabric) -> Any:
    """Later phases have other optimizers, beside one with its moments, or in its place."""
    model, second = net(), net()[3]
    wrapped, first = fabric.setup(model, adam_of(model[0], model[1]))
    found = phase(fabric, wrapped, first)
    head: Any = fabric.setup_optimizers(adam_of(model[3]))
    found += phase(fabric, wrapped, first, head)
    states = first.state_dict(), head.state_dict()
    whole: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    found += phase(fabric, wrapped, whole)
    tail, last = fabric.setup(second, adam_of(second))
    both = lambda x: tail(wrapped(x).expand(-1, 4))
    found += phase(fabric, both, whole, last)
    shared: Any = fabric.setup_optimizers(adam_of(model, second))
    found += phase(fabric, both, shared)
    return found, states, shared.state_dict(), of(fabric, model, second)


def set_up_again(fabric: Fabric) -> Any:
    """A model is set up with an optimizer, and its module later with another one."""
    model = net()
    wrapped, optimizer = fabric.setup(model, adam_of(model))
    found = phase(fabric, wrapped, optimizer)
    again, other = fabric.setup(wrapped.module, torch.optim.SGD(model.parameters(), 0.1))
    return found + phase(fabric, again, other), of(fabric, model)


def copies(fabric: Fabric) -> Any:
    """Copies of what Fabric returns: a target network, an average, and a copy that trains."""
    model = net()
    wrapped, optimizer = fabric.setup(model, adam_of(model))
    found = phase(fabric, wrapped, optimizer)
    target, average = copy.deepcopy(wrapped).eval(), AveragedModel(wrapped)
    for batch in rows(fabric, 3):
        with torch.no_grad():
            wanted = target(batch).tanh()
        fabric.backward((wrapped(batch) - wanted).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(wrapped)
        with torch.no_grad():
            for kept, new in zip(target.parameters(), wrapped.parameters(), strict=True):
                kept.lerp_(new.detach(), 0.5)
        found += [wanted]
    own = torch.optim.SGD(target.parameters(), 0.1)
    # The same on all ranks, because a copy of DDP sums over the ranks too.
    target(torch.ones(4, 3, dtype=torch.float64)).square().mean().backward()
    own.step()
    with torch.no_grad():
        found.append(average(rows(fabric, 1)[0]))
    found += phase(fabric, wrapped, optimizer)
    return found, [*target.module.state_dict().values()], of(fabric, model)


LOOPS: dict[str, Callable[[Fabric], Any]] = {
    loop.__name__: loop
    for loop in (
        accumulation,
        two_models,
        two_optimizers,
        muon_and_adamw,
        one_optimizer_of_two_models,
        closures,
        gradients,
        clips,
        unfreezing,
        zeroes,
        a_lightning_module,
        later_optimizers,
        set_up_again,
        copies,
    )
}


def save_alone(group: Group, strategy: Any, path: str) -> None:
    """Save on the main process alone, while the other waits."""
    as_rank(group)
    fabric, model = fabric_of(strategy, group.size), net()
    wrapped, optimizer = fabric.setup(model, adam_of(model))
    phase(fabric, wrapped, optimizer)
    if fabric.is_global_zero:
        fabric.save(path, {"model": wrapped})
    fabric.barrier()


def run(group: Group, strategy: Any, name: str) -> Any:
    as_rank(group)
    return LOOPS[name](fabric_of(strategy, group.size))

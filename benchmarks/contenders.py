"""The models that ``step.py`` trains, and one function per contender, as a user writes one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, PRESETS
from text import batches, stdlib_bytes

Step = Callable[[Any], Tensor]
LEARNING_RATE = 3e-4


class Many(nn.Module):
    """502 tiny tensors, which show the fixed cost of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(250))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.1
        return self.head(x)


@dataclass(frozen=True)
class Model:
    """A model with data.

    Attributes:
        build: makes the module, the same on every rank.
        loss: of a module's call and a batch.
        batches: of every step, for a rank of so many.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Callable[..., Tensor], Any], Tensor]
    batches: Callable[[int, int], Any]


def gpt(preset: str) -> Model:
    config = PRESETS[preset]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(config)

    def loss(call: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(call(tokens).flatten(0, 1).float(), targets.flatten())

    text = stdlib_bytes()
    return Model(
        build,
        loss,
        lambda rank, size: batches(text, config.batch_size * 2, config.length, rank, size),
    )


def many() -> Model:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Many()

    def draw(rank: int, size: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        while True:
            x = torch.randn(16, 16, generator=generator)
            share = 16 // size
            yield x[rank * share : (rank + 1) * share]

    return Model(build, lambda call, x: (call(x).float() ** 2).mean(), draw)


def model_of(preset: str) -> Model:
    return many() if preset == "many" else gpt(preset)


@dataclass(frozen=True)
class Setting:
    """The ingredients of a contender.

    Attributes:
        model: the model to train.
        module: the module of the model, with the first weights.
        group: the ranks.
        half: whether to compute in bfloat16.
        device: where the module is.
    """

    model: Model
    module: nn.Module
    group: zf.Group
    half: bool = False
    device: str = "cpu"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return (
            torch.autocast(self.device, torch.bfloat16) if self.half else contextlib.nullcontext()
        )


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def torch_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, *, autocast: bool = True
) -> Step:
    """The usual training loop of torch; in bfloat16 by autocast, unless the module casts itself."""

    def step(batch: Any) -> Tensor:
        with setting.autocast() if autocast else contextlib.nullcontext():
            loss = setting.model.loss(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def plain(setting: Setting) -> Step:
    return torch_step(setting.module, adamw(setting.module.parameters()), setting)


def functional(setting: Setting) -> Step:
    """The same loop with ``functional_call``: the cost of a pure loss without zfun."""
    params = {
        name: weight.detach().requires_grad_() for name, weight in setting.module.named_parameters()
    }
    leaves = list(params.values())
    optimizer = adamw(leaves)

    def step(batch: Any) -> Tensor:
        with setting.autocast():
            loss = setting.model.loss(
                lambda *args: functional_call(setting.module, params, args), batch
            )
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.grad = grad
        optimizer.step()
        return loss.detach()

    return step


def ddp(setting: Setting) -> Step:
    module = nn.parallel.DistributedDataParallel(setting.module, gradient_as_bucket_view=True)
    return torch_step(module, adamw(module.parameters()), setting)


def ddp_zero(setting: Setting) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(setting.module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return torch_step(module, optimizer, setting)


def fsdp2(setting: Setting) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(setting.device, (dist.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if setting.half
        else MixedPrecisionPolicy()
    )
    module = setting.module
    blocks: Any = module.layers if isinstance(module, Many) else getattr(module, "blocks", ())
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return torch_step(module, adamw(module.parameters()), setting, autocast=False)


def zfun_stage(stage: int) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        params = {name: weight.detach() for name, weight in setting.module.named_parameters()}
        # The module defines the computation only: the numbers are in ``params``.
        skeleton = setting.module.to("meta")

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return setting.model.loss(lambda *args: functional_call(skeleton, params, args), batch)

        precision = torch.bfloat16 if setting.half else None
        z = zf.zero(
            stage, loss_fn, zf.optim.adamw(LEARNING_RATE), setting.group, precision=precision
        )
        state = z.init(params)

        def step(batch: Any) -> Tensor:
            nonlocal state
            state, info = z.step(state, batch)
            return info.loss

        return step

    return make


def deepspeed_stage(stage: int) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        # not among the packages that a check of types finds
        deepspeed: Any = importlib.import_module("deepspeed")
        config = {
            "train_micro_batch_size_per_gpu": len(
                next(setting.model.batches(0, setting.group.size))[0]
            ),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # since 0.19 the default is 1
            "bf16": {"enabled": setting.half},
        }
        engine, *_ = deepspeed.initialize(
            model=setting.module, optimizer=adamw(setting.module.parameters()), config=config
        )

        def step(batch: Any) -> Tensor:
            loss = setting.model.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return make


ONE_PROCESS = "one process"
# Alone on one rank, with the threads and batches of all ranks.
ALONE: dict[str, Callable[[Setting], Step]] = {ONE_PROCESS: plain, "functional": functional}
CONTENDERS: dict[str, Callable[[Setting], Step]] = {
    **ALONE,
    "ddp": ddp,
    "ddp+zero1": ddp_zero,
    "fsdp2": fsdp2,
    **{f"zfun-{stage}": zfun_stage(stage) for stage in (0, 1, 2, 3)},
    **{f"deepspeed-{stage}": deepspeed_stage(stage) for stage in (1, 2, 3)},
}
DEFAULT = [name for name in CONTENDERS if name != "functional" and not name.startswith("deepspeed")]


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None

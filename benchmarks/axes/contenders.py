"""A Llama over two axes: zfun beside torch's own transforms, each as a user writes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import zfun as zf
from zfun.interop.transformers import pipeline_stages, tp_plan

Step = Callable[[Any], Tensor]
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Preset:
    """The shape of a model, and of the batch of a data rank."""

    width: int
    num_layers: int
    length: int
    rows: int
    vocab: int = 1024

    def build(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocab,
                hidden_size=self.width,
                intermediate_size=self.width * 5 // 2,
                num_hidden_layers=self.num_layers,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=self.length,
            )
        )

    def batches(self, data_rank: int, data_size: int) -> Iterator[Mapping[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        shape = (data_size, self.rows, self.length)
        while True:
            ids = torch.randint(self.vocab, shape, generator=generator)[data_rank]
            yield {"input_ids": ids, "labels": ids}


PRESETS = {
    "tiny": Preset(width=32, num_layers=2, length=16, rows=4, vocab=64),
    "small": Preset(width=256, num_layers=4, length=128, rows=4),
    "medium": Preset(width=512, num_layers=8, length=128, rows=8),
}


@dataclass(frozen=True)
class Task:
    """A model to train on 2 x 2 ranks.

    Attributes:
        preset: of the model.
        num_micro_batches: of a pipeline's step.
    """

    preset: str
    num_micro_batches: int


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def taken(model: nn.Module) -> dict[str, Tensor]:
    """Take the parameters out of a module, which then defines the computation only."""
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    for module in model.modules():
        for name, leaf in module._parameters.items():
            if leaf is not None:
                module._parameters[name] = nn.Parameter(leaf.detach().to("meta"))
    return params


def zfun_tensor(stage: int) -> Callable[[zf.Group, Task, LlamaForCausalLM], Step]:
    def make(group: zf.Group, task: Task, model: LlamaForCausalLM) -> Step:
        del task
        mesh = zf.mesh(group, dp=2, tp=2)
        params, apply = taken(model), zf.functional(model)
        loss = zf.tensor_parallel(
            lambda params, batch: apply(params, **batch, use_cache=False).loss,
            mesh["tp"],
            tp_plan(model),
        )
        zero = zf.zero(stage, loss, zf.optim.adamw(LEARNING_RATE), mesh["dp"])
        return stepping(zero, zero.init(params))

    return make


def stepping(zero: Any, state: Any) -> Step:
    def step(batch: Any) -> Tensor:
        nonlocal state
        state, info = zero.step(state, batch)
        return info.loss

    return step


def fsdp2_tensor(group: zf.Group, task: Task, model: LlamaForCausalLM) -> Step:
    """``parallelize_module`` with ``fully_shard``, and the plan that the model names for itself."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    del group, task
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    plan = {glob: styles[style.name]() for glob, style in tp_plan(model).items()}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # A fused rule takes leaves of one mesh.
    groups: dict[int, list[Any]] = {}
    for leaf in model.parameters():
        assert isinstance(leaf, DTensor)
        groups.setdefault(leaf.device_mesh.ndim, []).append(leaf)
    optimizer = adamw([{"params": leaves} for leaves in groups.values()])

    def step(batch: Any) -> Tensor:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def zfun_pipeline(stage: int) -> Callable[[zf.Group, Task, LlamaForCausalLM], Step]:
    def make(group: zf.Group, task: Task, model: LlamaForCausalLM) -> Step:
        mesh = zf.mesh(group, pp=2, dp=2)
        params = taken(model)
        stages = pipeline_stages(model, 2)
        loss = zf.pipeline(
            stages.functions,
            mesh["pp"],
            "1f1b",
            num_micro_batches=task.num_micro_batches,
            leaves=stages.leaves,
        )
        zero = zf.zero(stage, loss, zf.optim.adamw(LEARNING_RATE), mesh["dp"])
        return stepping(zero, zero.init(params))

    return make


class TorchStage(nn.Module):
    """A half of a Llama: the embedding and the first layers, or the others and the head."""

    def __init__(self, model: LlamaForCausalLM, *, is_first: bool) -> None:
        super().__init__()
        half = len(model.model.layers) // 2
        self.is_first = is_first
        self.decoder: Any = copy.copy(model.model)
        self.decoder.__dict__["_modules"] = dict(model.model._modules)
        layers = model.model.layers[:half] if is_first else model.model.layers[half:]
        self.decoder._modules["layers"] = layers
        self.decoder.config = copy.copy(model.config)
        self.decoder.config.num_hidden_layers = half
        if is_first:
            self.decoder._modules["norm"] = nn.Identity()
        else:
            self.decoder._modules["embed_tokens"] = None
            self.head = model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids" if self.is_first else "inputs_embeds": x}
        x = self.decoder(**given, use_cache=False).last_hidden_state
        return x if self.is_first else self.head(x)


def torch_pipeline(group: zf.Group, task: Task, model: LlamaForCausalLM) -> Step:
    """``Schedule1F1B`` of two stages, each of them under DDP."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index = mesh.get_local_rank("pp")
    part = DistributedDataParallel(
        TorchStage(model, is_first=index == 0),
        process_group=mesh.get_group("dp"),
        gradient_as_bucket_view=True,
    )
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    schedule = Schedule1F1B(stage, task.num_micro_batches, loss_fn=loss_of)
    optimizer = adamw(part.parameters())

    def step(batch: Any) -> Tensor:
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The first stage knows no loss.
        return torch.stack(losses).mean().detach() if losses else torch.tensor(torch.nan)

    return step


def data_ranks(name: str) -> tuple[int, int]:
    """The data rank of this process, in the mesh of a contender, and their number."""
    rank = dist.get_rank()
    return (rank % 2 if "pp" in name else rank // 2), 2


CONTENDERS: dict[str, Callable[[zf.Group, Task, LlamaForCausalLM], Step]] = {
    "tp fsdp2": fsdp2_tensor,
    "tp zfun-3": zfun_tensor(3),
    "tp zfun-2": zfun_tensor(2),
    "pp torch": torch_pipeline,
    "pp zfun-0": zfun_pipeline(0),
    "pp zfun-1": zfun_pipeline(1),
}

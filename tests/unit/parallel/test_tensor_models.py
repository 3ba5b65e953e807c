"""Unmodified models of transformers, cut over a tensor axis, beside one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zfun as zf
from tests.conftest import FORM
from zfun.collectives import Group
from zfun.parallel import ParallelLoss
from zfun.testing import same_bits

transformers = pytest.importorskip("transformers")
from zfun.interop.transformers import tp_plan  # noqa: E402

VOCAB, TOKENS, ROWS = 64, 6, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
TWO_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{**GROUPED, "tie_word_embeddings": True})
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=4)),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**GROUPED, **TWO_EXPERTS, experts_implementation="batched_mm")
    ),
    "eager mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**GROUPED, **TWO_EXPERTS, experts_implementation="eager")
    ),
}
NUM_STEPS = 2
STAGES = (3, 0, 1, 2) if FORM == "all" else (3, 0)


class InDouble(TorchFunctionMode):
    """Norms and softmax of transformers compute in float32, whose rounding would hide errors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wide = lambda x: torch.float64 if x is torch.float32 else x
        if func is Tensor.float:
            func, args = Tensor.double, args[:1]
        return func(*map(wide, args), **{key: wide(x) for key, x in (kwargs or {}).items()})


@functools.cache
def model_of(name: str) -> Any:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = MAKERS[name]().double().train()
    with torch.no_grad():  # norms and biases that are not trivial
        for leaf in model.parameters():
            if leaf.dim() == 1:
                leaf += 0.1 * torch.randn_like(leaf)
    torch.random.set_rng_state(state)
    return model


def tokens(replica: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)


def loss_of(module: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    apply = zf.functional(module)

    def loss(params: Any, ids: Tensor) -> Tensor:
        with InDouble():
            return apply(params, input_ids=ids, labels=ids).loss

    return loss


OPTIMIZERS = {
    "sgd": (lambda: zf.optim.sgd(0.1), lambda leaves: torch.optim.SGD(leaves, lr=0.1)),
    "adamw": (
        lambda: zf.optim.adamw(1e-2, weight_decay=0.01),
        lambda leaves: torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01),
    ),
}


@functools.cache
def plain(name: str, optimizer: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses and the parameters of torch's own training on one process."""
    mine = copy.deepcopy(model_of(name))
    update, losses = OPTIMIZERS[optimizer][1](mine.parameters()), []
    for step in range(NUM_STEPS):
        update.zero_grad()
        with InDouble():
            both = [mine(input_ids=x, labels=x).loss for x in (tokens(0, step), tokens(1, step))]
        loss = torch.stack(both).mean()
        loss.backward()
        update.step()
        losses.append(loss.detach())
    return losses, {key: leaf.detach() for key, leaf in mine.named_parameters()}


def parallel(axis: Group, model: Any) -> ParallelLoss:
    return zf.tensor_parallel(loss_of(model), axis, tp_plan(model))


def train(
    group: Group,
    name: str,
    stage: int,
    optimizer: str,
    size: int = 2,
    make: Callable[[Group, Any], ParallelLoss] = parallel,
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, mesh = model_of(name), zf.mesh(group, dp=2, tp=size)
    loss = make(mesh["tp"], model)
    zero = zf.zero(
        stage, loss, OPTIMIZERS[optimizer][0](), mesh["dp"], bucket_bytes=4000, **options
    )
    state, losses = zero.init(zf.functional(model).params), []
    for step in range(NUM_STEPS):
        state, info = zero.step(state, tokens(mesh.coordinates["dp"], step))
        losses.append(info.loss)
    return losses, zero.params(state)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf, rtol=0, atol=1e-12, msg=path)


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_model_trains_as_on_one_process_and_alike_at_every_stage(name: str) -> None:
    losses, expected = plain(name, "sgd")
    first = None
    for stage in STAGES:
        found = zf.simulate(4, train, name, stage, "sgd")[0]
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
        assert_close(found[1], expected)
        assert first is None or same_bits(found, first)
        first = found


def test_adamw_on_four_tensor_ranks_is_torch_s() -> None:
    losses, expected = plain("neox", "adamw")
    found = zf.simulate(8, train, "neox", 3, "adamw", 4)[0]
    torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
    assert_close(found[1], expected)


def sequence_loss(module: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """A model takes the places of all tokens where it sees the tokens of one rank."""
    apply = zf.functional(module)

    def loss(params: Any, ids: Tensor) -> Tensor:
        with InDouble():
            places = torch.arange(TOKENS).expand(ROWS, -1)
            return apply(
                params, input_ids=ids, labels=ids, position_ids=places, use_cache=False
            ).loss

    return loss


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "neox"])
def test_a_sequence_that_is_cut_between_matrices_changes_nothing(name: str) -> None:
    losses, expected = plain(name, "sgd")
    make = lambda axis, model: zf.tensor_parallel(
        sequence_loss(model), axis, tp_plan(model), sequence_dim=1
    )
    for stage in STAGES:
        found = zf.simulate(4, train, name, stage, "sgd", 2, make)[0]
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
        assert_close(found[1], expected)

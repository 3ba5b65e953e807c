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
from zfun.errors import LeafError
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
STAGES = (3, 0, 1, 2) if FORM != "everyday" else (3, 0)


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


LIMIT = 0.5
OPTIMIZERS = {
    "sgd": (zf.optim.sgd(0.1), lambda leaves: torch.optim.SGD(leaves, lr=0.1)),
    "adamw": (
        zf.optim.adamw(1e-2, weight_decay=0.01),
        lambda leaves: torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01),
    ),
}


@functools.cache
def plain(name: str, optimizer: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses and the parameters of torch's own training on one process, with clipping."""
    mine = copy.deepcopy(model_of(name))
    update, losses = OPTIMIZERS[optimizer][1](mine.parameters()), []
    for step in range(NUM_STEPS):
        update.zero_grad()
        with InDouble():
            both = [mine(input_ids=x, labels=x).loss for x in (tokens(0, step), tokens(1, step))]
        loss = torch.stack(both).mean()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(mine.parameters(), LIMIT) > LIMIT
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
    clipped = zf.optim.chain(zf.optim.clip_by_global_norm(LIMIT), OPTIMIZERS[optimizer][0])
    zero = zf.zero(stage, loss, clipped, mesh["dp"], bucket_bytes=4000, **options)
    state, losses = zero.init(zf.functional(model).params), []
    for step in range(NUM_STEPS):
        state, info = zero.step(state, tokens(mesh.coordinates["dp"], step))
        losses.append(info.loss)
    return losses, zero.params(state)


def on_all_ranks(size: int, *arguments: Any, **options: Any) -> Any:
    """The results of a run, whose whole leaves have the same bits on every rank."""
    first, *others = zf.simulate(size, train, *arguments, **options)
    assert all(same_bits(other[1], first[1]) for other in others)
    return first


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf, rtol=0, atol=1e-12, msg=path)


def some(*everyday: str) -> list[Any]:
    """All models, of which the others take part in the long form."""
    return [
        name if name in everyday else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS
    ]


@pytest.mark.parametrize("name", some("llama", "neox", "eager mixtral"))
def test_a_model_trains_as_on_one_process_and_alike_at_every_stage(name: str) -> None:
    losses, expected = plain(name, "sgd")
    first = None
    for stage in STAGES:
        found = on_all_ranks(4, name, stage, "sgd")
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
        assert_close(found[1], expected)
        assert first is None or same_bits(found, first)
        first = found


def test_adamw_on_four_tensor_ranks_is_torch_s() -> None:
    losses, expected = plain("neox", "adamw")
    found = on_all_ranks(8, "neox", 3, "adamw", 4)
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


@pytest.mark.parametrize("name", [x for x in some("qwen2") if "mixtral" not in str(x)])
def test_a_sequence_that_is_cut_between_matrices_changes_nothing(name: str) -> None:
    losses, expected = plain(name, "sgd")
    make = lambda axis, model: zf.tensor_parallel(
        sequence_loss(model), axis, tp_plan(model), sequence_dim=1
    )
    for stage in STAGES:
        found = on_all_ranks(4, name, stage, "sgd", 2, make)
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
        assert_close(found[1], expected)


def test_recomputed_layers_and_micro_batches_change_no_bit() -> None:

    def again(fn: Callable[..., Any], *args: Any) -> Any:
        def block(*args: Any) -> Any:
            with InDouble():
                return fn(*args)

        return zf.remat(block)(*args)

    def recomputed(axis: Group, model: Any) -> ParallelLoss:
        mine = copy.deepcopy(model)
        mine.config.use_cache = False
        mine._set_gradient_checkpointing(True, gradient_checkpointing_func=again)
        return parallel(axis, mine)

    for stage in STAGES if FORM != "everyday" else (3,):
        plainly = on_all_ranks(4, "qwen3", stage, "sgd")
        assert same_bits(on_all_ranks(4, "qwen3", stage, "sgd", 2, recomputed), plainly)
        found = on_all_ranks(4, "qwen3", stage, "sgd", 2, parallel, num_micro_batches=2)
        torch.testing.assert_close(found[0], plainly[0], rtol=0, atol=1e-12)
        assert_close(found[1], plainly[1])


def test_bytes_and_messages_are_those_of_the_formula() -> None:
    """Each layer has two sums of activations in forward and two in backward; so has q, k and v."""
    model, layers, size = model_of("llama"), SIZES["num_hidden_layers"], 2
    whole = ROWS * TOKENS * SIZES["hidden_size"] * 8
    logits = ROWS * TOKENS * VOCAB * 8
    of_sum, of_gather = 2 * whole * (size - 1) // size, logits * (size - 1) // size

    def main(group: Group, make: Any, plan: dict[str, Any]) -> tuple[int, list[str]]:
        axis = zf.record(group)
        loss = make(axis, model, plan)
        params = {
            path: leaf
            if (rule := loss.model_axes[0].rule(path, leaf)) is None
            else rule.piece(leaf, axis.rank, size)
            for path, leaf in zf.functional(model).params.items()
        }
        zf.value_and_grad(loss)(params, tokens(0))
        kinds = [entry.kind for entry in axis.log if entry.name == "activations"]
        return axis.bytes_sent("activations"), kinds

    make = lambda axis, model, plan: zf.tensor_parallel(loss_of(model), axis, plan)
    plan = {glob: x for glob, x in tp_plan(model).items() if "embed" not in glob}
    sent, kinds = zf.simulate(size, main, make, plan)[0]
    assert sent == (4 * layers + 1) * of_sum + of_gather
    assert kinds.count("all_reduce") == 4 * layers + 1
    assert kinds.count("all_gather") == 1

    # A cut sequence sends as much: a half of each sum as a reduce-scatter, and a half as a gather.
    make = lambda axis, model, plan: zf.tensor_parallel(
        sequence_loss(model), axis, plan, sequence_dim=1
    )
    sent, kinds = zf.simulate(size, main, make, tp_plan(model))[0]
    assert sent == (4 * layers + 2) * of_sum + of_gather
    assert kinds.count("reduce_scatter") == 4 * layers + 2
    assert kinds.count("all_gather") == 4 * layers + 2 + 1


def test_the_cross_entropy_of_cut_logits_is_that_of_the_model() -> None:
    losses, expected = plain("qwen3", "sgd")

    def cut_head(axis: Group, model: Any) -> ParallelLoss:
        apply = zf.functional(model)

        def loss(params: Any, ids: Tensor) -> Tensor:
            with InDouble():
                logits = apply(params, input_ids=ids).logits
            assert logits.shape[-1] == VOCAB // axis.size
            return zf.parallel.vocab_cross_entropy(
                logits[:, :-1], ids[:, 1:], axis, vocab_size=VOCAB
            )

        return zf.tensor_parallel(loss, axis, tp_plan(model) | {"lm_head": "colwise"})

    found = on_all_ranks(4, "qwen3", 3, "sgd", 2, cut_head)
    torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
    assert_close(found[1], expected)


def test_heads_that_the_ranks_do_not_divide_are_refused_by_name() -> None:
    """Four ranks for two heads of keys: k_proj has 8 rows, which four ranks would divide."""
    with pytest.raises(LeafError, match="2 heads in leaf 'model"):
        zf.simulate(4, lambda group: train_alone(group, "llama"))


def train_alone(group: Group, name: str) -> None:
    model = model_of(name)
    zero = zf.zero(0, parallel(group, model), zf.optim.sgd(0.1), zf.collectives.single_group())
    zero.init(zf.functional(model).params)

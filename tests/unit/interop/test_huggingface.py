"""Unmodified Hugging Face models with sharded parameters."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests.slow_store import SlowStore
from zfun.collectives import Collective, Group, Work
from zfun.evaluation import bound
from zfun.testing import assert_same_bits, same_bits

transformers = pytest.importorskip("transformers")

VOCAB = 61
BUCKET_BYTES = 10_000
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def gpt2(dropout: float = 0.0) -> Any:
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=2, n_positions=32, **drop
        )
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA_LIKE)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_LIKE)),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    yield MAKERS[request.param]().train()
    torch.random.set_rng_state(state)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(
        0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(step * 10 + rank)
    )


def loss_of(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    apply = zf.functional(model)
    return lambda params, ids: apply(params, input_ids=ids, labels=ids).loss


def plain_gradients(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mine = copy.deepcopy(model)
    loss = mine(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in mine.named_parameters()}


def params_of(model: Any) -> dict[str, Tensor]:
    """Return the parameters with both names of the tied embedding, as a naive user would."""
    found = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    assert len(found) == 1 + len(dict(model.named_parameters()))
    return found


def test_gradients_on_one_rank_are_the_plain_ones_to_the_last_bit(model: Any) -> None:
    ids = tokens(0, 0)
    expected, grads = plain_gradients(model, ids)

    def main(group: Group) -> None:
        flat = zf.shard(dict(model.named_parameters()), group, bucket_bytes=BUCKET_BYTES)
        assert len(flat.buffers) > 3
        vg = zf.value_and_grad(zf.shard_params(loss_of(copy.deepcopy(model)), group))
        for _ in range(2):  # the second call follows the schedule
            loss, found = vg(flat, ids)
            assert_same_bits(loss, expected)
            assert_same_bits(zf.unshard(found), grads)

    zf.simulate(1, main)


def test_tied_embeddings_are_one_leaf(model: Any) -> None:
    ids = tokens(0, 0)
    _, grads = plain_gradients(model, ids)

    def main(group: Group) -> None:
        flat = zf.shard(params_of(model), group, bucket_bytes=BUCKET_BYTES)
        assert len(flat.layout.leaves) == len(grads)
        vg = zf.value_and_grad(zf.shard_params(loss_of(copy.deepcopy(model)), group))
        found = zf.unshard(vg(flat, ids)[1])
        tied = [name for name in found if name not in grads]
        assert tied == ["lm_head.weight"]
        assert_same_bits({name: found[name] for name in grads}, grads)
        whole = zf.unshard(flat)
        assert sum(whole["lm_head.weight"] is leaf for leaf in whole.values()) == 2

    zf.simulate(1, main)


def train(
    group: Group, model: Any, stage: int, num_steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    z = zf.zero(
        stage,
        loss_of(copy.deepcopy(model)),
        zf.optim.adamw(1e-3, weight_decay=0.01),
        group,
        bucket_bytes=BUCKET_BYTES,
    )
    state, losses = z.init(dict(model.named_parameters())), []
    for _ in range(num_steps):
        state, info = z.step(state, tokens(0, group.rank))
        losses.append(info.loss.item())
    return losses, z.params(state)


def plain_training(model: Any, num_steps: int, size: int) -> tuple[list[float], dict[str, Tensor]]:
    mine = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(size):
            ids = tokens(0, rank)
            loss = mine(input_ids=ids, labels=ids).loss / size
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in mine.named_parameters()}


def test_the_loss_curve_on_three_ranks_is_that_of_plain_torch(model: Any) -> None:
    num_steps = 4
    plain_losses, plain_params = plain_training(model, num_steps, 3)
    stage0 = zf.simulate(3, train, model, 0, num_steps)
    stage3 = zf.simulate(3, train, model, 3, num_steps)
    assert all(same_bits(run, stage0[0]) for run in [*stage0, *stage3])
    losses, params = stage3[0]
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    start = dict(model.named_parameters())
    for name, value in plain_params.items():
        # Compare changes, so that training without effect cannot pass. Adam divides by a root, so a
        # gradient near zero has no good relative error.
        moved, expected = params[name] - start[name].detach(), value - start[name].detach()
        assert float(expected.abs().max()) > 1e-3
        torch.testing.assert_close(moved, expected, rtol=0.02, atol=2e-4)


def test_half_precision_is_equal_across_stages(model: Any) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    runs = [run for stage in (0, 2, 3) for run in zf.simulate(2, train, half, stage, 2)]
    assert all(same_bits(run, runs[0]) for run in runs)
    assert {leaf.dtype for leaf in runs[0][1].values()} == {torch.bfloat16}


class GatherTracker(Group):
    """A group that keeps weak references to the storage of every gathered bucket."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group
        self.gathered: list[StorageWeakRef] = []
        self.peak = 0

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        pending = self._group.start(call, x, out)
        if call.name != "params":
            return pending

        def take() -> Tensor:
            result = pending.wait()
            self.gathered.append(StorageWeakRef(result.untyped_storage()))
            self.peak = max(self.peak, self.alive())
            return result

        return Work(take)

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.gathered)

    def settled(self) -> int:
        """Count living buffers, once the last collective has dropped all references."""
        deadline = time.monotonic() + 2.0
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.alive()


def test_nothing_gathered_stays_alive(model: Any) -> None:
    def main(group: Group) -> None:
        tracker = GatherTracker(group)
        after_forward: list[int] = []
        flat = zf.shard(dict(model.named_parameters()), tracker, bucket_bytes=BUCKET_BYTES)
        num_buckets = len(flat.buffers)
        inner = zf.shard_params(loss_of(copy.deepcopy(model)), tracker)

        def loss_fn(params: Any, ids: Tensor) -> Tensor:
            out = inner(params, ids)
            after_forward.append(tracker.settled())
            return out

        tracker.gathered.clear()
        vg = zf.data_parallel(zf.value_and_grad(loss_fn), tracker)
        for step in range(3):
            tracker.peak = 0
            _, grads = vg(flat, tokens(step, group.rank))
            assert grads.placement is zf.P
            # The loss and the autograd graph are alive here, but no gathered bucket is. Once the
            # order is known, one or two buckets are, with which backward begins.
            assert after_forward[step] in ((1, 2) if step else (0,))
            assert tracker.settled() == 0
            assert len(tracker.gathered) >= 2 * num_buckets * (step + 1) - num_buckets
            if step:
                # The tied embedding, the bucket in use, and the previous bucket.
                assert tracker.peak < num_buckets, num_buckets

    zf.simulate(2, main)


def test_the_check_for_gathered_memory_finds_a_bucket_that_is_kept() -> None:
    kept: list[Tensor] = []

    def main(group: Group) -> int:
        tracker = GatherTracker(group)
        flat = zf.shard({"w": torch.ones(40)}, tracker)

        def loss_fn(params: Any, batch: Tensor) -> Tensor:
            if group.rank == 0:
                kept.append(params["w"].detach())
            return (params["w"] * batch).sum()

        zf.value_and_grad(zf.shard_params(loss_fn, tracker))(flat, torch.ones(()))
        return tracker.settled()

    assert zf.simulate(2, main) == [1, 0]


def test_a_whole_step_keeps_nothing_gathered(model: Any) -> None:
    def main(group: Group) -> None:
        tracker = GatherTracker(group)
        z = zf.zero(
            3,
            loss_of(copy.deepcopy(model)),
            zf.optim.adamw(1e-3),
            tracker,
            bucket_bytes=BUCKET_BYTES,
        )
        state = z.init(dict(model.named_parameters()))
        for step in range(2):
            state, _ = z.step(state, tokens(step, group.rank))
            assert tracker.settled() == 0
        assert tracker.gathered

    zf.simulate(2, main)


def test_checkpointing_of_whole_blocks_gives_the_same_bits() -> None:
    """Call a block with parameters inside the checkpoint, so that recomputation receives the same
    ones.
    """
    ids = tokens(0, 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mine = gpt2().train()
    blocks = mine.transformer.h
    # These values differ from those of the model, so a recomputation with the latter would show.
    params = {name: p.detach() * 1.5 + 0.01 for name, p in mine.named_parameters()}
    calls: list[int] = []
    blocks[0].register_forward_pre_hook(lambda *_: calls.append(0))

    def loss_fn(params: Any, batch: tuple[Tensor, bool]) -> Tensor:
        ids, checkpointed = batch
        x = params["transformer.wte.weight"][ids] + params["transformer.wpe.weight"][: ids.shape[1]]
        for i, block in enumerate(blocks):
            prefix = f"transformer.h.{i}."
            own = {
                name.removeprefix(prefix): p
                for name, p in params.items()
                if name.startswith(prefix)
            }
            run = lambda x, block=block, own=own: functional_call(block, own, (x,))
            x = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
        logits = (
            nn.functional.layer_norm(
                x, (32,), params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
            )
            @ params["transformer.wte.weight"].t()
        )
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def main(group: Group, checkpointed: bool) -> Any:
        tracker = GatherTracker(group)
        flat = zf.shard(params, tracker, bucket_bytes=BUCKET_BYTES)
        vg = zf.value_and_grad(zf.shard_params(loss_fn, tracker))
        for _ in range(2):
            loss, grads = vg(flat, (ids, checkpointed))
        assert tracker.settled() == 0
        return loss, zf.unshard(grads)

    plain, remat = (zf.simulate(1, main, checkpointed) for checkpointed in (False, True))
    assert len(calls) == 2 + 4
    assert_same_bits(remat, plain)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = loss_fn(leaves, (ids, False))
    assert_same_bits(
        (
            loss.detach(),
            dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)),
        ),
        plain[0],
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_from_sharded_parameters(model: Any, mode: Callable[[], Any]) -> None:
    """The ranks generate sequences of different lengths."""
    mine = copy.deepcopy(model).eval()
    apply = zf.functional(mine)
    params = {name: leaf.clone() for name, leaf in apply.params.items()}
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def ids(rank: int) -> tuple[Tensor, int]:
        return tokens(0, rank)[:, : 5 + rank], 4 + 3 * rank

    expected = [
        mine.generate(ids(rank)[0], max_new_tokens=ids(rank)[1], **options) for rank in range(2)
    ]
    for parameter in mine.parameters():
        parameter.data.fill_(float("nan"))

    def main(group: Group) -> None:
        def generate(params: Any, batch: tuple[Tensor, int]) -> Tensor:
            return apply.bind(params).generate(batch[0], max_new_tokens=batch[1], **options)

        flat = zf.shard(params, group, bucket_bytes=BUCKET_BYTES)
        sharded = zf.shard_params(generate, group)
        for _ in range(2):
            with mode():
                assert_same_bits(sharded(flat, ids(group.rank)).clone(), expected[group.rank])

    zf.simulate(2, main)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_checkpointing_switch_of_a_model(model: Any) -> None:
    ids = tokens(0, 0)
    expected, grads = plain_gradients(model, ids)
    mine = copy.deepcopy(model)
    params = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    runs: list[int] = []
    first = next(
        module
        for module in mine.modules()
        if type(module).__name__.endswith(("Block", "DecoderLayer"))
    )
    first.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    for parameter in mine.parameters():
        parameter.data.fill_(float("nan"))
    mine.gradient_checkpointing_enable()

    def main(group: Group, stage: int) -> None:
        loss_fn = loss_of(mine)
        vg = zf.value_and_grad(zf.shard_params(loss_fn, group) if stage == 3 else loss_fn)
        value = zf.shard(params, group, bucket_bytes=BUCKET_BYTES) if stage == 3 else params
        for _ in range(2):
            loss, found = vg(value, ids)
            assert_same_bits(loss, expected)
            assert_same_bits(zf.unshard(found) if stage == 3 else found, grads)

    for stage in (0, 3):
        zf.simulate(1, main, stage)
    assert len(runs) == 2 * 4
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    without = zf.simulate(2, train, model, 0, 2)[0]
    for stage in (0, 2, 3):
        assert_same_bits(zf.simulate(2, train, again, stage, 2), [without] * 2)


def test_remat_may_stand_behind_the_checkpointing_switch_of_a_model(model: Any) -> None:
    """Use ``remat`` behind the model's own checkpointing switch."""
    ids = tokens(0, 0)
    expected, grads = plain_gradients(model, ids)
    mine = copy.deepcopy(model)
    params = dict(model.named_parameters())
    runs: list[int] = []
    first = next(
        module
        for module in mine.modules()
        if type(module).__name__.endswith(("Block", "DecoderLayer"))
    )
    first.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    for parameter in mine.parameters():
        parameter.data.fill_(float("nan"))
    mine._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=lambda fn, *args: zf.remat(fn)(*args)
    )

    def main(group: Group, sharded: bool) -> None:
        loss_fn = loss_of(mine)
        vg = zf.value_and_grad(zf.shard_params(loss_fn, group) if sharded else loss_fn)
        value = zf.shard(params, group, bucket_bytes=BUCKET_BYTES) if sharded else params
        for _ in range(2):
            loss, found = vg(value, ids)
            assert_same_bits(loss, expected)
            assert_same_bits(zf.unshard(found) if sharded else found, grads)

    for sharded in (False, True):
        zf.simulate(1, main, sharded)
    assert len(runs) == 2 * 4


def test_dropout_is_the_same_under_every_stage() -> None:
    """Run on one rank, because simulated ranks would share the module."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mine = gpt2(dropout=0.1).train()

    def main(group: Group, stage: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return train(group, mine, stage, 3)

    runs = [zf.simulate(1, main, stage)[0] for stage in (0, 1, 2, 3)]
    assert all(same_bits(run, runs[0]) for run in runs)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        other = zf.simulate(1, train, mine, 0, 3)[0]
    assert other[0] != runs[0][0]


@pytest.mark.parametrize("use_cache", [True, False])
def test_parameters_in_a_store_generate_the_tokens_of_plain_torch(
    model: Any, use_cache: bool
) -> None:
    """Each rank generates from its own prompt, and a number of tokens of its own."""
    plain = copy.deepcopy(model).eval()

    def generated(net: Any, rank: int) -> Tensor:
        fixed = {"do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
        return net.generate(tokens(0, rank)[:, :4], max_new_tokens=3 + 4 * rank, **fixed)

    def main(group: Group) -> Tensor:
        store = SlowStore()
        z = zf.zero(
            3,
            loss_of(model),
            zf.optim.sgd(0.1),
            group,
            bucket_bytes=BUCKET_BYTES,
            offload=zf.stores.Offload(params=store),
        )
        state = z.init(dict(model.named_parameters()))
        with bound(zf.functional(copy.deepcopy(model).eval()), state, group) as net:
            found = generated(net, group.rank)
        assert store.under_way == 0
        # The bucket in use, the one gathered ahead, the one that is read, and the tied embedding.
        assert store.most_living <= 4 < len(state.params.buffers)
        return found

    found = zf.simulate(2, main)
    assert all(torch.equal(found[rank], generated(plain, rank)) for rank in range(2))

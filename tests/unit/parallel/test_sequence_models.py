"""Unmodified models of transformers over a sequence axis, beside the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests.unit.parallel import sequence_models as models
from zfun.errors import OptionError
from zfun.interop.transformers import sequence_parallel
from zfun.parallel import sequence_batch, tiled, token_mean
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(120)

MESHES = [(2, 2), (1, 4)]
KINDS = [("ulysses", False), ("ring", False), ("ring", True)]
CASES = [(name, *kind, sizes) for name in models.NAMES for kind in KINDS for sizes in MESHES]
# Every model, every kind and both meshes occur.
EVERY_DAY = {
    ("Llama", "ulysses", False, (2, 2)),
    ("Qwen2", "ring", True, (2, 2)),
    ("Qwen3", "ulysses", False, (1, 4)),
    ("GPTNeoX", "ring", False, (1, 4)),
}


def assert_close(found: Any, expected: Any) -> None:
    losses, params = expected
    assert found[0] == pytest.approx(losses, abs=1e-12, rel=0)
    assert found[1].keys() == params.keys()
    for key, leaf in params.items():
        torch.testing.assert_close(found[1][key], leaf, atol=1e-12, rtol=0, msg=key)


@pytest.mark.parametrize(
    ("name", "kind", "zigzag", "sizes"),
    [
        pytest.param(*case, marks=() if case in EVERY_DAY else pytest.mark.slow, id=str(case))
        for case in CASES
    ],
)
def test_a_model_is_the_plain_one(name: str, kind: str, zigzag: bool, sizes: Any) -> None:
    for optimizer, stage in (("adamw", 3), ("sgd", 0)):
        expected = models.plain(name, optimizer, 3)
        for found in zf.simulate(
            4, lambda group: models.train(group, name, stage, optimizer, sizes, kind, zigzag)
        ):
            assert_close(found, expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (12, 3), (8, 8)])
def test_heads_that_the_axis_does_not_match(heads: int, kv_heads: int) -> None:
    found = zf.simulate(
        4,
        lambda group: models.train(
            group, "Llama", 2, "sgd", (1, 4), steps=1, heads=heads, kv_heads=kv_heads
        ),
    )
    assert_close(found[0], models.plain("Llama", "sgd", 1, heads, kv_heads))


@pytest.mark.parametrize(
    ("kind", "zigzag"), [KINDS[2], pytest.param(*KINDS[0], marks=pytest.mark.slow)]
)
def test_every_stage_has_the_same_bits(kind: str, zigzag: bool) -> None:
    def main(group: zf.Group, stage: int) -> Any:
        return models.train(group, "Qwen3", stage, kind=kind, zigzag=zigzag, steps=2)

    expected = zf.simulate(4, main, 0)
    assert_same_bits(expected, [expected[0]] * 4)
    for stage in (1, 2, 3):
        assert_same_bits(zf.simulate(4, main, stage), expected)


@pytest.mark.parametrize(
    ("kind", "zigzag"), [KINDS[0], pytest.param(*KINDS[2], marks=pytest.mark.slow)]
)
def test_the_plan_has_the_bytes_of_the_run(kind: str, zigzag: bool) -> None:
    sizes, model = {"dp": 2, "sp": 2}, models.model_of("Llama")

    def recipe(group: zf.Group) -> Any:
        mesh = zf.mesh(group, **sizes)
        apply = zf.functional(sequence_parallel(model, mesh["sp"], kind, zigzag=zigzag))

        def loss_fn(params: Any, batch: Any) -> Any:
            ids, places, labels = batch.values()
            logits = apply(params, input_ids=ids, position_ids=places).logits
            return token_mean(logits, labels)

        return zf.zero(3, loss_fn, zf.optim.sgd(0.1), mesh["dp", "sp"], bucket_bytes=8_000)

    def batch_of(mesh: Any) -> Any:
        mine = {key: leaf[mesh["dp"].rank, None] for key, leaf in models.batch_of(0).items()}
        return sequence_batch(mine, mesh["sp"], zigzag=zigzag)

    params = zf.functional(model).params

    def main(group: zf.Group) -> Any:
        log = zf.record(group)
        zero = recipe(log)
        state, batch = zero.init(params), batch_of(zf.mesh(group, **sizes))
        for _ in range(2):
            log.clear()
            state, _ = zero.step(state, batch)
        return [log.bytes_sent(axis=axis) for axis in sizes]

    batch = batch_of(zf.mesh(zf.collectives.abstract_group(4), **sizes))
    plan = zf.plan(recipe, params, batch, 4)
    assert zf.simulate(4, main) == [[plan.bytes_sent(axis=axis) for axis in sizes]] * 4


def test_messages_of_attention_are_those_of_the_formula() -> None:
    """Four all-to-alls in each layer, or a message less than ranks; twice, or thrice, in a step."""

    def main(group: zf.Group, kind: str, checkpointed: bool) -> Any:
        log = zf.record(group)
        model = sequence_parallel(models.model_of("Llama"), log, kind)
        if checkpointed:
            model.activation_checkpointing_enable()
        apply = zf.functional(model)
        batch = sequence_batch(models.batch_of(0), group)
        labels = batch.pop("shift_labels")
        vg = zf.value_and_grad(lambda p, b: token_mean(apply(p, **b).logits, labels))
        vg(apply.params, batch)
        names = ("ulysses", "ring attention")
        return [entry for entry in log.log if entry.name in names]

    samples, tokens, layers, head_dim, size = 2, models.TOKENS, 2, 6, 2
    of_a_head = samples * tokens * head_dim * 8 // size
    for kind, checkpointed, messages, nbytes in (
        ("ulysses", False, 2 * 4, 2 * (4 + 2 + 2 + 4) * of_a_head // size),
        ("ulysses", True, 3 * 4, 3 * (4 + 2 + 2 + 4) * of_a_head // size),
        ("ring", False, 3, 3 * (2 + 2) * of_a_head),
    ):
        found = zf.simulate(size, main, kind, checkpointed)[1]
        assert len(found) == layers * messages, kind
        assert sum(entry.sent_bytes for entry in found) == layers * nbytes, kind


def test_the_model_stays_as_it_is_and_computes_logits_of_tiles() -> None:
    """With the MLP and the loss in tiles, under gradient checkpointing, clipped."""
    model = models.model_of("Llama")
    before = model.config.to_dict(), model.config._attn_implementation, [*model.state_dict()]
    losses, whole = models.plain("Llama", "sgd", 1)
    first = {key: leaf.detach() for key, leaf in model.named_parameters()}
    grads = {key: (leaf - whole[key]) / 0.3 for key, leaf in first.items()}
    norm = torch.stack([leaf.square().sum() for leaf in grads.values()]).sum().sqrt()
    clipped = {key: leaf - 0.3 * grads[key] / ((norm + 1e-6) / 0.1) for key, leaf in first.items()}
    optimizer = zf.optim.chain(zf.optim.clip_by_global_norm(0.1), zf.optim.sgd(0.3))

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, dp=2, sp=2)
        cut = sequence_parallel(model, mesh["sp"])
        assert cut.lm_head.weight is model.lm_head.weight
        for layer in cut.model.layers:
            layer.mlp.forward = tiled(layer.mlp.forward, 3)
        apply = zf.functional(cut)
        end = tiled(lambda x, labels, *, head: token_mean(head(x), labels), 4)

        def loss_fn(params: Any, batch: Any) -> Any:
            bound = apply.bind(params)
            labels = batch.pop("shift_labels")
            return end(bound.model(**batch).last_hidden_state, labels, head=bound.lm_head)

        zero = zf.zero(3, loss_fn, optimizer, mesh["dp", "sp"], bucket_bytes=8_000)
        mine = {key: leaf[mesh["dp"].rank, None] for key, leaf in models.batch_of(0).items()}
        state, info = zero.step(zero.init(apply.params), sequence_batch(mine, mesh["sp"]))
        return [float(info.loss)], zero.params(state)

    assert_close(zf.simulate(4, main)[3], (losses, clipped))
    after = model.config.to_dict(), model.config._attn_implementation, [*model.state_dict()]
    assert after == before


def test_what_the_model_cannot_honour_is_refused_by_name() -> None:
    plain = models.model_of("Llama")
    ids = models.batch_of(0)["input_ids"]

    def main(group: zf.Group) -> None:
        rank = group.rank
        model = sequence_parallel(plain, group)
        batch = sequence_batch({"input_ids": ids}, group)
        mine, places = batch.values()
        local = torch.arange(8).expand(2, 8)
        for given, message in (
            ({"input_ids": mine}, "got no position_ids"),
            (batch | {"attention_mask": torch.ones(2, 8)}, "no attention_mask.*sequence_batch"),
            (batch | {"labels": mine}, "no labels, because.*token_mean"),
            (batch | {"position_ids": places.flip(1)}, f"rank {rank} of a sequence.* contiguous"),
            (sequence_batch({"input_ids": ids}, group, zigzag=True), "zigzag=False"),
        ):
            with pytest.raises(OptionError, match=message):
                model(**given)
        with pytest.raises(OptionError, match="no attention_mask"):
            model(mine, torch.ones(2, 8))
        if rank:
            with pytest.raises(OptionError, match=r"has the tokens \[8, 9.*got.* \[0, 1"):
                model(input_ids=mine, position_ids=local)
        cache = model(**batch, use_cache=True).cache
        with pytest.raises(OptionError, match="asks for a cache with tokens"):
            model(**batch, cache=cache)
        model.model.layers[0].self_attn.config._attn_implementation = "zfun_sequence"
        del model.model.layers[0].self_attn.zfun_attention
        with pytest.raises(OptionError, match="got LlamaAttention without one"):
            model(**batch)
        ring = sequence_parallel(plain, group, "ring", zigzag=True)
        zigzag = sequence_batch({"input_ids": ids}, group, zigzag=True)
        assert ring(**zigzag, use_cache=False).logits.shape == (2, 8, models.VOCAB)
        with pytest.raises(OptionError, match="LlamaAttention asks for softcap"):
            ring(**zigzag, softcap=3.0)
        ring.model.layers[0].self_attn.attention_dropout = 0.5
        with pytest.raises(OptionError, match="ring attention has no dropout"):
            ring(**zigzag)

    zf.simulate(2, main)


def test_models_that_the_axis_does_not_fit_are_refused_at_once() -> None:
    group = zf.collectives.abstract_group(3)
    with pytest.raises(OptionError, match="got 4 heads of q over 3 ranks; use an axis"):
        sequence_parallel(models.model_of("Llama"), group)
    with pytest.raises(OptionError, match="ulysses needs no zigzag order"):
        sequence_parallel(models.model_of("Llama"), group, zigzag=True)
    alone = zf.collectives.single_group()
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = models.transformers.Qwen2Config(**(models.SIZES | window | heads))
    model = sequence_parallel(models.transformers.Qwen2ForCausalLM(config), alone)
    with pytest.raises(OptionError, match="asks for a sliding window"):
        model(**sequence_batch({"input_ids": models.batch_of(0)["input_ids"]}, alone))
    model.config.is_causal = False
    with pytest.raises(OptionError, match="with is_causal=False"):
        sequence_parallel(model, group, "ring")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_are_refused(rope_type: str) -> None:
    config = models.transformers.LlamaConfig(**models.SIZES, num_attention_heads=4)
    model = models.transformers.LlamaForCausalLM(config)
    alone = zf.collectives.single_group()
    own = {"rope_theta": 1e4, "rope_type": rope_type}
    for rope in (own, {"full_attention": own}):
        model.config.rope_parameters = rope
        with pytest.raises(OptionError, match=f"LlamaForCausalLM has the rope_type '{rope_type}'"):
            sequence_parallel(model, alone)


def test_models_whose_tokens_meet_outside_of_attention_are_refused() -> None:
    alone = zf.collectives.single_group()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for name in ("Llama", "Qwen2", "Qwen3", "GPTNeoX", "Mixtral"):
        config = getattr(models.transformers, f"{name}Config")(**(models.SIZES | sizes))
        model = getattr(models.transformers, f"{name}ForCausalLM")(config)
        sequence_parallel(model, alone)
    model.config.layer_types = ["full_attention", "conv"]
    with pytest.raises(OptionError, match="MixtralForCausalLM has layers of conv"):
        sequence_parallel(model, alone)
    config = models.transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    bloom = models.transformers.BloomForCausalLM(config)
    with pytest.raises(OptionError, match="BloomForCausalLM has attention or mixing of its own"):
        sequence_parallel(bloom, alone)

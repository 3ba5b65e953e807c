from __future__ import annotations

import dataclasses
import sysconfig

import pytest
import torch

from zfun.demo._examples import load_example
from zfun.errors import OptionError

gpt = load_example("gpt")
text = load_example("text")
TINY = gpt.PRESETS["tiny"]


def test_an_example_is_loaded_once() -> None:
    assert load_example("gpt") is gpt


def test_the_presets_have_the_sizes_that_benchmarks_quote() -> None:
    def num_params(name: str) -> float:
        with torch.device("meta"):
            model = gpt.GPT(gpt.PRESETS[name])
        return sum(weight.numel() for weight in model.parameters())

    assert round(num_params("small") / 1e6, 1) == 25.5
    assert round(num_params("medium") / 1e6, 1) == 113.9


@pytest.mark.parametrize("tied", [False, True])
def test_the_pure_loss_is_the_loss_of_the_module(tied: bool) -> None:
    config = dataclasses.replace(TINY, tied=tied)
    loss_fn, params = gpt.init(config, seed=3)
    tokens = torch.randint(256, (2, config.length))

    model = gpt.GPT(config)
    model.load_state_dict(params, strict=not tied)
    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    assert ("head.weight" in params) is not tied
    assert torch.equal(loss_fn(params, (tokens, tokens)), expected)
    grads = torch.func.grad(loss_fn)(params, (tokens, tokens))
    assert all(grad.abs().sum() > 0 for grad in grads.values())


def test_init_leaves_the_callers_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = gpt.init(TINY, seed=1)[1], gpt.init(TINY, seed=1)[1]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_token_sees_the_future() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(TINY)
    tokens = torch.randint(256, (1, TINY.length))
    changed = tokens.clone()
    changed[0, -1] += 1 if tokens[0, -1] < 255 else -1
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_the_text_is_source_code_and_always_the_same() -> None:
    source = text.stdlib_bytes(limit=100_000)
    assert source.dtype == torch.uint8
    assert len(source) == 100_000
    assert b"import " in bytes(source.tolist())
    assert torch.equal(source, text.stdlib_bytes(limit=100_000))


def test_a_file_that_cannot_be_read_is_left_out(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.py").write_text("one\n")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("a test\n")
    (tmp_path / "d.py").write_text("two\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert bytes(text.stdlib_bytes().tolist()) == b"one\ntwo\n"


def test_no_text_at_all_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="standard library's source"):
        text.stdlib_bytes()


@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_whole_batch_is_the_same_for_every_number_of_ranks(size: int) -> None:
    source = torch.arange(1000).to(torch.uint8)
    alone = text.batches(source, 6, 8, seed=4)
    ranks = [text.batches(source, 6, 8, rank, size, seed=4) for rank in range(size)]
    previous = None
    for _ in range(3):
        tokens, targets = next(alone)
        shares = [next(rank) for rank in ranks]
        assert torch.equal(torch.cat([share[0] for share in shares]), tokens)
        assert torch.equal(torch.cat([share[1] for share in shares]), targets)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert previous is None or not torch.equal(tokens, previous)
        previous = tokens


def test_a_batch_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="5 sequences for 2 ranks"):
        next(text.batches(torch.zeros(100, dtype=torch.uint8), 5, 8, size=2))


def test_an_example_that_is_not_there_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(
        "zfun.demo._examples.__file__", str(tmp_path / "zfun" / "demo" / "_examples.py")
    )
    with pytest.raises(OptionError, match="examples/"):
        load_example("other")

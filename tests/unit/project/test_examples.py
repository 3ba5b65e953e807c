from __future__ import annotations

import copy
import dataclasses
import os
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfun as zf
from tests.distributed import processes
from zfun.collectives import Workers
from zfun.demo._examples import load_example
from zfun.errors import OptionError
from zfun.testing import assert_same_bits

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


def test_batches_go_on_from_any_step() -> None:
    source = torch.arange(1000).to(torch.uint8)
    for rank in range(2):
        whole = text.batches(source, 6, 8, rank, 2, seed=4)
        expected = [next(whole) for _ in range(5)]
        for first in (1, 2, 5):
            found = next(text.batches(source, 6, 8, rank, 2, seed=4, first=first))
            assert_same_bits(found, expected[first - 1])


def test_a_batch_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="5 sequences for 2 ranks"):
        next(text.batches(torch.zeros(100, dtype=torch.uint8), 5, 8, size=2))


def test_a_missing_example_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(
        "zfun.demo._examples.__file__", str(tmp_path / "zfun" / "demo" / "_examples.py")
    )
    with pytest.raises(OptionError, match="examples/"):
        load_example("other")


# The training examples: on one rank, two simulated ones and two processes, and in plain torch.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "vit": lambda params: torch.optim.AdamW(params, 1e-3),
    "gpt2": lambda params: torch.optim.AdamW(params, 1e-3),
    "unet": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "lora": lambda params: torch.optim.AdamW(params, 1e-2),
    "generate": lambda params: torch.optim.AdamW(params, 3e-3),
    "gan": lambda params: torch.optim.Adam(params, 1e-2, betas=(0.5, 0.999)),
}
NAMES = [
    pytest.param(
        name, marks=pytest.mark.slow if name in ("vit", "gpt2", "unet", "lora", "generate") else ()
    )
    for name in OPTIMIZERS
]
ROOT = Path(__file__).parents[3]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def run(group: zf.Group, name: str, stage: int) -> Any:
    return load_example(name).train(group, stage)


def mean_loss(model: Any, loss_of: Any, batches: Any) -> Tensor:
    """The loss of the batches of all ranks, with the mean of the buffers that each leaves."""
    shared = {id(x): x for x in model.parameters()}
    replicas = [copy.deepcopy(model, dict(shared)) for _ in batches]
    losses = [loss_of(net, batch) for net, batch in zip(replicas, batches, strict=True)]
    for path, x in model.named_buffers():
        left = torch.stack([net.get_buffer(path) for net in replicas])
        x.copy_(left.double().mean(0))
    if isinstance(losses[0], Tensor):
        return torch.stack(losses).mean()
    totals, weights = zip(*losses, strict=True)
    return torch.stack(totals).sum() / torch.stack(weights).sum()


def in_torch(name: str, size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train the module of an example with a loop of plain torch."""
    example = load_example(name)
    model = example.make_model()
    if name == "lora":
        for path, x in model.named_parameters():
            x.requires_grad_("lora" in path)
    optimizer, losses = OPTIMIZERS[name](model.parameters()), []
    steps = [*zip(*(example.make_data(rank, size) for rank in range(size)), strict=True)]
    held_out = steps.pop() if name == "generate" else None
    for batches in steps:
        optimizer.zero_grad()
        loss = mean_loss(model, example.loss_of, batches)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = dict([*model.named_parameters(), *model.named_buffers()])
    found = {path: x.detach() for path, x in found.items() if path in model.state_dict()}
    if held_out is not None:
        model.eval()
        with torch.no_grad():
            losses.append(mean_loss(model, example.loss_of, held_out).item())
        orders = [example.PROMPTS[rank::size] for rank in range(size)]
        found["tokens"] = torch.cat([example.generate(model, prompts) for prompts in orders])
    return losses, found


def settled(params: dict[str, Any]) -> dict[str, Any]:
    """Leave out the biases of GPT-2's keys, which attention does not depend on.

    Their gradients are rounding errors, which Adam enlarges.
    """
    return {
        path: [x for part, x in enumerate(leaf.chunk(3)) if part != 1]
        if path.endswith("c_attn.bias")
        else leaf
        for path, leaf in params.items()
    }


def gan_in_torch(size: int) -> tuple[list[float], dict[str, Any]]:
    example = load_example("gan")
    g, d = example.make_models()
    g_optimizer, d_optimizer = (OPTIMIZERS["gan"](net.parameters()) for net in (g, d))
    losses = []
    for batches in zip(*(example.make_data(rank, size) for rank in range(size)), strict=True):
        real, noise = (torch.cat(parts) for parts in zip(*batches, strict=True))
        d_optimizer.zero_grad()
        d_loss = (F.softplus(-d(real)) + F.softplus(d(g(noise).detach()))).mean()
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = F.softplus(-d(g(noise))).mean()
        g_loss.backward()
        g_optimizer.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses, {"g": dict(g.state_dict()), "d": dict(d.state_dict())}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with processes(2, timeout_s=100.0) as held:
        yield held


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the processes do: the bits of a product depend on that number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_as_plain_torch_does(name: str, workers: Workers) -> None:
    if name != "gan":
        pytest.importorskip("transformers")
    for size, stages in {1: [3], 2: [0, 3]}.items():
        losses, params = gan_in_torch(size) if name == "gan" else in_torch(name, size)
        for stage in stages:
            for found, values in zf.simulate(size, run, name, stage):
                torch.testing.assert_close(found, losses, **CLOSE)
                torch.testing.assert_close(settled(values), settled(params), **CLOSE)
    assert_same_bits(workers.run(run, name, 3), zf.simulate(2, run, name, 3))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_example_is_a_program(name: str, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("transformers")
    program, printed = str(ROOT / "examples" / f"{name}.py"), []
    for arguments in ([], ["--simulate", "2"]):
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        runpy.run_path(program, run_name="__main__")
        printed.append(capsys.readouterr().out)
    torchrun = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            program,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert torchrun.stdout == printed[1]
    assert "loss" in printed[0]


# torchdata 0.11 calls a function of torch that newer versions warn of.
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")
@pytest.mark.parametrize("stops", [(5,), (10, 15)])
def test_a_run_that_resumes_in_or_between_epochs_has_the_bits_of_one_that_does_not(
    stops: tuple[int, ...], tmp_path: Path
) -> None:
    """An epoch has 8 steps of two ranks; a plain loop over the whole data has the same losses."""
    pytest.importorskip("torchdata")
    example = load_example("resume")
    unbroken = zf.simulate(2, example.train, tmp_path / "unbroken", 20)
    parts = [zf.simulate(2, example.train, tmp_path / "resumed", end) for end in (*stops, 20)]
    for rank in range(2):
        losses = [loss for part in parts for loss in part[rank][0]]
        assert losses == unbroken[rank][0]
        assert_same_bits(parts[-1][rank][1], unbroken[rank][1])

    params = {path: x.requires_grad_() for path, x in example.initial().items()}
    optimizer, losses = torch.optim.AdamW(params.values(), 1e-2), []
    loaders = [example.make_loader(rank, 2) for rank in range(2)]
    for epoch in range(3):
        for _, sampler in loaders:
            sampler.set_epoch(epoch)
        for batches in zip(*(loader for loader, _ in loaders), strict=True):
            optimizer.zero_grad()
            loss = torch.stack([example.loss_fn(params, batch) for batch in batches]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(unbroken[0][0], losses[:20], **CLOSE)


def three_axes(group: zf.Group, *args: Any) -> Any:
    return load_example("three_d").train(group, *args)


FORKED = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("is_forked", [False, pytest.param(True, marks=FORKED)])
def test_three_axes_go_on_in_another_mesh_as_plain_torch_does(
    is_forked: bool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    example = load_example("three_d")
    model = example.make_model()
    optimizer, expected = torch.optim.AdamW(model.parameters(), 1e-2), []
    data = example.make_data(0, 1, after=0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**next(data)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())

    before = zf.simulate(8, three_axes, (2, 2, 2), 3, 1, tmp_path)
    if is_forked:
        with processes(4, timeout_s=250.0) as four:
            after = four.run(three_axes, (2, 1, 2), 1, 2, tmp_path)
    else:
        after = zf.simulate(4, three_axes, (2, 1, 2), 1, 2, tmp_path)
    for losses, _ in before:
        torch.testing.assert_close(losses, expected[:1], **CLOSE)
    for losses, params in after:
        torch.testing.assert_close(losses, expected[1:], **CLOSE)
        torch.testing.assert_close(params, dict(model.state_dict()), rtol=0, atol=1e-4)
        assert_same_bits(params, after[0][1])


@pytest.mark.parametrize("name", [*OPTIMIZERS, "resume", "three_d"])
def test_an_example_fits_on_a_page(name: str) -> None:
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 100

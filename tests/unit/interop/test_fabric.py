"""The strategy for Lightning Fabric: plain Fabric is the oracle, on one rank.

``tests/distributed/test_lightning.py`` compares with DDP on two processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zfun.errors import OptionError
from zfun.testing import assert_same_bits

pytest.importorskip("lightning")

from tests.interop import fabrics
from zfun.interop.lightning import ZfunFabricStrategy

# Fabric warns of torch's own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
]
STAGES = range(4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", fabrics.LOOPS)
def test_a_loop_is_that_of_plain_fabric(name: str, stage: int) -> None:
    loop = fabrics.LOOPS[name]
    expected = loop(fabrics.fabric_of("auto"))
    found = loop(fabrics.fabric_of(ZfunFabricStrategy(stage=stage)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["zfun", "zfun_stage_1", "zfun_stage_2", "zfun_stage_3_offload"])
def test_every_name_makes_its_strategy(name: str) -> None:
    fabric = fabrics.fabric_of(name)
    strategy = fabric.strategy
    assert isinstance(strategy, ZfunFabricStrategy)
    recipe = strategy.recipe()
    assert recipe.stage == (int(name[11]) if "stage" in name else 2)
    assert (recipe.optimizer_store is not None) == name.endswith("offload")
    expected = fabrics.closures(fabrics.fabric_of("auto"))
    torch.testing.assert_close(fabrics.closures(fabric), expected)


def made(strategy: Any = "zfun_stage_3", **options: Any) -> tuple[Any, Any, Any]:
    fabric = fabrics.fabric_of(strategy, **options)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return fabric, *fabric.setup(model, torch.optim.Adam(model.parameters(), 0.1))


def trained(fabric: Any, model: Any, optimizer: Any, steps: int = 3) -> Any:
    for _ in range(steps):
        fabric.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), optimizer.state_dict()


def test_files_go_from_plain_fabric_to_the_strategy_and_back(tmp_path: Path) -> None:
    whole = trained(*made("auto"), steps=6)
    for first, second in (("auto", "zfun_stage_3"), ("zfun_stage_3", "auto")):
        fabric, model, optimizer = made(first)
        trained(fabric, model, optimizer)
        fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        fabric, model, optimizer = made(second)
        fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        torch.testing.assert_close(trained(fabric, model, optimizer), whole)


def test_a_filter_leaves_values_out_and_one_object_is_loaded(tmp_path: Path) -> None:
    fabric, model, _ = made()
    path = tmp_path / "a.ckpt"
    fabric.save(path, {"model": model}, filter={"model": lambda name, value: name == "bias"})
    assert list(torch.load(path)["model"]) == ["bias"]
    torch.save({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, path)
    fabric.load_raw(path, model)
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_narrow_precisions_keep_master_weights_in_files(precision: str, tmp_path: Path) -> None:
    strategy = ZfunFabricStrategy(stage=3, loss_scale=128)
    fabric, model, optimizer = made(strategy, precision=precision)
    before, _ = trained(*made("auto"), steps=0)
    out = model(torch.ones(2, 3))
    assert out.dtype is torch.float32
    trained(fabric, model, optimizer)
    path = tmp_path / "a.ckpt"
    fabric.save(path, {"model": model})
    saved = torch.load(path)["model"]
    assert all(x.dtype is torch.float32 for x in saved.values())
    expected, _ = trained(*made("auto"))
    change = saved["weight"] - before["weight"]
    torch.testing.assert_close(change, expected["weight"] - before["weight"], rtol=0.02, atol=1e-3)
    again = made(precision=precision)
    again[0].load(path, {"model": again[1]})
    again[0].save(path, {"model": again[1]})
    assert_same_bits(torch.load(path)["model"], saved)


def test_a_model_without_values_gets_them_at_setup() -> None:
    fabric = fabrics.fabric_of("zfun_stage_3")
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert model[0].weight.is_meta
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(wrapped(torch.randn(4, 3)).square().mean())
    optimizer.step()
    values = model.state_dict()
    assert all(x.isfinite().all() for x in values.values())
    assert values["0.weight"].std() > 0.1


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_without_an_optimizer_is_evaluated(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    expected = model(torch.ones(2, 3))
    wrapped = fabrics.fabric_of(f"zfun_stage_{stage}").setup(model)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(torch.ones(2, 3)), expected)


@pytest.mark.parametrize("again", [True, False])
def test_a_compiled_model_trains(again: bool) -> None:
    found = []
    for strategy in ("auto", "zfun_stage_3"):
        fabric = fabrics.fabric_of(strategy)
        compiled: Any = torch.compile(fabrics.net(), backend="eager")
        optimizer: Any = torch.optim.SGD(compiled.parameters(), 0.1)
        model, optimizer = fabric.setup(compiled, optimizer, _reapply_compile=again)
        for batch in fabrics.rows(fabric, 2):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: x.detach().clone() for name, x in compiled.named_parameters()})
    torch.testing.assert_close(*found)


def two_steps() -> None:
    fabric, model, optimizer = made()
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 3)).mean())
        optimizer.step()


def set_up(*optimizers: Callable[[nn.Module], Any]) -> None:
    fabric = fabrics.fabric_of("zfun_stage_2")
    model = nn.Linear(3, 1)
    fabric.setup_module(model)
    for make in optimizers:
        fabric.setup_optimizers(make(model))


def earlier() -> None:
    fabric, model, optimizer = made()
    fabric.setup_optimizers(torch.optim.SGD([model.weight], 0.1))
    fabric.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()


def clipped(**options: Any) -> None:
    fabric, model, optimizer = made()
    fabric.backward(model(torch.ones(2, 3)).mean() * options.pop("scale", 1.0))
    fabric.clip_gradients(model, optimizer, **options)


def configured(**sections: Any) -> None:
    made(ZfunFabricStrategy(config=sections))


def scaled() -> None:
    fabric, model, _ = made(precision="16-true")
    other = nn.Linear(3, 1)
    fabric.setup(other, torch.optim.SGD(other.parameters(), 0.1))
    fabric.backward(model(torch.ones(2, 3)).mean())


def late() -> None:
    fabric, model = fabrics.fabric_of("zfun_stage_2"), fabrics.Gan()
    critic = model.critic[2]
    params = [p for p in model.critic.parameters() if all(p is not x for x in critic.parameters())]
    wrapped, _, sgd = fabric.setup(
        model,
        torch.optim.Adam(model.generator.parameters(), 0.1),
        torch.optim.SGD(params, 0.1),
    )
    sgd.add_param_group({"params": critic.parameters()})
    fabric.backward(wrapped(torch.ones(2, 3).double()))
    sgd.step()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gradients that stay": (two_steps, r"got another step after it without zero_grad"),
    "a step of an earlier optimizer": (
        earlier,
        "got a step of another one; step the last one, or give each parameters of its own",
    ),
    "an optimizer of no model": (
        lambda: set_up(lambda _: torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)),
        "got SGD of no model; pass",
    ),
    "a norm of another order": (lambda: clipped(max_norm=1.0, norm_type=1.0), "leave norm_type"),
    "a configuration's optimizer": (
        lambda: configured(optimizer={"type": "SGD", "params": {"lr": 0.1}}),
        r"fabric.setup\(\) takes the optimizer; got one",
    ),
    "accumulation": (
        lambda: configured(gradient_accumulation_steps=4),
        "accumulate in the loop of Fabric",
    ),
    "a loss scale and two models": (scaled, r"got 2; pass model= to fabric.backward\(\)"),
    "a parameter of later": (late, "got a group with leaf 'critic.2.bias' of another one"),
    "float64": (lambda: made(precision="64-true"), "got '64-true'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_hold_is_refused(case: str) -> None:
    run, words = REFUSED[case]
    with pytest.raises(OptionError, match=words):
        run()


def test_a_norm_that_is_not_finite_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="is nan, so it cannot be clipped"):
        clipped(max_norm=1.0, scale=float("nan"))


def test_elements_of_gradients_are_clipped() -> None:
    fabric, model, optimizer = made()
    before = [x.detach().clone() for x in model.parameters()]
    fabric.backward(model(torch.ones(2, 3)).mean() * 7)
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    assert all(x.grad.abs().le(0.5).all() for x in model.parameters())
    optimizer.step()
    assert any(not x.equal(old) for x, old in zip(model.parameters(), before, strict=True))


def test_gradients_that_cannot_be_clipped_stay_as_they_are() -> None:
    """Later passes and a bound of infinity find no earlier bound."""
    fabric, model, optimizer = made()
    engine = fabric.strategy.engines[0]
    fabric.backward(model(torch.ones(2, 3)).mean() * float("inf"))
    with pytest.raises(RuntimeError, match="so it cannot be clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1e-9)
    assert not engine.norm().isfinite()


def test_a_configuration_clips_each_step() -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    fabric = fabrics.fabric_of(ZfunFabricStrategy(config=config))
    model = nn.Linear(3, 1)
    wrapped, sgd = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    fabric.backward(wrapped(100.0 * torch.ones(1, 3)).sum())
    sgd.step()
    moved = [x - before[name] for name, x in model.state_dict().items()]
    assert torch.cat([x.flatten() for x in moved]).norm() == pytest.approx(0.5)

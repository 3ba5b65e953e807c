"""Lightning on two processes: plain torch on the joined batch is the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import processes
from tests.distributed.test_deepspeed_scripts import PROGRAMS
from tests.distributed.test_deepspeed_scripts import run as started
from zfun.collectives import Group, Workers
from zfun.errors import CollectiveMismatch
from zfun.testing import assert_same_bits

pytest.importorskip("lightning")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
STAGES = ["zfun_stage_1", "zfun_stage_2", "zfun_stage_3", "zfun_stage_3_offload"]


# All but "unfreezing", of which DDP does not sum the gradients.
FABRIC_LOOPS = [
    "accumulation",
    "two_models",
    "two_optimizers",
    "muon_and_adamw",
    "one_optimizer_of_two_models",
    "closures",
    "gradients",
    "clips",
    "a_lightning_module",
    "later_optimizers",
    "set_up_again",
    "copies",
]


def call(group: Group, name: str, *args: Any) -> Any:
    """Call a function of ``tests.interop.lightnings``, which only the ranks import."""
    from tests.interop import lightnings

    return getattr(lightnings, name)(group, *args)


def run(group: Group, *args: Any) -> Any:
    """Run a loop of Fabric."""
    from tests.interop import fabrics

    return fabrics.run(group, *args)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with processes(2, timeout_s=250.0) as held:
        yield held


@pytest.fixture(scope="module")
def fits(workers: Workers, tmp_path_factory: Any) -> dict[str, tuple[list[Any], str]]:
    """The results of the ranks under each strategy, and the folder of the checkpoints."""
    found = {}
    for name in STAGES:
        folder = str(tmp_path_factory.mktemp(name))
        found[name] = workers.run(call, "fit", name, folder), folder
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settled(params: dict[str, Any]) -> dict[str, Any]:
    """Leave out biases of GPT-2's keys, whose gradients are rounding errors that Adam enlarges."""
    return {path: leaf for path, leaf in params.items() if not path.endswith("c_attn.bias")}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", STAGES)
def test_a_fit_is_that_of_plain_torch_on_the_joined_batch(name: str, fits: Any) -> None:
    from tests.interop import lightnings

    ranks, _ = fits[name]
    expected = lightnings.in_torch(2)
    close = {"rtol": 0.0, "atol": 1e-5}
    losses = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert len(ranks[0]["norms"]) == lightnings.STEPS
    torch.testing.assert_close(losses, expected["losses"], **close)
    for rank in ranks:
        torch.testing.assert_close(rank["rates"], expected["rates"], **close)
        torch.testing.assert_close(rank["norms"], expected["norms"], **close)
        torch.testing.assert_close(
            settled(rank["params"]), settled(expected["params"]), rtol=0.0, atol=1e-4
        )


@pytest.mark.parametrize("name", STAGES[1:])
def test_the_stages_have_the_same_bits(name: str, fits: Any) -> None:
    assert_same_bits(fits[name][0], fits["zfun_stage_1"][0])


@pytest.mark.parametrize("name", ["zfun_stage_2", "zfun_stage_3_offload"])
def test_resuming_in_the_middle_has_the_same_bits(
    name: str, fits: Any, workers: Workers, tmp_path: Path
) -> None:
    from tests.interop import lightnings

    whole, folder = fits[name]
    middle = f"{folder}/epoch=0.ckpt"
    found = workers.run(call, "fit", name, str(tmp_path), lightnings.STEPS, middle)
    for rank, other in zip(found, whole, strict=True):
        half = len(other["losses"]) // 2
        assert rank["count"] == half
        assert rank["losses"] == other["losses"][half:]
        assert rank["norms"] == other["norms"][half // lightnings.ACCUMULATE :]
        assert_same_bits(rank["params"], other["params"])


def test_a_collated_checkpoint_loads_in_plain_lightning(fits: Any, tmp_path: Path) -> None:
    from tests.interop import lightnings
    from zfun.interop.lightning import collate

    ranks, folder = fits["zfun_stage_3"]
    file = collate(f"{folder}/epoch=1.ckpt", tmp_path / "model.ckpt")
    model = lightnings.Gpt2.load_from_checkpoint(file)
    assert_same_bits(dict(model.state_dict()), ranks[0]["params"])


def test_an_evaluation_of_a_checkpoint(fits: Any, workers: Workers, tmp_path: Path) -> None:
    from tests.interop import lightnings

    ranks, folder = fits["zfun_stage_3"]
    path = f"{folder}/epoch=1.ckpt"
    found = workers.run(call, "evaluated", "zfun_stage_3", str(tmp_path), path)
    model = lightnings.Gpt2()
    model.load_state_dict(ranks[0]["params"])
    tokens = lightnings.lines(2, 2)
    with torch.no_grad():
        expected = float(model.net(input_ids=tokens, labels=tokens).loss)
        predicted = model.net(input_ids=tokens).logits.argmax(-1)
    for number, rank in enumerate(found):
        assert rank["val_loss"] == pytest.approx(expected, abs=1e-5)
        assert rank["test_loss"] == pytest.approx(expected, abs=1e-5)
        assert torch.equal(torch.cat(rank["predicted"]), predicted[number::2])


@pytest.mark.usefixtures("one_thread")
def test_manual_optimization_with_two_optimizers(workers: Workers, tmp_path: Path) -> None:
    from tests.interop import lightnings

    expected = lightnings.gan_in_torch(2)
    runs = {
        name: workers.run(call, "fit_gan", name, str(tmp_path / name))
        for name in ("zfun_stage_1", "zfun_stage_3")
    }
    assert_same_bits(runs["zfun_stage_1"], runs["zfun_stage_3"])
    first, second = runs["zfun_stage_3"]
    losses = [sum(pair) / 2 for pair in zip(first["losses"], second["losses"], strict=True)]
    torch.testing.assert_close(losses, expected["losses"], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(first["params"], expected["params"], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_narrow_precisions_train(precision: str, workers: Workers, tmp_path: Path) -> None:
    args = ("zfun_stage_3", str(tmp_path), 8, None, 0, precision)
    found = workers.run(call, "fit", *args)
    assert found[0]["losses"][-1] < found[0]["losses"][0]
    assert_same_bits(found[0]["params"], found[1]["params"])
    assert found[0]["params"]["net.transformer.wte.weight"].dtype is torch.float32


def test_a_checkpoint_beside_an_average_has_the_parameters(
    workers: Workers, tmp_path: Path
) -> None:
    found = [workers.run(call, "averaged", name, str(tmp_path)) for name in ("ddp", "zfun_stage_3")]
    torch.testing.assert_close(settled(found[1][0]), settled(found[0][0]))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", FABRIC_LOOPS)
def test_a_loop_of_fabric_is_that_of_ddp(name: str, workers: Workers) -> None:
    expected = workers.run(run, "ddp", name)
    for stage in (1, 2, 3):
        found = workers.run(run, f"zfun_stage_{stage}", name)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_of_fabric_on_one_rank_is_named(stage: int, tmp_path: Path) -> None:
    from tests.interop import fabrics

    path = str(tmp_path / "a.ckpt")
    with processes(2, timeout_s=100.0, collective_timeout_s=90.0) as own:
        outcomes = own.outcomes(fabrics.save_alone, f"zfun_stage_{stage}", path)
    for outcome in outcomes:
        with pytest.raises(CollectiveMismatch, match=r"save\(\) of Fabric, which all") as caught:
            raise outcome  # pyrefly: ignore[bad-raise]
        caught.match(r"barrier\(\) of Fabric, which all ranks call")


@pytest.mark.usefixtures("one_thread")
def test_what_fabric_unfreezes_is_trained_on_all_ranks(workers: Workers) -> None:
    from tests.interop import fabrics

    expected = workers.run(run, "zfun_stage_1", "unfreezing")
    assert_same_bits(workers.run(run, "zfun_stage_3", "unfreezing"), expected)
    optimizers, models = zip(*expected, strict=True)
    plain = fabrics.unfreezing(fabrics.fabric_of("auto"))
    for optimizer, [model] in zip(optimizers, models, strict=True):
        torch.testing.assert_close(optimizer, plain[0])
        torch.testing.assert_close(model, {name: plain[1][0][name] for name in model})


@pytest.mark.filterwarnings("ignore")  # of plain Lightning, in this process
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["Unfreezes", "Manual", "Buffers"])
def test_a_loop_of_users_is_that_of_plain_lightning(
    name: str, workers: Workers, tmp_path: Path
) -> None:
    from tests.interop import lightnings

    expected = lightnings.fit_loop(None, "auto", str(tmp_path / "plain"), name)
    for stage in (1, 3):
        folder = str(tmp_path / str(stage))
        found = workers.run(call, "fit_loop", f"zfun_stage_{stage}", folder, name)
        for rank in found:
            torch.testing.assert_close(rank, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_hooks_that_change_a_checkpoint_on_one_rank(
    rank: int, workers: Workers, tmp_path: Path
) -> None:
    expected = workers.run(call, "resumed", "ddp", str(tmp_path), f"values of rank {rank}")
    for strategy in ("zfun_stage_2", "zfun_stage_3"):
        # DDP takes the values of rank 0.
        values = workers.run(call, "resumed", strategy, str(tmp_path), f"values of rank {rank}")
        torch.testing.assert_close(values, expected)
        for part in ("moments", "states"):
            change = f"{part} of rank {rank}"
            for words in workers.run(call, "resumed", strategy, str(tmp_path), change):
                assert "the same states of optimizers after on_load_checkpoint()" in words
                assert "changed on rank" in words


def test_the_example_is_a_program(tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "lightning_fit.py")
    done = subprocess.run(
        [sys.executable, program, "--devices", "2", "--lines", "32", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "val_loss" in done.stdout
    assert "parameters in model.ckpt" in done.stdout


# Lightning's own strategies for DeepSpeed, over the names of zfun. The strategies refuse CPUs, so
# the program patches two checks: that of the accelerator's class, and that devices have the indices
# of the ranks, because CPUs have none. All else is Lightning's own. DDP in float32 is the oracle.

OWN_STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The numbers of each rank under Lightning's own strategies."""
    folder = tmp_path_factory.mktemp("runs")
    flags = (
        "-n",
        "2",
        "--no_local_rank",
        str(PROGRAMS / "deepspeed_lightning_runs.py"),
        str(folder),
    )
    done = started("-m", "zfun.interop.deepspeed", *flags, folder=folder, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_a_fit_of_lightnings_own_strategy_is_that_of_ddp(own: Any) -> None:
    for rank in own:
        fits = rank["fits"]
        assert len(fits["ddp"]["losses"]) == 24
        assert fits["ddp"]["steps"] == 12
        torch.testing.assert_close(fits[OWN_STAGES[0]], fits["ddp"], **CLOSE)
        for name in fits.keys() - {"ddp"}:
            assert fits[name] == fits[OWN_STAGES[0]], name


def test_a_resumed_fit_of_the_own_strategy_goes_on_bitwise(own: Any) -> None:
    for rank in own:
        for name in OWN_STAGES:
            whole, resumed = rank["fits"][name], rank["resumed"][name]
            assert resumed["losses"] == whole["losses"][8:]
            assert resumed["rates"] == whole["rates"][8:]
            assert resumed["validated"] == whole["validated"][1:]
            assert resumed["steps"] == whole["steps"]


def test_evaluations_of_the_own_strategy_are_those_of_ddp(own: Any) -> None:
    for rank in own:
        runs = rank["evaluated"]
        assert runs["ddp"]["val_loss"] == pytest.approx(rank["fits"]["ddp"]["validated"][1])
        for name in OWN_STAGES:
            torch.testing.assert_close(runs[name], runs["ddp"], **CLOSE)
        torch.testing.assert_close(rank["whole"], runs["ddp"], **CLOSE)


def test_one_module_is_fitted_evaluated_and_fitted_again(own: Any) -> None:
    for rank in own:
        runs = rank["again"]
        for name in OWN_STAGES:
            torch.testing.assert_close(runs[name], runs["ddp"], **CLOSE)
            assert_same_bits(runs[name], runs[OWN_STAGES[0]])


def test_a_directory_becomes_a_file_with_hyperparameters(own: Any) -> None:
    for rank in own:
        for name in OWN_STAGES:
            file = rank["converted"][name]
            assert file["hyperparameters"]["note"] == Path("any object")
            assert_same_bits(file["values"], file["expected"])


def test_the_configuration_has_the_options_of_the_trainer(own: Any) -> None:
    from tests.interop import own_strategies

    for rank in own:
        runs = rank["configured"]
        for stage, fit in runs.items():
            config = fit["config"]
            assert config["gradient_accumulation_steps"] == own_strategies.ACCUMULATE
            assert config["gradient_clipping"] == own_strategies.CLIP
            assert config["train_micro_batch_size_per_gpu"] == own_strategies.BATCH
            numbers = {key: value for key, value in fit.items() if key != "config"}
            assert numbers == {key: runs[1][key] for key in numbers}, stage
        assert runs[1]["losses"][-1] < runs[1]["losses"][7]


def test_the_summary_has_the_size_of_a_piece(own: Any) -> None:
    for rank in own:
        assert rank["summary"] == (81, [41, 28, 8, 0, 5])


def test_a_loop_of_fabrics_own_strategy_is_that_of_ddp(own: Any) -> None:
    for rank in own:
        loops = rank["loops"]
        for name, loop in loops.items():
            assert loop["again"] == loop["losses"][4:]
            assert loop["seen"] == 4
            torch.testing.assert_close(loop["losses"], loops["ddp"]["losses"], **CLOSE)
            assert name == "ddp" or loop == loops[OWN_STAGES[0]]

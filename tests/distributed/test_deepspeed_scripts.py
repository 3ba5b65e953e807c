"""Scripts that import DeepSpeed, in processes, with the names of zfun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_forked
from zfun.interop.deepspeed.launcher.runner import main

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.processes


def run(
    *command: str, folder: Path, timeout: float = 110, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


INSTALLED = """
import warnings
warnings.simplefilter("error", UserWarning)
from zfun.interop.deepspeed import install
install()
install()
import importlib.metadata, importlib.util, sys
assert importlib.util.find_spec("deepspeed") and "deepspeed" not in sys.modules
assert importlib.metadata.version("deepspeed") == "0.19.8"
assert importlib.metadata.distribution("deepspeed").metadata["Name"] == "deepspeed"
assert [one.version for one in importlib.metadata.distributions(name="deepspeed")] == ["0.19.8"]
import deepspeed, zfun.interop.deepspeed as own
assert deepspeed is own and deepspeed.__version__ == "0.19.8"
import deepspeed.ops.adam, deepspeed.runtime.engine
assert deepspeed.ops.adam is own.ops and deepspeed.runtime.engine is own
assert importlib.util.find_spec("deepspeed.nonsense") is None
from transformers.integrations import is_deepspeed_available
from accelerate.utils import DummyOptim, is_deepspeed_available as also
assert is_deepspeed_available() and also()
from tools import deepspeed_names
page = deepspeed_names.PAGE.read_text(encoding="utf-8")
assert len(deepspeed_names.LINES) >= 60
assert deepspeed_names.with_tables(page) == page, "run python -m tools.deepspeed_names"
"""
LATE = """
import accelerate.utils
from zfun.interop.deepspeed import install
install()
"""
# A package with a version stands for DeepSpeed itself.
OTHER = """
import sys
sys.path.append("other")
from zfun.interop.deepspeed import install
install()
import deepspeed
deepspeed.initialize
"""


def test_import_deepspeed_gives_the_names_of_zfun(tmp_path: Path) -> None:
    code, errors = run_forked(INSTALLED, tmp_path, timeout_s=100.0)
    assert code == 0, errors
    code, errors = run_forked(LATE, tmp_path, timeout_s=100.0)
    assert code == 1
    assert "OptionError: install() comes before" in errors
    assert "got accelerate, which is already imported" in errors
    info = tmp_path / "other" / "deepspeed-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n")
    (tmp_path / "other" / "deepspeed.py").touch()
    code, errors = run_forked(OTHER, tmp_path, timeout_s=100.0)
    assert code == 0, errors
    assert "DeepSpeed 9.9, which is installed, is not used" in errors


# A script that imports nothing: the launcher has the code, whatever the ranks are.
FAILS = """
import os, sys
sys.exit(7 * int(os.environ["RANK"]))
"""


def test_the_launcher_starts_ranks_and_ends_with_their_code(tmp_path: Path) -> None:
    launch = ("-m", "zfun.interop.deepspeed")
    script = str(PROGRAMS / "deepspeed_script.py")
    done = run(*launch, "-n", "2", script, "--deepspeed", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n"))[1:] == [
        f"rank {rank} of 2: {rank} 0.19.8 1" for rank in range(2)
    ]
    (tmp_path / "fails.py").write_text(FAILS)
    done = run(*launch, "--num_gpus", "2", "fails.py", folder=tmp_path)
    assert done.returncode == 7
    done = run(*launch, "python", "-c", "import deepspeed, sys; sys.exit(5)", folder=tmp_path)
    assert done.returncode == 5


def test_the_launcher_refuses_a_script_that_is_missing() -> None:
    with pytest.raises(SystemExit, match=r"a script or a command; got 'missing\.py'") as ended:
        main(["missing.py"])
    assert isinstance(ended.value.code, str)  # Python prints a text, and ends with 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_of_transformers_are_made_in_pieces(ranks: int, tmp_path: Path) -> None:
    program = str(PROGRAMS / "deepspeed_models.py")
    flags = ("-n", str(ranks), "--no_local_rank")
    done = run("-m", "zfun.interop.deepspeed", *flags, program, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.shows(
    "TRL's trainers with `deepspeed=`, with and without PEFT",
    "right",
    "losses and norms of the plain trainers on two ranks",
)
def test_trainers_of_trl_run_unmodified(tmp_path: Path) -> None:
    trls = pytest.importorskip("tests.interop.trls")
    program = str(PROGRAMS / "deepspeed_trl.py")
    flags = ("-n", "2", "--no_local_rank", program, trls.saved_model(tmp_path / "model"))
    done = run("-m", "zfun.interop.deepspeed", *flags, folder=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def launch(folder: Path, config: object, *script: str) -> subprocess.CompletedProcess[str]:
    """Let accelerate launch a script with a file for DeepSpeed."""
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "ds.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
        "num_machines: 1\nmachine_rank: 0\nuse_cpu: false\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
    )
    accelerate = ("accelerate", "launch", "--config_file", "ds.yaml", *script)
    done = run("-m", "zfun.interop.deepspeed", *accelerate, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


# accelerate writes an infinite steps_per_print into each configuration.
@pytest.mark.slow
@pytest.mark.shows(
    "`accelerate launch` with a file for DeepSpeed", "right", "losses of the plain loop"
)
def test_accelerate_launches_a_script_with_a_file_for_deepspeed(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
    }
    done = launch(tmp_path, config, str(PROGRAMS / "deepspeed_accelerate.py"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for x in (torch.arange(32.0).reshape(8, 4) / 32).split(4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("DEEPSPEED")]
    assert [line[1] for line in lines] == ["2", "2"]
    assert [float(line[2]) for line in lines] == pytest.approx(losses, abs=1e-6)


def instructions(folder: Path) -> None:
    """Write a small model, and instructions with answers."""
    trls = pytest.importorskip("tests.interop.trls")
    trls.saved_model(folder / "model")
    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        ids = torch.randint(0, 61, (count,), generator=generator).tolist()
        return " ".join(f"w{i}" for i in ids)

    rows = [
        {"instruction": text(3 + i % 4), "input": text(i % 3), "output": text(4 + i % 5)}
        for i in range(24)
    ]
    (folder / "data.json").write_text(json.dumps(rows))


@pytest.mark.slow
@pytest.mark.shows(
    "a script with `--deepspeed` and a Trainer", "right", "losses of the plain Trainer"
)
def test_a_script_that_fine_tunes_runs_with_every_configuration(tmp_path: Path) -> None:
    instructions(tmp_path)
    script = str(PROGRAMS / "deepspeed_finetune.py")
    program = (str(PROGRAMS / "deepspeed_finetune_configs.py"), str(tmp_path), script)
    flags = ("-n", "2", "--no_local_rank", *program)
    done = run("-m", "zfun.interop.deepspeed", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.shows("a GAN with two engines", "right", "the numbers of plain torch")
def test_two_engines_train_against_each_other(tmp_path: Path) -> None:
    flags = ("-n", "2", "--no_local_rank", str(PROGRAMS / "deepspeed_gan.py"))
    done = run("-m", "zfun.interop.deepspeed", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.shows("Lightning's own `DeepSpeedStrategy`", "right", "losses of DDP")
def test_strategies_of_lightning_run_unmodified(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    flags = ("-n", "2", "--no_local_rank", str(PROGRAMS / "deepspeed_lightning.py"))
    done = run("-m", "zfun.interop.deepspeed", *flags, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


CLM = str(PROGRAMS / "deepspeed_clm.py")


def clm(folder: Path, stage: int) -> dict[str, Any]:
    """Train a language model with accelerate at a stage, and return what the script has written."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero}
    output = str(folder / f"stage {stage}")
    launch(folder, config, CLM, "--model_name_or_path", "model", "--output_dir", output)
    return written(Path(output))


def written(folder: Path) -> dict[str, Any]:
    """Return the log and the weights of a run."""
    load = pytest.importorskip("safetensors.torch").load_file
    found = json.loads((folder / "log.json").read_text())
    return {**found, "weights": load(folder / "model.safetensors")}


@pytest.fixture(scope="module")
def first_clm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train a language model without DeepSpeed, and at stage 0."""
    folder = tmp_path_factory.mktemp("clm")
    pytest.importorskip("tests.interop.trls").saved_model(folder / "model")
    flags = ("-n", "2", "--no_local_rank", CLM, "--model_name_or_path", "model")
    done = run(
        "-m",
        "zfun.interop.deepspeed",
        *flags,
        "--output_dir",
        "plain",
        folder=folder,
        ACCELERATE_USE_CPU="true",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = clm(folder, 0)
    torch.testing.assert_close(found, written(folder / "plain"), rtol=1e-5, atol=1e-5)
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_launches_a_language_model_at_every_stage(
    stage: int, first_clm: tuple[Path, dict[str, Any]]
) -> None:
    folder, first = first_clm
    torch.testing.assert_close(clm(folder, stage), first, rtol=0, atol=0)
    assert first["ranks"] == 2


@pytest.mark.slow
def test_snippets_of_guides_run_unmodified(tmp_path: Path) -> None:
    pytest.importorskip("tests.interop.trls").saved_model(tmp_path / "model")
    flags = ("-n", "2", "--no_local_rank", str(PROGRAMS / "deepspeed_snippets.py"))
    done = run("-m", "zfun.interop.deepspeed", *flags, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]

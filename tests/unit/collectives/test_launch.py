"""The files of examples/launch: arguments of the launchers, and names that must agree."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf

LAUNCH = Path(__file__).parents[3] / "examples" / "launch"


def run(script: str, tmp_path: Path, **environment: str) -> list[str]:
    """Run a script with stand-ins for the programs that it calls; return torchrun's arguments."""
    programs = {
        "torchrun": 'printf "%s\\n" "$@"',
        "srun": '"$@"',
        "scontrol": 'test "$3" = "node-[3-4]" && printf "node-3\\nnode-4\\n"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCH / script), "train.py", "--steps", "3"],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def options(arguments: list[str]) -> dict[str, str]:
    """Return the options of torchrun as torchrun reads them, with the program's arguments."""
    from torch.distributed.run import parse_args

    return {key: value for key, value in vars(parse_args(arguments)).items() if value is not None}


def test_torchrun_gets_the_hosts_and_the_program(tmp_path: Path) -> None:
    found = options(run("torchrun.sh", tmp_path, HOSTS="2", FIRST_HOST="node-0"))
    assert (found["nnodes"], found["nproc_per_node"]) == ("2", "gpu")
    assert (found["rdzv_backend"], found["rdzv_endpoint"]) == ("c10d", "node-0:29500")
    assert (found["training_script"], found["training_script_args"]) == (
        "train.py",
        ["--steps", "3"],
    )


def test_torchrun_needs_the_number_of_hosts(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="HOSTS: how many hosts, such as 2"):
        run("torchrun.sh", tmp_path, FIRST_HOST="node-0")


def test_slurm_starts_a_launcher_on_each_host_that_meets_on_the_first(tmp_path: Path) -> None:
    slurm = {
        "SLURM_JOB_NODELIST": "node-[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "1234567",
    }
    found = options(run("slurm.sbatch", tmp_path, **slurm))
    assert (found["nnodes"], found["rdzv_endpoint"]) == ("2", "node-3:24567")
    assert (found["rdzv_id"], found["training_script"]) == ("1234567", "train.py")
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    settings = dict(
        line[8:].split("=") for line in lines if line[:10] == "#SBATCH --" and "=" in line
    )
    assert settings["--ntasks-per-node"] == "1"
    assert settings["--signal"] == "TERM@120"


def test_names_and_numbers_of_the_kubernetes_job_agree() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = options(container["args"])
    name, host = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == host
    # The name of the pod with index 0 of an indexed job.
    assert found["rdzv_endpoint"] == f"{name}-0.{host}:29500"
    assert found["nnodes"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert job["spec"]["completionMode"] == "Indexed"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_loop_of_ray_train_goes_on_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for Ray runs the worker in this process: a fault at step 20, then once more."""
    reports: list[dict[str, Any]] = []
    starts: list[int] = []

    def report(metrics: dict[str, Any]) -> None:
        reports.append(metrics)
        if metrics["step"] == 20 and len(starts) == 1:
            raise ConnectionError("a worker was lost")

    class Trainer:
        def __init__(self, train: Any, **options: Any) -> None:
            self.train, self.options = train, options

        def fit(self) -> Any:
            assert self.options["scaling_config"] == {"num_workers": 3, "use_gpu": False}
            for _ in range(1 + self.options["run_config"]["failure_config"]["max_failures"]):
                starts.append(1)
                try:
                    self.train(self.options["train_loop_config"])
                    break
                except ConnectionError:
                    continue
            return types.SimpleNamespace(metrics=reports[-1])

    kept = lambda **values: values
    modules: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.train": {
            "report": report,
            "ScalingConfig": kept,
            "RunConfig": kept,
            "FailureConfig": kept,
        },
        "ray.train.torch": {"TorchTrainer": Trainer},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, own = name.rpartition(".")
        if above:
            monkeypatch.setattr(sys.modules[above], own, module, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--ranks", "3", "--steps", "50", "--checkpoints", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ray_train.py", *arguments])
    runpy.run_path(str(LAUNCH / "ray_train.py"), run_name="__main__")
    assert len(starts) == 2
    assert [one["step"] for one in reports] == [20, 40, 50]
    assert reports[-1]["loss"] < 0.5 * reports[0]["loss"]
    assert "'step': 50" in capsys.readouterr().out
    assert zf.checkpoint.latest(tmp_path) is not None

"""Write two tables into the page "From DeepSpeed": ``python -m tools.deepspeed_names``.

The rows of the first are the marks ``shows`` of tests: what is right, refused or different.
Those of the second are the lines with which public scripts and libraries import from DeepSpeed.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from zfun.interop.deepspeed import install

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "migrate" / "from-deepspeed.md"
IMPORTS, SHOWN = "<!-- table of imports -->\n", "<!-- table of what tests show -->\n"
END = "<!-- end of the table -->\n"
VERDICTS = ("right", "different", "refused")

LINES = """
import deepspeed
import deepspeed.comm as dist
import deepspeed.runtime.activation_checkpointing.checkpointing as checkpointing
import deepspeed.runtime.lr_schedules
import deepspeed.runtime.utils as ds_utils
import deepspeed.runtime.zero.stage_1_and_2
import deepspeed.utils.groups as groups
import deepspeed.utils.zero_to_fp32
from deepspeed import DeepSpeedConfig
from deepspeed import DeepSpeedEngine
from deepspeed import PipelineEngine
from deepspeed import comm as dist
from deepspeed import get_accelerator
from deepspeed import init_distributed
from deepspeed import init_inference
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.elasticity import compute_elastic_config
from deepspeed.git_version_info import version
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.sparse_attention import SparseAttentionUtils
from deepspeed.ops.transformer import DeepSpeedTransformerLayer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.utils import move_to_device, see_memory_usage
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.utils import groups, instrument_w_nvtx, log_dist, logger
from deepspeed.utils import OnDevice, RepeatingLoader
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
""".strip().splitlines()


def what(line: str) -> dict[str, Any]:
    """Run an import, and return the objects by the names that the line asks for."""
    names: dict[str, Any] = {}
    exec(line, names)
    node = ast.parse(line).body[0]
    assert isinstance(node, ast.Import | ast.ImportFrom)
    return {name.name: names[name.asname or name.name.partition(".")[0]] for name in node.names}


def is_placeholder(found: Any) -> bool:
    """Return whether an object raises when it is used."""
    return hasattr(type(found), "_raise")


def with_tables(page: str) -> str:
    """Return the page with the tables of today."""
    for start, rows in ((SHOWN, shown()), (IMPORTS, imports())):
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(END)
        page = f"{before}{start}\n{rows}\n{END}{after}"
    return page


def shown() -> str:
    """Return a row for each mark ``shows`` of a test."""
    files = [*(ROOT / "tests" / "unit" / "interop").rglob("test_*.py")]
    files += (ROOT / "tests" / "distributed").glob("test_*.py")
    rows = [row for file in files for row in _marks(ast.parse(file.read_text(encoding="utf-8")))]
    rows.sort(key=lambda row: (VERDICTS.index(row[1]), row[0].strip("`").lower()))
    lines = [f"| {what} | {verdict} | {how} |\n" for what, verdict, how in rows]
    return f"| in a script | here | |\n|---|---|---|\n{''.join(lines)}"


def _marks(tree: ast.Module) -> list[tuple[str, str, str]]:
    calls = (
        mark
        for test in tree.body
        if isinstance(test, ast.FunctionDef)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows"
    )
    return [ast.literal_eval(ast.Tuple(mark.args, ast.Load())) for mark in calls]


def imports() -> str:
    """Return a row for each line: the names that are there, and those that are placeholders."""
    rows = []
    for line in LINES:
        found = what(line)
        absent = {name: x for name, x in found.items() if is_placeholder(x)}
        here = "all" if not absent else ", ".join(f"`{x}`" for x in found if x not in absent)
        remedies = "; ".join(
            f"`{name}`: {inspect.getattr_static(x, '_message').rpartition('there; ')[2]}"
            for name, x in absent.items()
        )
        rows.append(f"| `{line}` | {here or '–'} | {remedies} |\n")
    return (
        f"| import | there | placeholders, and the names to use |\n|---|---|---|\n{''.join(rows)}"
    )


if __name__ == "__main__":
    install()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

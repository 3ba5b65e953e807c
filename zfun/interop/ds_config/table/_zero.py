"""The keys of ``zero_optimization`` and of ``aio``."""

from __future__ import annotations

from zfun.interop.ds_config.table._keys import (
    FLAG,
    SECTION,
    Fill,
    Form,
    Key,
    count,
    ignored,
    mapped,
    optional,
    real,
    refused,
    text,
)
from zfun.options import PATH

__all__ = ["ALIASES", "ZERO"]

_Z = "zero_optimization"
_PARAM = f"{_Z}.offload_param"
_OPT = f"{_Z}.offload_optimizer"
_ALWAYS = "zfun always does so: "
_SAME = "the result is the same to the last bit; "
_FILE = Form(PATH._replace(example='"/local_nvme"'), str)
_DEVICE = text("none", "cpu", "nvme")


def _of_hidden(rule: object, words: str) -> Fill:
    return Fill(("hidden_size",), rule, words, must_match=False)  # type: ignore[arg-type]


_STAGES = (
    mapped(f"{_Z}.stage", count(0, 3), 0, "zf.zero(stage)"),
    mapped(
        f"{_Z}.reduce_bucket_size",
        count(0),
        500_000_000,
        "zf.zero(bucket_bytes=)",
        "an upper bound of a bucket; zfun's buckets of 26 MiB overlap with computation, so a larger"
        " bound changes nothing",
        _of_hidden(lambda h: h * h, "hidden_size²"),
    ),
    mapped(
        f"{_Z}.allgather_bucket_size",
        count(0),
        500_000_000,
        "zf.zero(bucket_bytes=)",
        "stages 1 and 2: an upper bound of a bucket",
    ),
    ignored(
        f"{_Z}.allgather_partitions",
        FLAG,
        True,
        f"{_SAME}zfun gathers, and DeepSpeed does not read the key",
    ),
    ignored(
        f"{_Z}.overlap_comm",
        optional(FLAG),
        None,
        f"{_ALWAYS}buckets are reduced during backward",
    ),
    ignored(f"{_Z}.reduce_scatter", FLAG, True, f"{_ALWAYS}a reduce-scatter for each bucket"),
    ignored(
        f"{_Z}.contiguous_gradients", FLAG, True, f"{_ALWAYS}gradients go into buckets in backward"
    ),
    ignored(
        f"{_Z}.round_robin_gradients",
        FLAG,
        False,
        f"{_ALWAYS}every rank has a piece of each bucket",
    ),
    ignored(f"{_Z}.use_multi_rank_bucket_allreduce", FLAG, True, "zfun reduces and scatters"),
    ignored(
        f"{_Z}.sub_group_size",
        count(0),
        1_000_000_000,
        f"{_SAME}zfun updates and offloads bucket by bucket",
    ),
    ignored(
        f"{_Z}.ignore_unused_parameters",
        FLAG,
        True,
        "a leaf without a gradient has the gradient 0; process_group(debug=True) warns",
    ),
    ignored(f"{_Z}.load_from_fp32_weights", FLAG, True, "is for DeepSpeed's files"),
    ignored(f"{_Z}.elastic_checkpoint", FLAG, False, "is for DeepSpeed's files"),
    ignored(f"{_Z}.pipeline_loading_checkpoint", FLAG, False, "is for DeepSpeed's files"),
    ignored(f"{_Z}.legacy_stage1", FLAG, False, "there is one stage 1"),
    refused(
        f"{_Z}.zenflow",
        SECTION,
        None,
        "leave the section out: its updates are late, and no composition of zfun gives them",
    ),
)

_STAGE_3 = (
    mapped(
        f"{_Z}.stage3_prefetch_bucket_size",
        count(0),
        50_000_000,
        "zf.ScheduleOptions(prefetch=)",
        "elements become buckets, at least one; 0 is none",
        _of_hidden(lambda h: int(0.9 * h * h), "int(0.9 · hidden_size²)"),
    ),
    mapped(
        f"{_Z}.stage3_param_persistence_threshold",
        count(0),
        100_000,
        "zf.ScheduleOptions(persistence=)",
        fill=_of_hidden(lambda h: 10 * h, "10 · hidden_size"),
    ),
    mapped(
        f"{_Z}.stage3_model_persistence_threshold",
        optional(count(0)),
        None,
        "zf.ScheduleOptions(max_persistent=)",
    ),
    mapped(
        f"{_Z}.stage3_max_live_parameters",
        count(0),
        1_000_000_000,
        "zf.ScheduleOptions(max_live=)",
        "a hard bound in zfun; DeepSpeed's bound only stops prefetching, so 0 becomes prefetch=0",
    ),
    mapped(
        f"{_Z}.stage3_max_reuse_distance",
        count(0),
        1_000_000_000,
        "zf.ScheduleOptions(reuse_distance=)",
    ),
    ignored(
        f"{_Z}.stage3_gather_16bit_weights_on_model_save",
        FLAG,
        False,
        "params(state) of zf.zero always gathers the whole tree",
    ),
    ignored(
        f"{_Z}.stage3_module_granularity_threshold",
        count(0),
        0,
        "buckets already group small leaves",
    ),
    ignored(f"{_Z}.stage3_use_all_reduce_for_fetch_params", FLAG, False, f"{_SAME}zfun gathers"),
    ignored(
        f"{_Z}.stage3_allgather_sequential", FLAG, False, f"{_SAME}bucket_bytes bounds the memory"
    ),
    ignored(
        f"{_Z}.stage3_partition_stream_chunk_size", count(0), 0, "init() cuts bucket by bucket"
    ),
    ignored(
        f"{_Z}.leaf_module", SECTION, None, "any rank may use any leaves, so no unit is needed"
    ),
    ignored(f"{_Z}.memory_efficient_linear", FLAG, True, "linear layers are those of your loss"),
    ignored(f"{_Z}.override_module_apply", FLAG, True, "there is no module"),
    ignored(f"{_Z}.log_trace_cache_warnings", FLAG, False, "see zf.planner.explain"),
    ignored(f"{_Z}.enable_sanity_checks", FLAG, False, "process_group(debug=True) checks more"),
    ignored(
        f"{_Z}.save_muon_momentum_buffer_in_memory",
        FLAG,
        False,
        "the store of offload_optimizer keeps the whole state",
    ),
    mapped(
        f"{_Z}.zero_hpz_partition_size",
        count(0),
        1,
        "zf.ScheduleOptions(secondary=True) over zf.split(group, inner=)",
    ),
    mapped(
        f"{_Z}.mics_shard_size",
        count(-1),
        -1,
        "zf.split(group, inner=).inner",
    ),
    ignored(
        f"{_Z}.mics_hierarchical_params_gather",
        FLAG,
        False,
        f"{_SAME}shards are gathered within a row of the mesh",
    ),
    mapped(
        f"{_Z}.zero_quantized_weights",
        FLAG,
        False,
        "zf.compression.Compression(params=zf.compression.int8())",
    ),
    mapped(
        f"{_Z}.zero_quantized_gradients",
        FLAG,
        False,
        "zf.compression.Compression(grads=zf.compression.int4())",
    ),
    refused(
        f"{_Z}.zero_quantized_nontrainable_weights",
        FLAG,
        False,
        "leave the key out: zfun stores frozen leaves in the dtypes that you give them",
    ),
    mapped(
        f"{_Z}.zeropp_loco_param.err_beta",
        real(0, below=1),
        0.8,
        "zf.compression.error_feedback(err_beta=)",
    ),
    mapped(
        f"{_Z}.zeropp_loco_param.reset_T",
        count(0),
        1024,
        "zf.compression.error_feedback(reset=)",
    ),
)

_OFFLOAD = (
    mapped(f"{_PARAM}.device", _DEVICE, "none", "zf.stores.Offload(params=)", "stage 3"),
    mapped(f"{_PARAM}.nvme_path", optional(_FILE), None, "zf.stores.nvme(path)"),
    mapped(
        f"{_PARAM}.pin_memory",
        FLAG,
        True,
        "zf.stores: pin",
        "true page-locks where there is a device",
    ),
    mapped(f"{_PARAM}.buffer_count", count(1), 5, "zf.stores.nvme(buffer_count=)"),
    mapped(f"{_PARAM}.buffer_size", count(0), 100_000_000, "zf.stores.nvme(buffer_size=)"),
    mapped(f"{_PARAM}.max_in_cpu", count(0), 1_000_000_000, "zf.stores.nvme(max_in_cpu=)"),
    mapped(
        f"{_OPT}.device",
        _DEVICE,
        "none",
        "zf.stores.Offload(optimizer=, grads=)",
        "gradients go to the store too, and the update runs on the CPU",
    ),
    mapped(f"{_OPT}.nvme_path", optional(_FILE), None, "zf.stores.nvme(path)"),
    mapped(
        f"{_OPT}.pin_memory",
        FLAG,
        True,
        "zf.stores: pin",
        "true page-locks where there is a device",
    ),
    mapped(f"{_OPT}.buffer_count", count(1), 4, "zf.stores.nvme(buffer_count=)"),
    ignored(f"{_OPT}.pipeline_read", FLAG, False, f"{_ALWAYS}reads start ahead of use"),
    ignored(f"{_OPT}.pipeline_write", FLAG, False, f"{_ALWAYS}writes run in threads"),
    ignored(f"{_OPT}.fast_init", FLAG, False, f"{_SAME}there is one way to start"),
    ignored(
        f"{_OPT}.ratio",
        real(0, below=1.0000001),
        1.0,
        f"{_SAME}the whole state is in the store",
    ),
    ignored(f"{_OPT}.super_offload", FLAG, False, f"{_SAME}there is one update on the CPU"),
    ignored(f"{_OPT}.cpuadam_cores_perc", real(0), 0.8, "torch.set_num_threads sets the threads"),
    ignored(f"{_OPT}.convert_grad_on_cpu", FLAG, True, "gradients are sent in the reduce dtype"),
)

_AIO = (
    mapped(
        "aio.block_size",
        Form(
            count(1).kind._replace(
                accepts=lambda x: count(4096).kind.accepts(x) and int(x) % 4096 == 0,
                words=("a multiple of 4096",),
                example="1048576",
            ),
            int,
        ),
        1_048_576,
        "zf.stores.nvme(block_size=)",
    ),
    mapped("aio.queue_depth", count(1, 1024), 8, "zf.stores.nvme(queue_depth=)"),
    mapped("aio.intra_op_parallelism", count(1, 256), 1, "zf.stores.nvme(num_threads=)"),
    ignored("aio.single_submit", FLAG, False, "requests are handed over queue_depth at a time"),
    ignored("aio.overlap_events", FLAG, True, f"{_ALWAYS}threads do not wait for each other"),
    ignored("aio.use_gds", FLAG, False, "transfers go through host memory"),
)

ZERO: tuple[Key, ...] = (*_STAGES, *_STAGE_3, *_OFFLOAD, *_AIO)

# Other spellings of keys. A key beside its other spelling wins.
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    f"{_Z}.aio": "aio",
    "aio.thread_count": "aio.intra_op_parallelism",
    f"{_Z}.stage3_gather_fp16_weights_on_model_save": (
        f"{_Z}.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"{_Z}.{name}": f"{_Z}.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "partition_stream_chunk_size",
        )
    },
}

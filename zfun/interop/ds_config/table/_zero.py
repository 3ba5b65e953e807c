"""The keys of ``zero_optimization`` and of ``aio``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zfun.interop.ds_config.table._keys import (
    FLAG,
    Fill,
    Form,
    Key,
    count,
    ignored,
    mapped,
    optional,
    real,
    refused,
    section,
    text,
)
from zfun.options import PATH, Kind

_Z = "zero_optimization"
_ALWAYS = "zfun always does so: "
_SAME = "the result is the same to the last bit; "
_FILES = "is for DeepSpeed's files"
_PATH = optional(Form(PATH._replace(example='"/local_nvme"'), str))
_DEVICE = text("none", "cpu", "nvme")
_BILLION = 1_000_000_000


def _of_hidden(rule: Callable[[int], int], words: str) -> Fill:
    return Fill(("hidden_size",), rule, words, must_match=False)


# fmt: off
_STAGES = (
    mapped("stage", 0, "zf.zero(stage)", count(0, 3)),
    mapped("reduce_bucket_size", 500_000_000, "zf.zero(bucket_bytes=)", count(),
        "an upper bound of a bucket; zfun's buckets are blocks, or 26 MiB of small ones, so a"
        " larger bound changes nothing", _of_hidden(lambda h: h * h, "hidden_size²")),
    mapped("allgather_bucket_size", 500_000_000, "zf.zero(bucket_bytes=)", count(),
        "stages 1 and 2: an upper bound of a bucket"),
    ignored("allgather_partitions", True,
        f"{_SAME}zfun gathers, and DeepSpeed does not read the key"),
    ignored("overlap_comm", None, f"{_ALWAYS}buckets are reduced during backward", optional(FLAG)),
    ignored("reduce_scatter", True, f"{_ALWAYS}a reduce-scatter for each bucket"),
    ignored("contiguous_gradients", True, f"{_ALWAYS}gradients go into buckets in backward"),
    ignored("round_robin_gradients", False, f"{_ALWAYS}every rank has a piece of each bucket"),
    ignored("use_multi_rank_bucket_allreduce", True, "zfun reduces and scatters"),
    ignored("sub_group_size", _BILLION, f"{_SAME}zfun updates and offloads bucket by bucket",
        count()),
    ignored("ignore_unused_parameters", True,
        "a leaf that no rank used stays, as in torch; process_group(debug=True) warns"),
    ignored("load_from_fp32_weights", True, _FILES),
    ignored("elastic_checkpoint", False, _FILES),
    ignored("pipeline_loading_checkpoint", False, _FILES),
    ignored("legacy_stage1", False, "there is one stage 1"),
    refused("zenflow", None,
        "leave the section out: its updates are late, and no composition of zfun gives them"),
)

_STAGE_3 = (
    mapped("stage3_prefetch_bucket_size", 50_000_000, "zf.ScheduleOptions(prefetch=)", count(),
        "elements become buckets of `bucket_bytes`, at least one; 0 is none",
        _of_hidden(lambda h: int(0.9 * h * h), "int(0.9 · hidden_size²)")),
    mapped("stage3_param_persistence_threshold", 100_000, "zf.ScheduleOptions(persistence=)",
        count(), fill=_of_hidden(lambda h: 10 * h, "10 · hidden_size")),
    mapped("stage3_model_persistence_threshold", None, "zf.ScheduleOptions(max_persistent=)",
        optional(count())),
    mapped("stage3_max_live_parameters", _BILLION, "zf.ScheduleOptions(max_live=)", count(),
        "a hard bound in zfun, which has room for two buckets; DeepSpeed's bound only stops"
        " prefetching, so 0 becomes prefetch=0"),
    mapped("stage3_max_reuse_distance", _BILLION, "zf.ScheduleOptions(reuse_distance=)", count()),
    ignored("stage3_gather_16bit_weights_on_model_save", False,
        "params(state) of zf.zero always gathers the whole tree"),
    ignored("stage3_module_granularity_threshold", 0, "buckets already group small leaves",
        count()),
    ignored("stage3_use_all_reduce_for_fetch_params", False, f"{_SAME}zfun gathers"),
    ignored("stage3_allgather_sequential", False, f"{_SAME}bucket_bytes bounds the memory"),
    ignored("stage3_partition_stream_chunk_size", 0, "init() cuts bucket by bucket", count()),
    ignored("leaf_module", None, "any rank may use any leaves, so no unit is needed"),
    ignored("memory_efficient_linear", True, "linear layers are those of your loss"),
    ignored("override_module_apply", True, "there is no module"),
    ignored("log_trace_cache_warnings", False, "see zf.planner.explain"),
    ignored("enable_sanity_checks", False, "process_group(debug=True) checks more"),
    ignored("save_muon_momentum_buffer_in_memory", False,
        "the store of offload_optimizer keeps the whole state"),
    mapped("zero_hpz_partition_size", 1,
        "zf.ScheduleOptions(secondary=True) over zf.split(group, inner=)", count()),
    mapped("mics_shard_size", -1, "zf.split(group, inner=).inner", count(-1)),
    ignored("mics_hierarchical_params_gather", False,
        f"{_SAME}shards are gathered within a row of the mesh"),
    mapped("zero_quantized_weights", False,
        "zf.compression.Compression(params=zf.compression.int8())"),
    mapped("zero_quantized_gradients", False,
        "zf.compression.Compression(grads=zf.compression.int4())"),
    refused("zero_quantized_nontrainable_weights", False,
        "leave the key out: zfun stores frozen leaves in the dtypes that you give them"),
    *section("zeropp_loco_param",
        mapped("err_beta", 0.8, "zf.compression.error_feedback(err_beta=)", real(0, below=1)),
        mapped("reset_T", 1024, "zf.compression.error_feedback(reset=)", count()),
    ),
)

_PIN = mapped("pin_memory", True, "zf.stores: pin", why="true page-locks where there is a device")
_NVME_PATH = mapped("nvme_path", None, "zf.stores.nvme(path)", _PATH)
_OFFLOAD = (
    *section("offload_param",
        mapped("device", "none", "zf.stores.Offload(params=)", _DEVICE, "stage 3"),
        _NVME_PATH,
        _PIN,
        mapped("buffer_count", 5, "zf.stores.nvme(buffer_count=)", count(1)),
        mapped("buffer_size", 100_000_000, "zf.stores.nvme(buffer_size=)", count()),
        mapped("max_in_cpu", _BILLION, "zf.stores.nvme(max_in_cpu=)", count()),
    ),
    *section("offload_optimizer",
        mapped("device", "none", "zf.stores.Offload(optimizer=, grads=)", _DEVICE,
            "gradients go to the store too, and the update runs on the CPU"),
        _NVME_PATH,
        _PIN,
        mapped("buffer_count", 4, "zf.stores.nvme(buffer_count=)", count(1)),
        ignored("pipeline_read", False, f"{_ALWAYS}reads start ahead of use"),
        ignored("pipeline_write", False, f"{_ALWAYS}writes run in threads"),
        ignored("fast_init", False, f"{_SAME}there is one way to start"),
        ignored("ratio", 1.0, f"{_SAME}the whole state is in the store", real(0, below=1.0000001)),
        ignored("super_offload", False, f"{_SAME}there is one update on the CPU"),
        ignored("cpuadam_cores_perc", 0.8, "torch.set_num_threads sets the threads", real(0)),
        ignored("convert_grad_on_cpu", True, "gradients are sent in the reduce dtype"),
    ),
)

_PAGES = Kind(
    lambda x: count(4096).kind.accepts(x) and int(x) % 4096 == 0,
    ("a multiple of 4096",),
    "1048576",
)
_AIO = section("aio",
    mapped("block_size", 1_048_576, "zf.stores.nvme(block_size=)", Form(_PAGES, int)),
    mapped("queue_depth", 8, "zf.stores.nvme(queue_depth=)", count(1, 1024)),
    mapped("intra_op_parallelism", 1, "zf.stores.nvme(num_threads=)", count(1, 256)),
    ignored("single_submit", False, "requests are handed over queue_depth at a time"),
    ignored("overlap_events", True, f"{_ALWAYS}threads do not wait for each other"),
    ignored("use_gds", False, "transfers go through host memory"),
)

ZERO: tuple[Key, ...] = (*section(_Z, *_STAGES, *_STAGE_3, *_OFFLOAD), *_AIO)

# Other spellings of keys. A key beside its other spelling wins.
ALIASES: Mapping[str, str] = {
    "bfloat16": "bf16",
    f"{_Z}.aio": "aio",
    "aio.thread_count": "aio.intra_op_parallelism",
    f"{_Z}.stage3_gather_fp16_weights_on_model_save": (
        f"{_Z}.stage3_gather_16bit_weights_on_model_save"
    ),
    **{key.path.replace(".stage3_", "."): key.path for key in ZERO if ".stage3_" in key.path},
}
# Keys of older versions, which are true or false: the paths that such a key stands for, and the
# values of these paths.
_PINS = tuple(f"{_Z}.{name}.pin_memory" for name in ("offload_optimizer", "offload_param"))
OLDER: Mapping[str, tuple[tuple[str, ...], Mapping[bool, Any]]] = {
    _Z: ((f"{_Z}.stage",), {False: 0, True: 1}),
    f"{_Z}.cpu_offload": ((f"{_Z}.offload_optimizer.device",), {False: "none", True: "cpu"}),
    f"{_Z}.cpu_offload_param": ((f"{_Z}.offload_param.device",), {False: "none", True: "cpu"}),
    f"{_Z}.cpu_offload_use_pin_memory": (_PINS, {False: False, True: True}),
}

"""Names of DeepSpeed that are not here, each with the name to use instead.

A script imports more names than it uses, so an absent name imports as a placeholder: a class that
no object is an instance of, and that raises its remedy when it is used. An absent module gives
placeholders only. A name that DeepSpeed does not have either stays an ``AttributeError``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from zfun.errors import OptionError

# By remedy: the modules without any name here, and names as MODULE:NAME. MODULE is the last part of
# a path, and empty for the package; engine:NAME is an attribute, and groups:KIND stands for the
# functions that return a process group of a kind of parallelism.
_TABLE: Mapping[str, str] = {
    "compare stages before a run with zf.planner.plan": "autotuning",
    "use engine.load_checkpoint(), which takes any number of ranks and any stage": (
        "checkpoint runtime.state_dict_factory"
    ),
    "call torch.compile on blocks of the model before initialize()": (
        "compile runtime.compiler :is_compile_supported"
    ),
    "use zero_quantized_weights and zero_quantized_gradients, or zf.compression.int8": (
        "compression ops.fp_quantizer ops.quantizer runtime.compression runtime.quantize "
        "runtime.weight_quantizer"
    ),
    "use torch.utils.collect_env": "env_report",
    "train with initialize(), save with engine.save_16bit_model(), and serve the file": (
        "inference model_implementations module_inject :init_inference :default_inference_config "
        ":InferenceEngine :DeepSpeedInferenceConfig :replace_transformer_layer "
        ":revert_transformer_layer"
    ),
    "use zf.stores.nvme, or offload_optimizer with device nvme": (
        "io nvme ops.aio ops.gds runtime.superoffload runtime.swap_tensor runtime.zenflow"
    ),
    "start the script with python -m zfun.interop.deepspeed": (
        "launcher.constants launcher.launch launcher.launcher_helper launcher.multinode_runner"
    ),
    "freeze the base with requires_grad_(False) and train adapters, as peft does": "linear",
    "build experts of plain modules, whole on each rank, or cut over ranks by "
    "zf.parallel.expert_parallel(loss, axis)": (
        "moe utils:split_params_into_different_moe_groups_for_optimizer "
        "utils:configure_moe_param_groups utils:has_moe_layers groups:expert_parallel "
        "groups:expert_data_parallel "
        "utils:is_moe_param_group utils:split_params_into_shared_and_expert_params "
        "utils:split_params_grads_into_shared_and_expert_params groups:initialize"
    ),
    "log engine.get_global_grad_norm() and engine.get_lr() with your own logger": (
        "monitor engine:monitor"
    ),
    "use engine.save_checkpoint(), which publishes a checkpoint by one rename": (
        "nebula runtime.checkpoint_engine runtime.model_checkpointing"
    ),
    "nothing is compiled: kernels are Numba and Triton": (
        "ops.compile ops.csrc ops.op_builder ops:MultiTensorApply ops:multi_tensor_applier"
    ),
    "use torch.nn.functional.scaled_dot_product_attention": "ops.deepspeed4science",
    "drop tokens and layers in the model": (
        "ops.random_ltd runtime.progressive_layer_drop engine:random_ltd_scheduler"
    ),
    "use torch.nn.attention.flex_attention": "ops.sparse_attention",
    "use a module of plain torch; torch.compile fuses the operations of a layer": (
        "ops.transformer :DeepSpeedTransformerLayer :DeepSpeedTransformerConfig"
    ),
    "pass a PipelineModule to initialize()": "engine:train_batch engine:eval_batch",
    "write the actions of a schedule with zf.parallel.schedules": (
        "runtime.pipe.schedule runtime.pipe.p2p"
    ),
    "use torch.profiler, torch.utils.flop_counter and zf.planner.timeline": (
        "profiling engine:timers engine:engine_timers :EngineTimers "
        "utils:SynchronizedWallClockTimer utils:ThroughputTimer "
        "utils:get_caller_func checkpointing:PROFILE_TIME"
    ),
    "test with isinstance(optimizer, torch.optim.Optimizer)": (
        "runtime.base_optimizer :DeepSpeedOptimizer runtime:DeepSpeedOptimizer"
    ),
    "write the options into the configuration that initialize() takes": (
        "runtime.bf16_optimizer runtime.constants runtime.precision_config runtime.zero.utils "
        "utils.config"
    ),
    "use deepspeed.comm": "runtime.comm",
    "order the samples with a torch sampler": (
        "runtime.data_pipeline engine:curriculum_scheduler "
        "engine:set_custom_curriculum_learning_schedule"
    ),
    "change each batch in collate_fn=": "engine:set_data_post_process_func",
    "shard the parameters with stage 3; or train with zf.tensor_parallel and the plan of "
    "zf.interop.transformers.tp_plan": (
        "runtime.domino runtime.tensor_parallel :tp_model_init :set_autotp_mode :domino "
        "groups:model_parallel groups:tensor_model_parallel"
    ),
    "use torch.func.hvp on the loss": "runtime.eigenvalue",
    "use the engine that initialize() returns; its optimizer is engine.optimizer": (
        "runtime.fp16.fused_optimizer runtime.fp16.unfused_optimizer utils.mixed_precision_linkage "
        ":DeepSpeedOptimizerCallable :DeepSpeedSchedulerCallable zero:DeepSpeedZeroOptimizer "
        "zero:DeepSpeedZeroOptimizer_Stage3 zero:FP16_DeepSpeedZeroOptimizer "
        "zero:FP16_DeepSpeedZeroOptimizer_Stage3 runtime:ZeROOptimizer"
    ),
    "read engine.cur_scale, and write fp16 into the configuration": "runtime.fp16.loss_scaler",
    "generate with engine.generate(), in the training engine": (
        "runtime.hybrid_engine :DeepSpeedHybridEngine config:HybridEngineConfig"
    ),
    "use the trainers of trl": "runtime.rlhf",
    "use engine.generate()": "runtime.rollout",
    "cut batches with zf.parallel.sequence_batch, and the model with "
    "zf.interop.transformers.sequence_parallel": (
        "runtime.sequence_parallel sequence groups:sequence_parallel"
    ),
    "gradients are dense; use nn.Embedding(sparse=False)": "runtime.sparse_tensor",
    "use torch.autocast around the model, or bf16 in the configuration": "runtime.torch_autocast",
    "memory is torch's": "runtime.zero.contiguous_memory_allocator",
    "no module needs a mark": "runtime.zero.leaf_module_config",
    "use torch.nn.Linear; stage 3 gathers one bucket at a time": (
        "runtime.zero.linear runtime.zero.tiling zero:TiledLinear zero:TiledLinearReturnBias"
    ),
    "write mics_shard_size into the configuration": "runtime.zero.mics zero:MiCS_Optimizer",
    "zfun puts no hooks into the module": (
        "runtime.zero.parameter_offload zero:get_model_hooks zero:DeepSpeedZeRoOffload"
    ),
    "read the schedule with zf.planner.explain": "runtime.zero.partitioned_param_coordinator",
    "use torch.profiler, or zf.record for the bytes of each collective": (
        "utils.comms_logging comm:CommsLogger"
    ),
    "name parameters with model.named_parameters()": "utils.debug",
    "catch the errors of zfun.errors": "utils.exceptions",
    "start the script with numactl": "utils.numa utils:get_numactl_cmd",
    "pass an mpu to initialize()": "utils.parallel_state utils:bwc_tensor_model_parallel_rank",
    "use tensor.pin_memory()": "utils.pin_memory",
    "use the function of the same purpose in torch": "utils.types",
    "use utils.zero_to_fp32": "utils.zero_to_torch",
    "write the scheduler into the configuration": ":add_tuning_arguments",
    "write optimizer.type 'Muon' into the configuration": (
        ":set_optimizer_flags ops:MuonWithAuxAdam"
    ),
    "call configure(mpu, partition_activations=True)": (
        "checkpointing:gather_partitioned_activations checkpointing:partition_activations"
    ),
    "use torch.distributed": "comm:TorchBackend",
    "use a dataclass": "config:DeepSpeedConfigModel",
    "use zfun.interop.solve_batch": "config:ElasticityConfig",
    "call backward() and step(), which sum over the ranks": "engine:allreduce_gradients",
    "use engine.optimizer": "engine:basic_optimizer engine:client_optimizer",
    "use engine.lr_scheduler": "engine:client_lr_scheduler",
    "use torch.profiler": "engine:flops_profiler",
    "call the engine": "engine:forward_prologue",
    "call step()": "engine:zenflow_step",
    "write optimizer.type 'Muon' into the configuration, or use torch.optim.Muon": "ops:Muon",
    "use FusedLamb": "ops:OnebitLamb",
    "use DeepSpeedCPUAdam": "ops:ZenFlowCPUAdam",
    "use FusedAdam": "ops:ZenFlowSelectiveAdamW",
    "use OnebitAdam": "ops:ZeroOneAdam",
    "read engine.skipped_steps": "utils:CheckOverflow",
    "use zf.shard": "utils:PartitionedTensor",
    "use log_dist, and the levels of Python's logging": (
        "utils:log_dist_once utils:print_rank_0 utils:set_log_level_from_string"
    ),
    "call mkdir of pathlib.Path": "utils:ensure_directory_exists",
    "use contextlib.nullcontext": "utils:noop_context",
    "use torch.distributed.device_mesh.init_device_mesh": "comm:initialize_mesh_device",
    "call get_accelerator().is_available()": "accelerator:is_current_accelerator_supported",
    "write gradient_clipping into the configuration": "utils:clip_grad_norm_",
    "use zf.optim.clip_by_global_norm": "utils:clip_tensors_by_global_norm",
    "use safe_get_full_grad": "utils:get_full_hp_grad",
    "use safe_get_full_fp32_param": "utils:get_full_hp_param",
    "use engine.get_global_grad_norm()": "utils:get_global_norm",
    "use zf.reductions.global_norm": "utils:get_weight_norm utils:get_global_norm_of_tensors",
    "use engine.get_global_grad_norm(), or zf.reductions.global_norm": "utils:get_grad_norm",
    "use torch.cuda.memory_summary": "utils:memory_status",
    "read a parameter under zero.GatheredParameters": (
        "zero:AllGatherHandle zero:AllGatherCoalescedHandle zero:NoGatherHandle zero:free_param"
    ),
    "use zero.Init": "zero:InsertPostInitMethodToModuleSubClasses",
    "use zero.Init, and mics_shard_size in the configuration": "zero:MiCS_Init",
    "read param.ds_shape, which partitioned parameters have": "zero:ZeroParamType",
    "use torch.distributed.all_gather_object": "zero:assert_ints_same_as_other_ranks",
    "write zero_hpz_partition_size into the configuration": "groups:zero_param_intra_parallel",
    "call get_accelerator()": (
        "accelerator:CPU_Accelerator accelerator:CUDA_Accelerator accelerator:set_accelerator "
        "accelerator.hpu_accelerator accelerator.klxpu_accelerator accelerator.mlu_accelerator "
        "accelerator.mps_accelerator accelerator.npu_accelerator accelerator.sdaa_accelerator "
        "accelerator.supa_accelerator accelerator.xpu_accelerator"
    ),
    "read RANK, LOCAL_RANK and WORLD_SIZE from the environment": (
        "comm:get_local_rank_from_launcher comm:get_world_rank_from_launcher "
        "comm:get_world_size_from_launcher comm:mpi_discovery"
    ),
    "generate with engine.generate()": ("zero:unwrap_model_for_generation"),
    "call estimate_zero2_model_states_mem_needs_all_live or the form for stage 3": (
        "zero:estimate_zero2_model_states_mem_needs zero:estimate_zero3_model_states_mem_needs"
    ),
    "use chunks of zf.parallel.tiled": ("runtime.chunked_cross_entropy"),
    "use zf.remat(block, store=...)": ("runtime.activation_checkpointing.offload_activations"),
    "it is a part of DeepSpeed itself; see the page 'From DeepSpeed'": (
        "comm.backend comm.ccl comm.config comm.mori comm.pg_utils comm.reduce_op compat "
        "datastates ops.adam.zenflow_cpu_adam ops.lion.multi_tensor_apply ops.triton_ops "
        "runtime.activation_checkpointing.config runtime.hybrid_engine_graph "
        "runtime.keep_in_fp32 runtime.pipe.dualpipev runtime.python_gc "
        "runtime.zero.partitioned_param_profiler runtime.zero.test "
        "utils.pin_memory_tracker utils.static_cache :is_even "
        ":resolve_per_head_muon_after_sharding :split_half_float_double_sparse "
        "checkpointing:detach_variable checkpointing:extract_tensors "
        "checkpointing:get_cpu_activations_for_backward "
        "checkpointing:get_offloaded_activations_for_backward checkpointing:get_partition_size "
        "checkpointing:get_partition_start "
        "checkpointing:get_partitioned_activations_for_backward "
        "checkpointing:is_activation_to_checkpoint checkpointing:merge_tensors "
        "checkpointing:restore_offloaded_activations comm:Noop comm:StagedWork "
        "comm:all_gather_comm_off comm:all_reduce_comm_off comm:backward_comm_off "
        "comm:broadcast_comm_off comm:build_shm_op comm:disable_compiler_collective "
        "comm:enable_symm_mem_for_group comm:get_coalescing_manager "
        "comm:get_comm_operation_count comm:get_debug_log_name comm:get_default_args "
        "comm:get_logged_comm_ops comm:get_msg_size_from_args comm:get_tensor_kwarg "
        "comm:get_tensor_position comm:has_all_reduce_coalesced comm:has_comm_data comm:in_aml "
        "comm:in_aws_sm comm:in_dlts comm:init_deepspeed_backend comm:known_world_size "
        "comm:patch_aml_env_for_torch_nccl_backend comm:patch_aws_sm_env_for_torch_nccl_backend "
        "comm:reduce_comm_off comm:reduce_scatter_comm_off comm:set_backend comm:stage_on_cpu "
        "comm:timed_op config:DeepSpeedConfigObject config:DeepSpeedConfigWriter "
        "config:DtypeEnum config:ScientificNotationEncoder "
        "config:dict_raise_error_on_duplicate_keys "
        "config:get_checkpoint_parallel_write_pipeline config:get_checkpoint_params "
        "config:get_checkpoint_tag_validation_mode config:get_communication_data_type "
        "config:get_config_default config:get_data_types_params config:get_dataloader_drop_last "
        "config:get_dict_param config:get_disable_allgather config:get_disable_python_gc "
        "config:get_dump_state config:get_expert_data_topo_config "
        "config:get_expert_parallel_config config:get_gradient_accumulation_steps "
        "config:get_gradient_allreduce_op config:get_gradient_clipping "
        "config:get_gradient_predivide_factor config:get_hybrid_engine_config "
        "config:get_list_param config:get_log_level config:get_lower_precision_safe_modules "
        "config:get_managed_gradient_accumulation config:get_memory_breakdown "
        "config:get_optimizer_gradient_clipping config:get_optimizer_legacy_fusion "
        "config:get_optimizer_name config:get_optimizer_params config:get_pipeline_config "
        "config:get_prescale_gradients config:get_scalar_param config:get_scheduler_name "
        "config:get_scheduler_params config:get_steps_per_print config:get_torch_autocast_dtype "
        "config:get_torch_autocast_enabled config:get_train_batch_size "
        "config:get_train_micro_batch_size_per_gpu config:get_wall_clock_breakdown "
        "config:get_zero_allow_untested_optimizer config:get_zero_force_ds_cpu_optimizer "
        "config:pp_int config:read_zero_config_deprecated "
        "groups:get_tensor_model_parallel_src_rank groups:set_tensor_model_parallel_rank "
        "groups:set_tensor_model_parallel_world_size launcher:apply_num_nodes_and_gpus "
        "launcher:encode_world_info launcher:parse_inclusion_exclusion "
        "launcher:parse_node_config launcher:parse_node_config_list "
        "launcher:parse_resource_filter launcher:run_autotuning ops:SingleDeviceMuon "
        "ops:SingleDeviceMuonWithAuxAdam ops:ZenFlowSelectiveAdamW_stage3 ops:adam_update "
        "ops:adamw ops:muon_update ops:ns_compute_dtype ops:zeropower_via_gram_newtonschulz "
        "ops:zeropower_via_newtonschulz5 runtime.lr_schedules:add_tuning_arguments "
        "runtime.lr_schedules:get_config_from_args runtime.lr_schedules:get_lr_from_config "
        "runtime.lr_schedules:get_torch_optimizer runtime.lr_schedules:override_1cycle_params "
        "runtime.lr_schedules:override_lr_range_test_params "
        "runtime.lr_schedules:override_params "
        "runtime.lr_schedules:override_warmupCosineLR_params "
        "runtime.lr_schedules:override_warmupLR_params runtime.lr_schedules:parse_arguments "
        "runtime.lr_schedules:update_lr utils:CudaEventTimer utils:DummyOptim "
        "utils:LoggerFactory utils:NoopTimer utils:OutputBackwardHookManager utils:TLinear "
        "utils:align_dense_tensors utils:all_gather_dp_groups "
        "utils:all_gather_into_tensor_dp_groups utils:apply_zero_leaf_module_config "
        "utils:bwc_pipeline_parallel_group utils:bwc_pipeline_parallel_world_size "
        "utils:bwc_tensor_model_parallel_group utils:bwc_tensor_model_parallel_world_size "
        "utils:call_to_str utils:check_internal_apis_for_count_used_parameters "
        "utils:combine_grad_norm_groups utils:compare_tensors_in_structures "
        "utils:copy_to_device utils:count_used_parameters_in_backward "
        "utils:filter_empty_parameters utils:fragment_address utils:get_checkpoint_folder_size "
        "utils:get_current_level utils:get_dist_msg utils:get_flattened_grad_norm "
        "utils:get_grad_zeros utils:get_hp_fragment_mapping utils:get_inactive_params "
        "utils:get_layer_ckpt_name_for_rank utils:get_log_level_from_string utils:get_ma_status "
        "utils:get_model_ckpt_name_for_rank utils:get_norm_with_moe_layers "
        "utils:get_norm_with_moe_layers_fast utils:get_only_unique_item utils:get_tensor_bytes "
        "utils:get_zero_ckpt_name_for_rank utils:has_inf_or_nan utils:is_invalid_grad_norm "
        "utils:is_model_parallel_parameter utils:is_optimized_parameter "
        "utils:is_transformers_cache utils:map_to_flat_opt_states "
        "utils:mask_nan_or_inf_with_val_inplace utils:maybe_loss_for_backward "
        "utils:noop_decorator utils:offload_adam_states utils:partition_balanced "
        "utils:partition_uniform utils:prefix_sum_inc utils:print_configuration "
        "utils:print_dist utils:print_json_dist utils:register_output_backward_hooks "
        "utils:reload_adam_states utils:safe_update_full_grad_vectorized utils:set_full_hp_grad "
        "utils:set_full_hp_param utils:should_log_le utils:is_functorch_transforming "
        "utils:jit_script_compat utils:register_grad_hook utils:trim_mean utils:warning_once "
        "utils.zero_to_fp32:GatheredTensor utils.zero_to_fp32:atoi "
        "utils.zero_to_fp32:convert_zero_checkpoint_to_state_dict "
        "utils.zero_to_fp32:get_checkpoint_files utils.zero_to_fp32:get_model_state_files "
        "utils.zero_to_fp32:natural_keys utils.zero_to_fp32:parse_model_states "
        "utils.zero_to_fp32:parse_optim_states utils.zero_to_fp32:to_torch_tensor "
        "utils.zero_to_fp32:zero3_partitioned_param_info utils.zero_to_fp32:zero_model_state "
        "zero:AllReduceCoalescedHandle zero:CUDAQuantizer zero:DeepSpeedTensorOverride "
        "zero:GradPartitionBufferGroup zero:IPGBucket zero:IPGBucketZ3 "
        "zero:MultipleAllGatherHandles zero:NoGatherCoalescedHandle zero:QuantizationInfo "
        "zero:debug_rank0 zero:get_alignment_padding zero:get_all_subclasses "
        "zero:get_allgather_dtype zero:get_new_tensor_fn_for_dtype zero:get_state_devices "
        "zero:input zero:isclose zero:lcm zero:model_to_params zero:move_to_cpu "
        "zero:offload_adam_states zero:offload_optimizer_states zero:print_rank_0 "
        "zero:print_rank_msg zero:reload_adam_states zero:reload_optimizer_states "
        "zero:restore_init_context zero:shutdown_init_context zero:split_half_float_double "
        "zero:unpin_offloaded_optimizer_states"
    ),
}
_WORDS = [(word, remedy) for remedy, words in _TABLE.items() for word in words.split()]
_OF_KIND = ("get_{}_group", "_get_{}_group", "_get_{}_group_dict")
ABSENT_MODULES: Mapping[str, str] = {word: remedy for word, remedy in _WORDS if ":" not in word}
# By module: each name with the remedy.
ABSENT: dict[str, dict[str, str]] = {}
for _word, _remedy in _WORDS:
    if ":" in _word:
        _module, _, _name = _word.partition(":")
        _is_kind = _module == "groups" and not _name.startswith(("get_", "set_", "initialize"))
        _names = [x.format(_name) for x in _OF_KIND] if _is_kind else [_name]
        ABSENT.setdefault(_module, {}).update(dict.fromkeys(_names, _remedy))


class _Absent(type):
    """The class of placeholders, whose uses raise."""

    _message: str

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, _Absent):
                base._raise()
        return super().__new__(cls, name, bases, body)

    def _raise(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise OptionError(cls._message)

    __call__ = __enter__ = __exit__ = __iter__ = __len__ = __getitem__ = _raise

    def __getattr__(cls, name: str) -> Any:
        if is_dunder(name):
            raise AttributeError(name)
        cls._raise()


@functools.cache
def placeholder(path: str, remedy: str) -> Any:
    """Return the one placeholder for a name, by its path without ``deepspeed``."""
    module, _, name = f"deepspeed.{path}".rpartition(".")
    body = {"__module__": module, "_message": _message(f"{module}.{name}", remedy)}
    return _Absent(name, (), body)


def remedy_of(path: str) -> str | None:
    """Return the remedy of a module that is absent; ``None`` for a module that is here."""
    parts = path.split(".")
    starts = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ABSENT_MODULES[start] for start in starts if start in ABSENT_MODULES), None)


def is_dunder(name: str) -> bool:
    """Return whether a name belongs to Python."""
    return name.startswith("__") and name.endswith("__")


def absent(module: str, known: Mapping[str, Any], key: str | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: submodules, placeholders, or an error.

    ``module`` is its path in the package, and ``key`` its name in the table, by default the path;
    ``known`` has the names that are there.
    """
    table = module if key is None else key

    def find(name: str) -> Any:
        if is_dunder(name):
            raise AttributeError(name)
        remedy = ABSENT.get(table, {}).get(name)
        if remedy is not None:
            return placeholder(f"{module}.{name}".lstrip("."), remedy)
        full = f"{known['__name__']}.{name}"
        if "__path__" in known and importlib.util.find_spec(full) is not None:
            return importlib.import_module(full)
        raise refusal(table, name, known)

    return find


class AbsentName(OptionError, AttributeError):
    """A name that is not there, for which ``hasattr`` answers that it is not."""


def refusal(module: str, name: str, known: Mapping[str, Any]) -> Exception:
    """Return the error of a name that is not there."""
    full = f"deepspeed.{module}.{name}" if module else f"deepspeed.{name}"
    remedy = ABSENT.get(module, {}).get(name)
    if remedy is not None:
        return AbsentName(_message(full, remedy))
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see the page 'From DeepSpeed'"
    return AttributeError(_message(full, hint))


def _message(full: str, remedy: str) -> str:
    return (
        f"zfun.interop.deepspeed has the names of DeepSpeed that train; got {full}, which is not "
        f"there; {remedy}"
    )

"""Names of DeepSpeed that are not here, each with the name to use instead.

A script imports more names than it uses, so an absent name imports as a placeholder, which raises
its remedy when it is used. An absent module gives placeholders, beside its constants. A name that
DeepSpeed does not have either stays an ``AttributeError``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from zfun.errors import OptionError
from zfun.interop.deepspeed._placeholders import is_dunder, message, placeholder

# By remedy: the modules without any name here, and names as MODULE:NAME,NAME. MODULE is the last
# part of a path, and empty for the package; engine:NAME and engine.optimizer:NAME are attributes,
# and groups:KIND stands for the functions that return a process group of a kind of parallelism.
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
        "inference model_implementations module_inject :init_inference,default_inference_config,"
        "InferenceEngine,DeepSpeedInferenceConfig,replace_transformer_layer,revert_transformer_layer"
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
        "moe utils:split_params_into_different_moe_groups_for_optimizer,is_moe_param_group,"
        "configure_moe_param_groups,has_moe_layers,split_params_into_shared_and_expert_params,"
        "split_params_grads_into_shared_and_expert_params "
        "groups:expert_parallel,expert_data_parallel,initialize"
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
        "profiling engine:timers,engine_timers :EngineTimers checkpointing:PROFILE_TIME "
        "utils:SynchronizedWallClockTimer,ThroughputTimer,get_caller_func"
    ),
    "test with isinstance(optimizer, torch.optim.Optimizer)": (
        "runtime.base_optimizer :DeepSpeedOptimizer runtime:DeepSpeedOptimizer"
    ),
    "write the options into the configuration that initialize() takes": (
        "runtime.bf16_optimizer runtime.constants runtime.precision_config utils.config"
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
        ":DeepSpeedOptimizerCallable,DeepSpeedSchedulerCallable runtime:ZeROOptimizer "
        "zero:DeepSpeedZeroOptimizer,DeepSpeedZeroOptimizer_Stage3,FP16_DeepSpeedZeroOptimizer,"
        "FP16_DeepSpeedZeroOptimizer_Stage3"
    ),
    "read engine.cur_scale, and write fp16 into the configuration": (
        "runtime.fp16.loss_scaler engine.optimizer:loss_scaler"
    ),
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
    "use torch.distributed": "comm.constants comm:TorchBackend",
    "use a dataclass": "config:DeepSpeedConfigModel",
    "use zfun.interop.solve_batch": "config:ElasticityConfig",
    "call backward() and step(), which sum over the ranks": (
        "engine:allreduce_gradients engine.optimizer:reduce_gradients,"
        "overlapping_partition_gradients_reduce_epilogue,independent_gradient_partition_epilogue"
    ),
    "read values with utils.safe_get_full_fp32_param or utils.safe_get_local_fp32_param, and "
    "parameters with engine.module.named_parameters()": (
        "engine.optimizer:bit16_groups,bit16_groups_flat,bf16_groups,bf16_groups_flat,fp16_groups,"
        "fp16_groups_flat,fp16_partitioned_groups,fp16_partitioned_groups_flat,fp32_groups,"
        "fp32_groups_flat,fp32_groups_flat_partition,fp32_partitioned_groups_flat,param_names,"
        "single_partition_of_fp32_groups,partition_count,partition_size,get_full_hp_param"
    ),
    "call engine.save_checkpoint() on all ranks": (
        "engine:_save_checkpoint,_create_checkpoint_file,_save_zero_checkpoint,"
        "_create_zero_checkpoint_files engine.optimizer:checkpoint_event_prologue,"
        "checkpoint_event_epilogue"
    ),
    "call engine.load_checkpoint() on all ranks": "engine:_load_checkpoint,_load_zero_checkpoint",
    "read engine.config, which is as written, or DeepSpeedConfig(engine.config)": "engine:_config",
    "read engine.data_parallel_group": (
        "engine:seq_data_parallel_group engine.optimizer:dp_process_group,real_dp_process_group"
    ),
    "call engine.gradient_clipping()": "engine.optimizer:clip_grad",
    "read engine.optimizer.overflow": "engine.optimizer:check_overflow,has_overflow",
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
    "use safe_get_full_grad": (
        "utils:get_full_hp_grad engine.optimizer:averaged_gradients,get_fp32_grad_for_param,"
        "get_fp32_grad_partitions"
    ),
    "use safe_get_full_fp32_param": "utils:get_full_hp_param",
    "use engine.get_global_grad_norm()": (
        "utils:get_global_norm engine.optimizer:scaled_global_norm,get_grad_norm_direct"
    ),
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
        "comm:get_local_rank_from_launcher,get_world_rank_from_launcher,"
        "get_world_size_from_launcher,mpi_discovery"
    ),
    "generate with engine.generate()": "zero:unwrap_model_for_generation",
    "call estimate_zero2_model_states_mem_needs_all_live or the form for stage 3": (
        "zero:estimate_zero2_model_states_mem_needs zero:estimate_zero3_model_states_mem_needs"
    ),
    "use chunks of zf.parallel.tiled": ("runtime.chunked_cross_entropy"),
    "use zf.remat(block, store=...)": ("runtime.activation_checkpointing.offload_activations"),
    "it is a part of DeepSpeed itself; see the page 'From DeepSpeed'": (
        "comm.backend comm.ccl comm.config comm.mori comm.pg_utils comm.reduce_op compat "
        "datastates ops.adam.zenflow_cpu_adam ops.lion.multi_tensor_apply ops.triton_ops "
        "runtime.activation_checkpointing.config runtime.hybrid_engine_graph runtime.keep_in_fp32 "
        "runtime.pipe.dualpipev runtime.python_gc runtime.zero.partitioned_param_profiler "
        "runtime.zero.test utils.pin_memory_tracker utils.static_cache :is_even,"
        "resolve_per_head_muon_after_sharding,split_half_float_double_sparse "
        "checkpointing:detach_variable,extract_tensors,get_cpu_activations_for_backward,"
        "get_offloaded_activations_for_backward,get_partition_size,get_partition_start,"
        "get_partitioned_activations_for_backward,is_activation_to_checkpoint,merge_tensors,"
        "restore_offloaded_activations comm:Noop,StagedWork,all_gather_comm_off,"
        "all_reduce_comm_off,backward_comm_off,broadcast_comm_off,build_shm_op,"
        "disable_compiler_collective,enable_symm_mem_for_group,get_coalescing_manager,"
        "get_comm_operation_count,get_debug_log_name,get_default_args,get_logged_comm_ops,"
        "get_msg_size_from_args,get_tensor_kwarg,get_tensor_position,has_all_reduce_coalesced,"
        "has_comm_data,in_aml,in_aws_sm,in_dlts,init_deepspeed_backend,known_world_size,"
        "patch_aml_env_for_torch_nccl_backend,patch_aws_sm_env_for_torch_nccl_backend,"
        "reduce_comm_off,reduce_scatter_comm_off,set_backend,stage_on_cpu,timed_op "
        "config:DeepSpeedConfigObject,DeepSpeedConfigWriter,DtypeEnum,"
        "ScientificNotationEncoder,dict_raise_error_on_duplicate_keys,"
        "get_checkpoint_parallel_write_pipeline,get_checkpoint_params,"
        "get_checkpoint_tag_validation_mode,get_communication_data_type,get_config_default,"
        "get_data_types_params,get_dataloader_drop_last,get_dict_param,get_disable_allgather,"
        "get_disable_python_gc,get_dump_state,get_expert_data_topo_config,"
        "get_expert_parallel_config,get_gradient_accumulation_steps,get_gradient_allreduce_op,"
        "get_gradient_clipping,get_gradient_predivide_factor,get_hybrid_engine_config,"
        "get_list_param,get_log_level,get_lower_precision_safe_modules,"
        "get_managed_gradient_accumulation,get_memory_breakdown,get_optimizer_gradient_clipping,"
        "get_optimizer_legacy_fusion,get_optimizer_name,get_optimizer_params,"
        "get_pipeline_config,get_prescale_gradients,get_scalar_param,get_scheduler_name,"
        "get_scheduler_params,get_steps_per_print,get_torch_autocast_dtype,"
        "get_torch_autocast_enabled,get_train_batch_size,get_train_micro_batch_size_per_gpu,"
        "get_wall_clock_breakdown,get_zero_allow_untested_optimizer,"
        "get_zero_force_ds_cpu_optimizer,pp_int,read_zero_config_deprecated "
        "groups:get_tensor_model_parallel_src_rank,set_tensor_model_parallel_rank,"
        "set_tensor_model_parallel_world_size launcher:apply_num_nodes_and_gpus,"
        "encode_world_info,parse_inclusion_exclusion,parse_node_config,parse_node_config_list,"
        "parse_resource_filter,run_autotuning ops:SingleDeviceMuon,SingleDeviceMuonWithAuxAdam,"
        "ZenFlowSelectiveAdamW_stage3,adam_update,adamw,muon_update,ns_compute_dtype,"
        "zeropower_via_gram_newtonschulz,zeropower_via_newtonschulz5 "
        "runtime.lr_schedules:add_tuning_arguments,get_config_from_args,get_lr_from_config,"
        "get_torch_optimizer,override_1cycle_params,override_lr_range_test_params,"
        "override_params,override_warmupCosineLR_params,override_warmupLR_params,"
        "parse_arguments,update_lr utils:CudaEventTimer,DummyOptim,LoggerFactory,NoopTimer,"
        "OutputBackwardHookManager,TLinear,align_dense_tensors,all_gather_dp_groups,"
        "all_gather_into_tensor_dp_groups,apply_zero_leaf_module_config,"
        "bwc_pipeline_parallel_group,bwc_pipeline_parallel_world_size,"
        "bwc_tensor_model_parallel_group,bwc_tensor_model_parallel_world_size,call_to_str,"
        "check_internal_apis_for_count_used_parameters,combine_grad_norm_groups,"
        "compare_tensors_in_structures,copy_to_device,count_used_parameters_in_backward,"
        "filter_empty_parameters,fragment_address,get_checkpoint_folder_size,get_current_level,"
        "get_dist_msg,get_flattened_grad_norm,get_grad_zeros,get_hp_fragment_mapping,"
        "get_inactive_params,get_layer_ckpt_name_for_rank,get_log_level_from_string,"
        "get_ma_status,get_model_ckpt_name_for_rank,get_norm_with_moe_layers,"
        "get_norm_with_moe_layers_fast,get_only_unique_item,get_tensor_bytes,"
        "get_zero_ckpt_name_for_rank,has_inf_or_nan,is_invalid_grad_norm,"
        "is_model_parallel_parameter,is_optimized_parameter,is_transformers_cache,"
        "map_to_flat_opt_states,mask_nan_or_inf_with_val_inplace,maybe_loss_for_backward,"
        "noop_decorator,offload_adam_states,partition_balanced,partition_uniform,"
        "prefix_sum_inc,print_configuration,print_dist,print_json_dist,"
        "register_output_backward_hooks,reload_adam_states,safe_update_full_grad_vectorized,"
        "set_full_hp_grad,set_full_hp_param,should_log_le,is_functorch_transforming,"
        "jit_script_compat,register_grad_hook,trim_mean,warning_once "
        "utils.zero_to_fp32:GatheredTensor,atoi,convert_zero_checkpoint_to_state_dict,"
        "get_checkpoint_files,get_model_state_files,natural_keys,parse_model_states,"
        "parse_optim_states,to_torch_tensor,zero3_partitioned_param_info,zero_model_state "
        "runtime.zero.utils:ZeRORuntimeException,apply_to_tensors_only,assert_ints_same_as_other_ranks,"
        "assert_lst_len_same_as_other_ranks,defragment,get_lst_from_rank0,"
        "get_mapping_to_flat_buffer,get_norm_dtype,is_builtin_type,is_zero_param,"
        "isinstance_namedtuple zero:AllReduceCoalescedHandle,CUDAQuantizer,DeepSpeedTensorOverride,"
        "GradPartitionBufferGroup,IPGBucket,IPGBucketZ3,MultipleAllGatherHandles,"
        "NoGatherCoalescedHandle,QuantizationInfo,debug_rank0,get_alignment_padding,"
        "get_all_subclasses,get_allgather_dtype,get_new_tensor_fn_for_dtype,get_state_devices,"
        "input,isclose,lcm,model_to_params,move_to_cpu,offload_adam_states,"
        "offload_optimizer_states,print_rank_0,print_rank_msg,reload_adam_states,"
        "reload_optimizer_states,restore_init_context,shutdown_init_context,"
        "split_half_float_double,unpin_offloaded_optimizer_states"
    ),
}
_WORDS = [(word, remedy) for remedy, words in _TABLE.items() for word in words.split()]
_OF_KIND = ("get_{}_group", "_get_{}_group", "_get_{}_group_dict")
ABSENT_MODULES: Mapping[str, str] = {word: remedy for word, remedy in _WORDS if ":" not in word}
# By module: each name with the remedy.
ABSENT: dict[str, dict[str, str]] = {}
for _word, _remedy in _WORDS:
    if ":" in _word:
        _module, _, _listed = _word.partition(":")
        for _name in _listed.split(","):
            _is_kind = _module == "groups" and not _name.startswith(("get_", "set_", "initialize"))
            _names = [x.format(_name) for x in _OF_KIND] if _is_kind else [_name]
            ABSENT.setdefault(_module, {}).update(dict.fromkeys(_names, _remedy))


def remedy_of(path: str) -> str | None:
    """Return the remedy of a module that is absent; ``None`` for a module that is here."""
    parts = path.split(".")
    starts = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ABSENT_MODULES[start] for start in starts if start in ABSENT_MODULES), None)


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
        return AbsentName(message(full, remedy))
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see the page 'From DeepSpeed'"
    return AttributeError(message(full, hint))

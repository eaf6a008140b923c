"""The configuration entries of ONNX Runtime's sessions that a model may set.

ONNX Runtime has entries that write files (an optimized model, profiles), read any, or switch its own checks of paths off.
So those among a model's parameters are a list; --backend-config, which is the operator's, may set every one.
"""

from __future__ import annotations

from collections.abc import Mapping

from neptrio.errors import InvalidArgument

PREFIXES = ("session.", "ep.", "mlas.", "optimization.")
ALLOWED = frozenset({
    "session.disable_aot_function_inlining", "session.disable_cpu_ep_fallback", "session.disable_double_qdq_remover",
    "session.disable_prepacking", "session.disable_qdq_constant_folding", "session.disable_quant_qdq",
    "session.dynamic_block_base", "session.enable_cpu_mem_arena", "session.enable_dq_matmulnbits_fusion",
    "session.enable_mem_pattern", "session.enable_quant_qdq_cleanup", "session.execution_mode",
    "session.force_spinning_stop", "session.function_expansion_byte_limit", "session.function_expansion_node_limit",
    "session.graph_optimization_level", "session.graph_optimizations_loop_level", "session.inter_op.allow_spinning",
    "session.inter_op.spin_backoff_max", "session.inter_op.spin_duration_us", "session.inter_op_num_threads",
    "session.intra_op.allow_spinning", "session.intra_op.spin_backoff_max", "session.intra_op.spin_duration_us",
    "session.intra_op_num_threads", "session.intra_op_thread_affinities", "session.load_model_format",
    "session.prepack.enable_parallel", "session.qdq_matmulnbits_accuracy_level", "session.qdq_matmulnbits_block_size",
    "session.set_denormal_as_zero", "session.strict_shape_type_inference", "session.use_deterministic_compute",
    "session.use_device_allocator_for_initializers", "session.use_env_allocators",
    "session.use_ort_model_bytes_directly", "session.use_ort_model_bytes_for_initializers",
    "ep.cuda.fpa_intb_gemm", "ep.cuda.fpa_intb_profile_m", "ep.cuda.gqa_workspace_max_total_sequence_length",
    "ep.dynamic.workload_type",
    "session.qdqisint8allowed", "session.x64quantprecision", "mlas.qnbit.force_fp32",
    "mlas.disable_kleidiai", "mlas.enable_gemm_fastmath_arm64_bfloat16", "mlas.kleidiai.conv_igemm_max_work",
    "mlas.nchwc_depthwise_sliding", "mlas.nchwc_pointwise_conv_max_input_channel_batch", "mlas.use_lut_gemm",
    "optimization.constant_folding_max_output_size_in_bytes", "optimization.disable_specified_optimizers",
    "optimization.enable_cast_chain_elimination", "optimization.enable_gelu_approximation",
})  # fmt: skip


def chosen(of_model: Mapping[str, str], of_server: Mapping[str, str], model: str) -> dict[str, str]:
    """The entries of a session: the model's parameters in front of the server's. Raises InvalidArgument."""
    for key in of_model:
        if key.startswith(PREFIXES) and key not in ALLOWED:
            raise InvalidArgument(
                f"parameter '{key}' of model '{model}' is no session option that a configuration may set (docs/onnx.md "
                f"lists them); --backend-config=onnxruntime,{key}=VALUE may"
            )
    return {k: v for k, v in {**of_server, **of_model}.items() if k.startswith(PREFIXES)}

"""SGLang plugin (entry point group `sglang.srt.plugins`): the engine's part of weight sync and replay, with or without a GPU.

`pip install --no-deps ./sglang_plugin` installs the plugin into SGLang's environment. Each process of a server finds and calls
`register`. The package imports torch, but not the trainer.
"""

from __future__ import annotations


def register() -> None:
    """Register all hooks of the plugin.

    The hooks change SGLang in these points:
    - Checksums are fingerprints that add up over fused tensors. In FP8, the stored weights and scales are hashed; SGLang would
      hash their product in bf16.
    - The weights of an update may be in the trainer's shared memory.
    - Replies contain routes as small integers. If the server's model config asks for gates, replies contain them too.
    - Requests may have seeds.
    - Sinks are in fp32 if the model is in fp32.
    - Heads of all widths can be served in bf16.
    - With `precision.identical`, the model uses the trainer's operators.
    - For `megatron-rl certify`, the model records the outputs of its operators.
    - A request names its logit processor; nothing is unpickled.
    - The rendezvous store of processes that meet on 127.0.0.1 listens only on this address.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils.common import SafeUnpickler

    from megatron_rl_plugin import (
        fingerprint,
        gates,
        identical,
        kernels,
        memory,
        processors,
        routes,
        seeds,
        sinks,
        stores,
        trace,
    )

    HookRegistry.register("sglang.srt.utils.weight_checker._hash_tensor", fingerprint.describe, HookType.REPLACE)
    HookRegistry.register("sglang.srt.utils.weight_checker._build_quantized_set", lambda model: {}, HookType.REPLACE)
    capturer = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer"
    HookRegistry.register(f"{capturer}.get_topk", routes.compact, HookType.AFTER)
    HookRegistry.register(f"{capturer}.create", gates.of_capturer, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.moe.topk._post_process_topk_ids", gates.capture, HookType.AROUND)
    info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{info}.from_schedule_batch", seeds.of_requests, HookType.AFTER)
    HookRegistry.register(f"{info}.merge_batch", seeds.before_merge, HookType.BEFORE)
    named = "sglang.srt.sampling.custom_logit_processor._cache_from_str"
    HookRegistry.register(named, processors.class_named, HookType.REPLACE)
    HookRegistry.register("sglang.srt.models.gpt_oss.GptOssAttention.__init__", sinks.in_fp32, HookType.AFTER)
    fused = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
    HookRegistry.register(fused, kernels.rotates_and_writes, HookType.AROUND)
    fused = "sglang.kernels.ops.layernorm.norm.can_use_fused_inplace_qknorm"
    HookRegistry.register(fused, kernels.normalizes_both, HookType.AROUND)
    load = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(load, identical.after_load, HookType.AFTER)
    HookRegistry.register(load, trace.after_load, HookType.AFTER)
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", stores.on_loopback, HookType.AROUND)
    SafeUnpickler.ALLOWED_GLOBALS |= memory.GLOBALS

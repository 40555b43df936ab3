"""What to say about settings of vLLM, SGLang and llama.cpp that Octavo does not have: one sentence each.

Names have no dashes in front and "_" between words, so that flag, variable and keyword are one name. No name here is a
setting of ours.
"""

# Their name: our setting that does the same.
OTHER_NAMES = {
    "alias": "served_model_name",
    "batch_size": "max_num_batched_tokens",
    "c": "max_model_len",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "chat_template_file": "chat_template",
    "chunked_prefill_size": "max_num_batched_tokens",
    "context_length": "max_model_len",
    "ctk": "kv_cache_dtype",
    "ctv": "kv_cache_dtype",
    "ctx_size": "max_model_len",
    "disable_cuda_graph": "enforce_eager",
    "gpus": "tensor_parallel_size",
    "hf_repo": "model",
    "m": "model",
    "max_prefill_tokens": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_seq_len_to_capture": "max_model_len",
    "max_total_tokens": "kv_cache_memory_bytes",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "np": "max_num_seqs",
    "num_gpu_blocks_override": "kv_cache_memory_bytes",
    "page_size": "block_size",
    "parallel": "max_num_seqs",
    "q": "quantization",
    "random_seed": "seed",
    "reasoning_format": "reasoning_parser",
    "t": "num_threads",
    "threads": "num_threads",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "uvicorn_log_level": "log_level",
    "watchdog_timeout": "hang_timeout_s",
}

# The sentence: the names that get it. It says what to do instead, or that Octavo has nothing of the kind.
_NOT_HERE = {
    "there are no LoRA adapters: merge the adapter into the model's weights and serve the result": """
        enable_lora enable_lora_bias max_loras max_lora_rank max_cpu_loras lora_modules lora_dtype lora_extra_vocab_size
        fully_sharded_loras long_lora_scaling_factors default_mm_loras enable_tower_connector_lora
        specialize_active_lora qlora_adapter_name_or_path enable_prompt_adapter max_prompt_adapters
        max_prompt_adapter_token lora lora_paths lora_scaled""",
    "start one server for each replica, with a load balancer in front of them": """
        data_parallel_size dp data_parallel_rank dpn data_parallel_start_rank dpr data_parallel_size_local dpl
        data_parallel_address dpa data_parallel_rpc_port dpp data_parallel_backend dpb data_parallel_hybrid_lb dph
        data_parallel_external_lb dpe data_parallel_supervisor_port data_parallel_multi_port_external_lb
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold
        disable_nccl_for_dp_synchronization dp_size enable_dp_attention load_balance_method""",
    "a model is divided by tensor_parallel_size only": """
        pipeline_parallel_size pp pp_size prefill_context_parallel_size pcp decode_context_parallel_size dcp
        dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size split_mode sm tensor_split ts""",
    "a model with experts runs on one device: experts are not divided": """
        enable_expert_parallel ep ep_size all2all_backend enable_eplb eplb_config enable_elastic_ep
        expert_placement_strategy num_redundant_experts eplb_window_size eplb_step_interval
        enable_return_routed_experts moe_a2a_backend""",
    "steps are not divided further to hide communication": """
        enable_dbo ubatch_size ub dbo_decode_token_threshold dbo_prefill_token_threshold enable_two_batch_overlap""",
    "start the ranks of other machines one by one: `python -m octavo.executor`, with distributed_address": """
        nnodes n node_rank r master_addr master_port headless dist_init_addr nccl_init_addr
        distributed_timeout_seconds""",
    "ranks are plain processes that `octavo serve` starts: there is nothing to choose": """
        distributed_executor_backend worker_use_ray ray_workers_use_nsight worker_cls worker_extension_cls
        disable_custom_all_reduce max_parallel_loading_workers""",
    "start further gateways for the same scheduler: `python -m octavo.gateway`": "api_server_count",
    "gateway, scheduler and executor are always processes of their own": "disable_frontend_multiprocessing",
    "weights are not offloaded: take a model of fewer bits (quantization) or more ranks": """
        cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_prefetch_step
        offload_params moe_cpu_budget_gb moe_cpu_min_free_gb""",
    "all layers are on the GPU; on a machine without a GPU, on the CPU": """
        ngl gpu_layers n_gpu_layers device dev main_gpu mg base_gpu_id cpu_moe n_cpu_moe mlock mmap""",
    "the KV cache is not swapped out: a sequence that is preempted is computed again": """
        swap_space preemption_mode kv_offloading_size kv_offloading_backend enable_hierarchical_cache""",
    "one server computes both prompts and outputs: the KV cache is not passed to others": """
        kv_transfer_config kv_events_config ec_transfer_config tokens_only disaggregation_mode
        weight_transfer_config""",
    "there is no speculative decoding": """
        speculative_config sc spec_method spec_model spec_tokens speculative_model speculative_model_quantization
        num_speculative_tokens speculative_disable_mqa_scorer speculative_draft_tensor_parallel_size spec_draft_tp
        speculative_max_model_len speculative_disable_by_batch_size speculative_algorithm speculative_draft_model_path
        speculative_num_steps speculative_num_draft_tokens speculative_eagle_topk ngram_prompt_lookup_max
        ngram_prompt_lookup_min spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold
        typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding num_lookahead_slots
        model_draft md draft draft_max draft_min""",
    "the formats of calls and of thinking are those that tool_call_parser and reasoning_parser name": """
        tool_parser_plugin reasoning_parser_plugin reasoning_config cohere_is_reasoning_model""",
    "the server runs no tools: clients do": "tool_server",
    "tools are left out of the prompt whenever tool_choice is none": "exclude_tools_when_tool_choice_none",
    "requests set it: thinking_token_budget": "reasoning_budget",
    "there are no structured outputs: requests that ask for them are refused": """
        structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback
        guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties grammar_backend
        grammar json_schema""",
    "models read text only": """
        limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend enable_mm_embeds
        enable_mm_processor_stats disable_mm_preprocessor_cache disable_chunked_mm_input interleave_mm_strings
        skip_mm_profiling media_io_kwargs video_pruning_rate language_model_only allowed_local_media_path
        allowed_media_domains trust_request_mm_kwargs io_processor_plugin mmproj enable_multimodal""",
    "every model has /v1/embeddings: --pooling says of which tokens a vector is made": """
        task runner convert pooler_config override_pooler_config embedding embeddings is_embedding""",
    "there are no scores, no reranking, and no prompts given as vectors": """
        enable_flash_late_interaction rerank reranking enable_prompt_embeds""",
    "a model is what its directory says: serve a directory whose config.json has the change": """
        hf_overrides hf_config_path rope_scaling rope_theta rope_freq_base rope_freq_scale disable_sliding_window
        override_attention_dtype config_format json_model_override_args language_only""",
    "a model's code is Octavo's own or, for other architectures, transformers'": "model_impl override_neuron_config",
    "the tokenizer is the one in the model's directory": """
        tokenizer tokenizer_mode tokenizer_path skip_tokenizer_init tokenizer_pool_size tokenizer_pool_type
        tokenizer_pool_extra_config intial_incremental_detokenization_offset cohere_format
        enable_tokenizer_info_endpoint""",
    "the hub's main branch is served: for another, `hf download ID --revision R --local-dir D`, and serve D": """
        revision code_revision tokenizer_revision""",
    "set the variable HF_TOKEN": "hf_token hft",
    "set the variable HF_HOME: downloads go there": "download_dir",
    "all checkpoints are read in one way; load_format is the only choice": """
        safetensors_load_strategy model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location""",
    "the setting quantization has all choices": "allow_deprecated_quantization quantization_param_path",
    "an fp8 KV cache has no scales": "calculate_kv_scales",
    "attention_backend alone chooses the kernels": """
        attention_config ac kernel_config moe_backend linear_backend enable_flashinfer_autotune disable_cascade_attn
        ir_op_priority flash_attn fa sampling_backend prefill_attention_backend decode_attention_backend""",
    "kernels need no compilation by torch; decode steps are CUDA graphs unless enforce_eager": """
        compilation_config cc optimization_level o o0 o1 o2 o3 performance_mode cudagraph_capture_sizes
        max_cudagraph_capture_size cuda_graph_sizes cuda_graph_max_bs cuda_graph_bs enable_torch_compile
        additional_config""",
    "prompts are always computed in chunks; target_step_s and max_num_batched_tokens limit their size": """
        max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold enable_mixed_chunk""",
    "the order is fixed: first come, first served, and a request of many sequences takes turns with the others": """
        scheduling_policy schedule_policy scheduler_cls schedule_conservativeness scheduler_delay_factor""",
    "one step is planned at a time, the next while it runs (async_scheduling)": """
        num_scheduler_steps multi_step_stream_outputs disable_async_output_proc disable_overlap_schedule
        cont_batching cb""",
    "the scheduler leaves room by itself: max_num_seqs and max_num_queued_reqs are the limits that can be set": """
        watermark scheduler_reserve_full_isl max_num_active_seqs max_num_queued_tokens""",
    "each token is sent as soon as it is there": "stream_interval stream_output",
    "streams are kept open by a comment after 10 seconds of silence": "sse_keep_alive_interval",
    "the KV cache has one layout for all models": """
        disable_hybrid_kv_cache_manager use_v2_block_manager kv_sharing_fast_prefill mamba_cache_dtype
        mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode""",
    "enable_prefix_caching turns the prefix cache on and off; how blocks are hashed is fixed": """
        prefix_caching_hash_algo disable_radix_cache cache_reuse""",
    "logprobs are those of the model's own distribution": "logprobs_mode",
    "a request's fields shape its sampling: there are no custom processors": """
        logits_processors logits_processor_pattern""",
    "serve with generation_config, a directory whose generation_config.json has the defaults": """
        override_generation_config temp temperature top_k top_p min_p repeat_penalty n_predict""",
    "the server has one chat template (chat_template); requests may send chat_template_kwargs": """
        default_chat_template_kwargs trust_request_chat_template chat_template_content_format response_role jinja""",
    "a client asks for the usage with stream_options.include_usage": "enable_force_include_usage",
    "a token is shown as text; part of a character is shown as its bytes": "return_tokens_as_token_ids",
    "every answer has X-Request-Id already": "enable_request_id_headers",
    "system_fingerprint is always the server's": "fingerprint_mode fingerprint_value",
    "a line of figures is logged at log_level info, and not at log_level warning; /metrics always has the figures": """
        disable_log_stats aggregate_engine_logging enable_logging_iteration_details""",
    "all metrics are always at /metrics": """
        show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics
        custom_histogram_buckets enable_per_request_metrics enable_server_load_tracking enable_metrics metrics slots
        otlp_traces_endpoint collect_detailed_traces show_time_cost""",
    "no profiler is built in: start one around the process, such as nsys or py-spy": """
        profiler_config enable_layerwise_nvtx_tracing""",
    "each answer is logged in a line, at log_level debug alone; prompts and outputs are never logged": """
        enable_log_requests disable_log_requests enable_log_outputs enable_log_deltas max_log_len log_requests
        log_requests_level disable_uvicorn_access_log disable_access_log_for_endpoints""",
    "log_level is the only setting of the log, which goes to stderr": """
        log_config_file log_error_stack verbose log_disable log_file""",
    "the server speaks plain HTTP: put a proxy such as nginx in front of it for TLS": """
        ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers ssl_key_file
        ssl_cert_file""",
    "the server speaks HTTP only": "grpc grpc_port",
    "allowed_origins is the only setting for the pages of other sites": """
        allow_credentials allowed_methods allowed_headers""",
    "put a proxy in front of the server to change requests": "middleware",
    "the limits of a request's head are fixed": "h11_max_incomplete_event_size h11_max_header_count",
    "the server has no pages: docs/api.md describes the API": """
        disable_fastapi_docs enable_offline_docs webui""",
    "a server keeps its model in memory until the server ends": "enable_sleep_mode",
    "set flags, or OCTAVO_* variables: no file is read": "config api_key_file",
    "unknown variables are always refused": "fail_on_environ_validation",
    "the server answers as soon as the model is warm": "skip_server_warmup warmup",
}
SENTENCES = {name: sentence for sentence, names in _NOT_HERE.items() for name in names.split()}


def sentence(name: str) -> str:
    """Return the sentence for another server's setting, or nothing if there is no sentence.

    A part (compilation_config.mode) and a negation (no_enable_lora) get the sentence of the whole.
    """
    name = name.split(".")[0]
    return SENTENCES.get(name) or SENTENCES.get(name.removeprefix("no_"), "")

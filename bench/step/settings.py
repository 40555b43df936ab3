"""The settings that `octavo bench step` takes."""

# Of the settings, those that an executor on the CPU reads.
SETTINGS = (
    "use_modelscope",
    "trust_remote_code",
    "load_format",
    "quantization",
    "dtype",
    "max_model_len",
    "kv_cache_memory_bytes",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_threads",
)

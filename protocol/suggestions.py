"""What to say of the name of a setting that does not exist: the one that was meant, if it can be told."""

from collections.abc import Iterable
from difflib import SequenceMatcher

LEAST_LIKENESS = 0.65  # of the whole name
LEAST_WORD_LIKENESS = 0.58  # of each word that was typed; a beginning, such as "mem" of "memory", is like it too

# What other servers call a setting of ours.
OTHER_NAMES = {
    "chunked_prefill_size": "max_num_batched_tokens",
    "context_length": "max_model_len",
    "ctx_size": "max_model_len",
    "max_prefill_tokens": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_seq_len_to_capture": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "num_gpu_blocks_override": "kv_cache_memory_bytes",
    "page_size": "block_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "uvicorn_log_level": "log_level",
}
# What other servers let one choose and this one does not.
NO_CHOICE = {
    "disable_log_requests": "requests are not logged",
    "disable_log_stats": "the figures are at /metrics, not in the log",
    "swap_space": "the KV cache is not swapped out: a sequence that is preempted is computed again",
    "dp": "start one server a replica",
    "data_parallel_size": "start one server a replica",
    "pp": "a model is divided by tensor_parallel_size only",
    "pipeline_parallel_size": "a model is divided by tensor_parallel_size only",
}


def suggestion(typed: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the one of the names `known` that was meant by `typed`, or what else there is to
    say, or nothing. Names may be flags (--max-num-seqs), variables (OCTAVO_MAX_NUM_SEQS) or keywords (max_num_seqs).
    """
    name, names = _bare(typed), {_bare(other): other for other in known}
    if name in NO_CHOICE and name not in names:
        return f"; {NO_CHOICE[name]}"
    meant = OTHER_NAMES.get(name, "")
    if meant not in names:
        meant = max(
            (other for other in names if _means(name, other)), key=lambda other: _likeness(name, other), default=""
        )
    return f"; did you mean {names[meant]}?" if meant else ""


def _bare(name: str) -> str:
    return name.removeprefix("OCTAVO_").lower().replace("-", "_").strip("_")


def _means(typed: str, known: str) -> bool:
    """Whether all that was typed is like something in `known`: of a word that is not there, nothing can be told."""
    if len(typed) < 3 or _likeness(typed, known) < LEAST_LIKENESS:
        return False
    words = known.split("_")
    return all(
        any(word.startswith(part) or _likeness(part, word) >= LEAST_WORD_LIKENESS for word in words)
        for part in typed.split("_")
    )


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, other, one).ratio()

"""transformers' modelling code over a paged cache computes what it computes with attention of its own.

As in test_models.py, the reference is one forward pass of transformers over prompt and output.
"""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from octavo.executor.models import LoadPlan, read_model_config
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.kernels import cpu
from octavo.protocol.sampling import Sampling
from tests.fakes.borrowed_checkpoints import CASES, MAX_MODEL_LEN, Case, load, random_prompts, write
from tests.fakes.lazy_device import NoLooks
from tests.fakes.paged_decoding import PagedDecoding, assert_greedy, greedy_tokens
from tests.fakes.scheduler_with_runner import SchedulerWithRunner

LENGTHS = (3, 21, 40)  # of prompts


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: list[list[int]]) -> Tensor:
    """Return transformers' float32 logits_BTV of sequences of the same length."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model(torch.tensor(token_ids)).logits


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_greedy_tokens_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """All sequences run to MAX_MODEL_LEN, where transformers' frequencies are those of that length.

    A step asks for no value on its way: it can be launched ahead and recorded.
    """
    write(tmp_path, case)
    prompts, model = random_prompts(*LENGTHS), load(tmp_path)
    with NoLooks():
        PagedDecoding(model, 4, 4, torch.float32).step({0: prompts[0]})
    outputs = greedy_tokens(model, prompts, [MAX_MODEL_LEN - n for n in LENGTHS], chunk_size=16)
    assert len(set(outputs[0])) > 4, "a model that repeats itself shows little"
    wholes = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, output, logits_TV in zip(prompts, outputs, reference_logits(tmp_path, wholes), strict=True):
        assert_greedy(logits_TV[len(prompt) - 1 : -1], output)


@pytest.mark.parametrize("max_model_len", [24, 56])
def test_frequencies_are_those_of_max_model_len(max_model_len: int, tmp_path: Path) -> None:
    """A short sequence is computed with the long factors too if long ones may come, and only then."""
    directory = write(tmp_path, CASES["phi3-longrope"])
    [prompt] = random_prompts(20)
    [output] = greedy_tokens(load(directory, max_model_len=max_model_len), [prompt], [4], chunk_size=20)
    longest = [prompt + output + [0] * (max_model_len - 24)]
    assert_greedy(reference_logits(directory, longest)[0, 19:23], output)
    config = read_model_config(directory)
    fingerprints = {
        model_fingerprint(
            LoadPlan(directory, config, torch.float32, max_model_len=length, load_format="auto", backend=cpu)
        )
        for length in (24, 32, 33, 56)
    }
    assert len(fingerprints) == 2


def test_preemptions_and_prefix_hits_do_not_change_the_tokens(tmp_path: Path) -> None:
    model = load(write(tmp_path, CASES["cohere2"]))
    greedy = Sampling(max_tokens=16, seed=0, temperature=0.0)
    requests = [(prompt, greedy) for prompt in random_prompts(8, 30, 19, 25)]
    alone = [
        SchedulerWithRunner(model, torch.float32, enable_prefix_caching=False).generate([request])[0].token_ids
        for request in requests
    ]
    engine = SchedulerWithRunner(
        model, torch.float32, block_size=4, num_blocks=20, max_model_len=MAX_MODEL_LEN, max_num_seqs=4
    )
    assert [result.token_ids for result in engine.generate(requests)] == alone
    assert engine.scheduler.counters.num_preemptions > 0
    [again] = engine.generate(requests[-1:])
    assert (again.token_ids, again.num_cached_tokens) == (alone[-1], 24)

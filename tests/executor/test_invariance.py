"""The same tokens and log probabilities, bit for bit, whatever batch, chunks, blocks, prefix hits and preemptions."""

import pytest
import torch

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.runner_driver import RunnerDriver, init, share

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
NUM_TOKENS = 8
LENGTHS = [1, 5, 33, 17, 64, 9]
PROMPTS = {seq_id: [(7 * seq_id + 13 * i * i) % 317 for i in range(n)] for seq_id, n in enumerate(LENGTHS)}
SAMPLING = {
    0: {"num_logprobs": 3},
    1: {"temperature": 1.0, "seed": 11, "num_logprobs": 2},
    2: {"temperature": 0.8, "seed": 12, "top_p": 0.95, "num_logprobs": 0, "num_prompt_logprobs": 1},
    3: {"temperature": 1.2, "seed": 13, "top_k": 20, "repetition_penalty": 1.2, "num_logprobs": 1},
    4: {"num_logprobs": 0, "frequency_penalty": 0.4},
    5: {"temperature": 1.0, "seed": 15, "min_p": 0.05, "num_logprobs": 0},
}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def model(request, tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("tiny"), dtype=request.param, hidden_size=96)
    config = read_model_config(directory)
    return load_model(
        LoadPlan(directory, config, request.param, max_model_len=256, backend=cpu, progress=False)
    ), request.param


@pytest.fixture(scope="module")
def alone(model):
    """Return what each sequence gives when it runs alone, its prompt in one piece."""
    driver = make_driver(model, 16)
    return {seq_id: run_alone(driver, seq_id) for seq_id in PROMPTS}


def make_driver(model, block_size, num_blocks=600):
    decoder, dtype = model
    kv_caches = allocate_kv_caches(decoder.kv_shapes, num_blocks, block_size, dtype, CPU)
    return RunnerDriver(ModelRunner(decoder, kv_caches, cpu, block_size=block_size, num_blocks=num_blocks))


def begin(seq_id, output=()):
    return init(PROMPTS[seq_id], output, **SAMPLING[seq_id])


def run_alone(driver, seq_id):
    results = driver.do(driver.share(seq_id, PROMPTS[seq_id], init=begin(seq_id)))
    for _ in range(NUM_TOKENS - 1):
        results += driver.do(driver.share(seq_id, []))
    return gather(results)


def gather(results):
    """Return a sequence's tokens, their log probabilities, and those of its prompt."""
    logprobs = [result.logprobs for result in results if result.logprobs is not None]
    of_prompt = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    joined = sum(of_prompt[1:], of_prompt[0]) if of_prompt else None
    return [token for result in results for token in result.token_ids], logprobs, joined


def run_together(driver, budget, start_every=1):
    """Run all sequences in steps of at most `budget` tokens, a new one joining every `start_every` steps."""
    todo = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    results = {seq_id: [] for seq_id in PROMPTS}
    num_sampled = dict.fromkeys(PROMPTS, 0)
    for number in range(500):
        room, shares = budget, []
        for seq_id in PROMPTS:
            if num_sampled[seq_id] == NUM_TOKENS or not room or number < seq_id * start_every:
                continue
            starts = len(todo[seq_id]) == len(PROMPTS[seq_id]) and not results[seq_id]
            part, todo[seq_id] = todo[seq_id][:room], todo[seq_id][room:]
            room -= len(part) or 1
            samples = not todo[seq_id]
            shares.append(driver.share(seq_id, part, sample=samples, init=begin(seq_id) if starts else None))
            num_sampled[seq_id] += samples
        if not shares:
            break
        for part, result in zip(shares, driver.do(*shares), strict=True):
            results[part.seq_id].append(result)
    return {seq_id: gather(parts) for seq_id, parts in results.items()}


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize(("budget", "start_every"), [(7, 1), (16, 2), (500, 0)])
def test_batches_chunks_and_blocks(model, alone, block_size, budget, start_every):
    assert run_together(make_driver(model, block_size), budget, start_every) == alone


def test_the_baseline_is_worth_comparing_with(alone):
    tokens = [sequence[0] for sequence in alone.values()]
    assert all(len(sequence) == NUM_TOKENS for sequence in tokens)
    assert len({token for sequence in tokens for token in sequence}) > 20
    assert alone[2][2].num_tokens == len(PROMPTS[2]) - 1


@pytest.mark.parametrize("num_kept", [1, 3, 7])
def test_preemption(model, alone, num_kept):
    """Its blocks go to another sequence; it is computed again, prompt and output together, in chunks."""
    driver = make_driver(model, 8)
    for seq_id in (3, 4, 1):
        expected_tokens, expected_logprobs, _ = alone[seq_id]
        results = driver.do(driver.share(seq_id, PROMPTS[seq_id], init=begin(seq_id)))
        for _ in range(num_kept - 1):
            results += driver.do(driver.share(seq_id, []))
        output = gather(results)[0]
        driver.preempt(seq_id)
        driver.do(driver.share(0, PROMPTS[5] * 9, init=init(PROMPTS[5] * 9)), forget=[seq_id])
        driver.preempt(0)
        known = PROMPTS[seq_id] + output
        results += driver.do(driver.share(seq_id, known[:4], sample=False, init=begin(seq_id, output)))
        results += driver.do(driver.share(seq_id, known[4:]))
        for _ in range(NUM_TOKENS - num_kept - 1):
            results += driver.do(driver.share(seq_id, []))
        assert gather(results)[:2] == (expected_tokens, expected_logprobs)


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_prefix_hits(model, alone, block_size):
    """A second sequence takes the blocks of the first one's prompt and computes only the rest."""
    driver = make_driver(model, block_size)
    prompt = PROMPTS[4]
    driver.do(driver.share(40, prompt, init=init(prompt)))
    num_cached = (len(prompt) - 1) // block_size * block_size
    blocks = driver.tables[40][: num_cached // block_size] + list(range(400, 420))
    [first] = driver.do(share(4, num_cached, prompt[num_cached:], blocks, init=begin(4)))
    results = [first]
    for i in range(NUM_TOKENS - 1):
        results += driver.do(share(4, len(prompt) + i, [], blocks))
    assert gather(results) == alone[4]

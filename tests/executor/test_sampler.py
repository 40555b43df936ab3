import gc
import itertools
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from octavo.executor.step import sampler
from octavo.executor.step.columns import make_columns, to_device
from octavo.executor.step.device import CpuDevice
from octavo.executor.step.edits import JoinedEdits
from octavo.executor.step.sequences import SequenceState
from octavo.kernels import cpu
from octavo.kernels import reference as plain
from octavo.kernels.philox import philox, uniform
from octavo.protocol.messages import Logprobs, pack_ids
from tests.fakes.lazy_device import NoLooks
from tests.fakes.runner_driver import init

HOST = CpuDevice()
MASK = (1 << 64) - 1


def sequence(prompt=(1, 2, 3), output=(), **sampling):
    return SequenceState.from_init(init(prompt, output, **{"max_tokens": 100, "temperature": 1.0} | sampling), 0)


def random_logits(num_rows, vocab_size, seed=0, scale=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits_SV, sequences, *, is_lazy=False):
    """Return the tokens and log probabilities of the sequences' rows, as a step's results have them."""
    columns, edits = make_columns(sequences), JoinedEdits(HOST.upload).of(sequences)
    sampled = sampler.sample(logits_SV, to_device(columns, HOST.upload), edits, cpu, is_lazy=is_lazy)
    logprobs = [None] * len(sequences)
    if sampled.logprobs is not None:
        wanting = columns.wanted.row_R.tolist()
        alternatives = [sequences[row].sampling.num_logprobs for row in wanting]
        values = sampler.TokenLogprobs(*(tensor.numpy() for tensor in sampled.logprobs))
        for row, entry in zip(wanting, sampler.pack_logprobs(values, alternatives), strict=True):
            logprobs[row] = entry
    return sampled.token_ids_S.tolist(), logprobs


def sample_one(logits_V, seq):
    return sample(logits_V[None].clone(), [seq])[0][0]


def edit(logits_V, seq):
    """Return the logits with the sequence's bias, mask and penalties applied."""
    edited_SV = logits_V[None].clone()
    cpu.edit_logits(edited_SV, *JoinedEdits(HOST.upload).of([seq]))
    return edited_SV[0]


def frequencies(logits_V, num_draws=1000, **sampling):
    """Return how often each token is drawn over a grid of uniform numbers: the sampler's exact distribution."""
    grid = [i / num_draws for i in range(num_draws)]
    return np.bincount(draw(logits_V, grid, **sampling), minlength=len(logits_V)) / num_draws


def draw(logits_V, uniforms, **sampling):
    """Return the token that each of the uniform numbers draws."""
    columns = to_device(make_columns([sequence(**sampling)] * len(uniforms)), HOST.upload)
    uniform_R = torch.tensor(uniforms, dtype=torch.float64)
    return sampler._draw(logits_V.repeat(len(uniforms), 1), columns.draws, uniform_R, cpu).tolist()


def reference(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the distribution that is sampled from, in float64 and in words of the definition."""
    logits = logits_V.double().numpy() / temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = [i for i in order if probs[i] >= min_p * probs[order[0]]][: top_k or None]
    mass = sum(probs[i] for i in kept)
    nucleus, total = [], 0.0
    for i in kept:
        if total >= top_p * mass:
            break
        nucleus.append(i)
        total += probs[i]
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


def test_philox_gives_the_numbers_of_its_authors():
    """The known answers of Random123 for philox2x64 with ten rounds."""
    assert philox(0, 0, 0) == (0xCA00A0459843D731, 0x66C24222C9A845B5)
    assert philox(MASK, MASK, MASK) == (0x65B021D60CD8310F, 0x4D02F3222F86DF20)
    pi = (0xA4093822299F31D0, 0x243F6A8885A308D3, 0x13198A2E03707344)
    assert philox(*pi) == (0x0A5E742C2997341C, 0xB0F883D38000DE5D)


def test_uniform_numbers_lie_in_the_unit_interval_and_differ_by_seed_and_position():
    numbers = [uniform(seed, position, sampler.PURPOSE) for seed in (0, 1, MASK) for position in range(500)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.03


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 70},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_p": 0.999, "temperature": 2.0},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.15, "temperature": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [100, 512])
def test_tokens_are_drawn_with_the_probabilities_of_the_definition(sampling, vocab_size):
    logits_V = random_logits(1, vocab_size, seed=7, scale=2.0)[0]
    expected = reference(logits_V, **sampling)
    drawn = frequencies(logits_V, **sampling)
    assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(expected))
    # A grid of n numbers gives each token its probability to within one point of the grid at either end.
    np.testing.assert_allclose(drawn, expected, atol=2 / 1000)


def test_the_inverse_cdf_goes_by_token_id():
    logits_V = torch.tensor([0.0, 1.0, 0.5, -1.0])
    tokens = draw(logits_V, [i / 100 for i in range(100)], top_p=0.99)
    assert tokens == sorted(tokens)
    assert set(tokens) == {0, 1, 2, 3}


def test_the_largest_uniform_number_never_draws_what_is_not_kept():
    logits_V = torch.tensor([5.0, 4.0, -200.0, 3.0, -200.0])
    for sampling in ({}, {"top_k": 3}, {"min_p": 0.01}, {"top_p": 0.9999}):
        assert draw(logits_V, [1 - 2.0**-53], **sampling) == [3]


def test_greedy_takes_the_lowest_id_of_equals():
    for vocab_size in (300, 512, 1024):
        logits_V = torch.zeros(vocab_size)
        logits_V[[17, 290, 299]] = 2.5
        assert sample_one(logits_V, sequence(temperature=0.0)) == 17
        assert sample_one(logits_V, sequence(temperature=1.0, top_k=1)) == 17


def test_ties_at_the_border_of_top_k_go_to_lower_ids():
    logits_V = torch.zeros(200)
    logits_V[150] = 1.0
    assert set(np.flatnonzero(frequencies(logits_V, top_k=4))) == {0, 1, 2, 150}
    for backend in (cpu, plain):
        values, ids = backend.top_k(logits_V[None], 4)
        assert ids.tolist() == [[150, 0, 1, 2]]
        assert values.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_top_k_orders_equals_by_id_everywhere():
    logits_RV = random_logits(6, 500).round()
    for k, backend in itertools.product((1, 3, 64, 500), (cpu, plain)):
        _, ids = backend.top_k(logits_RV, k)
        for row in range(6):
            expected = sorted(range(500), key=lambda i, row=row: (-logits_RV[row, i].item(), i))[:k]
            assert ids[row].tolist() == expected


def test_the_seed_and_the_output_position_choose_the_number():
    logits_V = torch.zeros(1024)
    tokens = [sample_one(logits_V, sequence(seed=seed)) for seed in range(20)]
    assert len(set(tokens)) > 15
    seq = sequence(output=[1, 2], seed=5)
    expected = int(uniform(5, 2, sampler.PURPOSE) * 1024)
    assert sample_one(logits_V, seq) == expected


def test_preemption_does_not_change_what_is_drawn():
    """State that grew by sampling equals state rebuilt from a SequenceInit."""
    sampling = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "temperature": 0.9}
    logits_V = random_logits(1, 64)[0]
    grown = sequence(**sampling)
    for _ in range(20):
        rebuilt = sequence(output=grown.token_ids, **sampling)
        token = sample_one(logits_V, grown)
        assert sample_one(logits_V, rebuilt) == token
        grown.sampled(0)
        grown.append(token)


def test_penalties_follow_their_formulas():
    logits_V = random_logits(1, 40, scale=1.0)[0]
    seq = sequence(
        prompt=[3, 4, 4],
        output=[4, 9, 9, 9],
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    expected = logits_V.clone()
    for token in (3, 4, 9):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[4] -= 0.5 * 1 + 0.25
    expected[9] -= 0.5 * 3 + 0.25
    edited = edit(logits_V, seq)
    torch.testing.assert_close(edited, expected)
    assert not torch.equal(edited[[3, 4, 9]], logits_V[[3, 4, 9]])


def test_presence_and_frequency_leave_the_prompt_alone():
    seq = sequence(prompt=[1, 2], output=[2], presence_penalty=1.0, frequency_penalty=0.5)
    assert edit(torch.zeros(10), seq).tolist() == [0, 0, -1.5, 0, 0, 0, 0, 0, 0, 0]


def test_min_tokens_masks_both_lists_until_it_is_reached():
    logits_V = torch.zeros(300)
    logits_V[5], logits_V[6], logits_V[7] = 3.0, 2.0, 1.0
    # 999 lies beyond the vocabulary: some models name such an end-of-text token.
    stops = {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": (5, 999), "stop_token_ids": (6,)}
    assert sample_one(logits_V, sequence(**stops)) == 7
    assert sample_one(logits_V, sequence(output=[1], **stops)) == 7
    assert sample_one(logits_V, sequence(output=[1, 1], **stops)) == 5


def test_logit_bias_is_added_before_anything_is_cut():
    logits_V = random_logits(1, 300)[0]
    assert sample_one(logits_V, sequence(temperature=0.0, logit_bias=((123, 100.0),))) == 123
    assert sample_one(logits_V, sequence(temperature=1.0, top_p=0.1, logit_bias=((123, 100.0),))) == 123
    best = int(logits_V.argmax())
    assert sample_one(logits_V, sequence(temperature=0.0, logit_bias=((best, -100.0),))) != best


MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"top_k": 20},
    {"top_k": 200, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.9999},
    {"min_p": 0.05, "temperature": 1.7},
    {"repetition_penalty": 1.2, "temperature": 0.7, "num_logprobs": 5},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 0.0, "num_logprobs": 0},
    {"logit_bias": ((3, 2.0),), "min_tokens": 4, "eos_token_ids": (5,), "num_logprobs": 2},
]


@pytest.mark.parametrize("vocab_size", [997, 4096, 49_152])
def test_a_row_is_bitwise_the_same_whatever_is_in_the_batch(vocab_size):
    """torch splits some operations by the shape of the whole batch; none of them may be used."""
    logits_SV = random_logits(10, vocab_size, seed=vocab_size)
    seqs = [sequence(output=[7, 7, 8], seed=row, **sampling) for row, sampling in enumerate(MIXED)]
    alone = [sample(logits_SV[row : row + 1].clone(), [seq]) for row, seq in enumerate(seqs)]
    shuffled = torch.randperm(10, generator=torch.Generator().manual_seed(1)).tolist()
    batches = [range(10), shuffled, [0, 2], [2] * 7, [1, 5, 5], [9, 7, 8], [*range(10), *shuffled, *range(10)]]
    for batch in batches:
        token_ids, logprobs = sample(logits_SV[list(batch)], [seqs[row] for row in batch])
        for position, row in enumerate(batch):
            assert (token_ids[position], logprobs[position]) == (alone[row][0][0], alone[row][1][0]), (row, batch)
    with NoLooks():
        lazy = sample(logits_SV.clone(), seqs, is_lazy=True)
    assert lazy == sample(logits_SV.clone(), seqs)


def test_the_operations_under_the_sampler_treat_rows_apart():
    """Finer than tokens can show: probabilities, at widths with and without a vector's remainder."""
    for vocab_size in (997, 4096, 49_152, 50_257):
        logits_SV = random_logits(9, vocab_size, seed=3)
        for operation in (lambda x: x.softmax(-1), lambda x: x.log_softmax(-1)):
            together = operation(logits_SV)
            for row in range(9):
                assert torch.equal(operation(logits_SV[row : row + 1])[0], together[row])
            assert torch.equal(operation(logits_SV[2:5]), together[2:5])


def floats(packed):
    return np.frombuffer(packed, np.float32)


def ints(packed):
    return np.frombuffer(packed, np.int32)


def test_logprobs_are_of_the_raw_distribution():
    logits_V = random_logits(1, 1000, seed=5)[0]
    expected = torch.log_softmax(logits_V.double(), -1).numpy()
    sampling = {"temperature": 0.3, "repetition_penalty": 1.5, "logit_bias": ((3, 5.0),), "top_k": 3}
    seq = sequence(num_logprobs=4, **sampling)
    [token], [logprobs] = sample(logits_V[None].clone(), [seq])
    order = np.argsort(-expected, kind="stable")
    assert logprobs.num_alternatives == 4
    assert ints(logprobs.top_token_ids).tolist() == order[:4].tolist()
    np.testing.assert_allclose(floats(logprobs.top_logprobs), expected[order[:4]], atol=1e-5)
    np.testing.assert_allclose(floats(logprobs.token_logprobs), expected[token], atol=1e-5)
    assert ints(logprobs.token_ranks).tolist() == [order.tolist().index(token) + 1]


def test_zero_alternatives_are_the_token_alone_and_none_is_nothing():
    logits_SV = random_logits(2, 100)
    seqs = [sequence(num_logprobs=0, temperature=0.0), sequence(temperature=0.0)]
    token_ids, logprobs = sample(logits_SV.clone(), seqs)
    expected = logits_SV[0].log_softmax(-1)[token_ids[0]].numpy().tobytes()
    assert logprobs == [Logprobs(0, expected, pack_ids([1])), None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", MIXED, ids=str)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_logits_that_are_not_finite_neither_raise_nor_touch_a_neighbour(value, sampling, is_lazy):
    logits_SV = random_logits(2, 512)
    logits_SV[0] = value
    clean, broken = sequence(seed=3), sequence(**sampling)
    expected = sample_one(logits_SV[1], clean)
    clamped_SV = logits_SV.clone()
    assert sampler.clamp_non_finite(clamped_SV, logits_SV.amax(-1), is_lazy=is_lazy)
    assert clamped_SV.isfinite().all()
    assert torch.equal(clamped_SV[1], logits_SV[1])
    token_ids, _ = sample(logits_SV, [broken, clean], is_lazy=is_lazy)
    assert 0 <= token_ids[0] < 512
    assert token_ids[1] == expected


def test_a_single_nan_is_never_drawn():
    logits_V = torch.zeros(300)
    logits_V[5] = math.nan
    assert all(sample_one(logits_V, sequence(seed=seed)) != 5 for seed in range(50))
    assert sample_one(logits_V, sequence(temperature=0.0)) == 0


def test_a_tiny_temperature_is_greedy():
    logits_V = random_logits(1, 512)[0]
    for temperature in (1e-40, 1e-6, 1e-4):
        assert sample_one(logits_V, sequence(temperature=temperature)) == int(logits_V.argmax())


def test_masked_tokens_are_never_drawn():
    """-inf is a legitimate logit: a padded vocabulary, later a grammar's mask."""
    logits_V = torch.full((512,), -math.inf)
    logits_V[[10, 400]] = 1.0
    for sampling in ({}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.9999, "min_p": 0.1}):
        assert {sample_one(logits_V, sequence(seed=seed, **sampling)) for seed in range(30)} == {10, 400}


@pytest.mark.parametrize("vocab_size", [997, 4096, 49_152])
def test_top_k_of_wide_rows_is_that_of_a_whole_sort(vocab_size):
    for scores_RV in (random_logits(3, vocab_size), (random_logits(3, vocab_size) * 4).round() / 4):
        expected = scores_RV.sort(dim=-1, descending=True, stable=True)
        for k, backend in itertools.product((1, 20, 64, 300), (cpu, plain)):
            values, ids = backend.top_k(scores_RV, k)
            assert torch.equal(values, expected.values[:, :k])
            assert torch.equal(ids, expected.indices[:, :k])


@pytest.mark.parametrize("backend", [cpu, plain])
def test_top_k_orders_signed_zeros_infinities_and_more_than_there_are(backend):
    scores_RV = torch.tensor([[0.0, -0.0, -math.inf, 5.0, -1e-40, 0.0, -2.0, 1e-40]])
    _, ids = backend.top_k(scores_RV, 100)
    assert ids.tolist() == [[3, 7, 0, 1, 5, 4, 6, 2]]


def opcodes_of(run):
    """Return how many instructions of Python `run` takes, whatever the machine's load.

    Garbage of earlier tests has finalizers, which would count: it is collected before.
    """
    num_opcodes = 0

    def count(frame, event, _):
        nonlocal num_opcodes
        frame.f_trace_opcodes = True
        num_opcodes += event == "opcode"
        return count

    before = sys.gettrace()
    gc.collect()
    gc.disable()
    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
        gc.enable()
    return num_opcodes


MANY_EDITS = pytest.mark.parametrize(
    "sampling",
    [
        lambda size: {"logit_bias": tuple((token_id, 1.5) for token_id in range(size))},
        lambda size: {"min_tokens": 50, "stop_token_ids": tuple(range(size))},
        lambda size: {"repetition_penalty": 1.1, "prompt": tuple(range(size))},
    ],
    ids=["logit_bias", "min_tokens", "repetition_penalty"],
)


@MANY_EDITS
def test_a_step_does_no_work_of_python_for_each_of_a_sequences_biases_stop_tokens_and_counts(sampling):
    few, many = ([sequence(**sampling(size)) for _ in range(128)] for size in (2, 1_024))
    for_few, for_many = JoinedEdits(HOST.upload), JoinedEdits(HOST.upload)
    for _ in range(2):  # the second time they are joined
        assert opcodes_of(lambda: for_many.of(many)) == opcodes_of(lambda: for_few.of(few))
    assert opcodes_of(lambda: make_columns(many)) == opcodes_of(lambda: make_columns(few))


@MANY_EDITS
def test_a_step_of_the_same_sequences_brings_the_device_nothing_but_where_edits_lie_and_what_was_sampled(sampling):
    seqs = [sequence(**sampling(3_000)) for _ in range(128)]
    num_bytes = []

    def upload(arrays):
        num_bytes.append(sum(array.nbytes for array in arrays))
        return HOST.upload(arrays)

    edits = JoinedEdits(upload)
    edits.of(seqs)
    assert sum(num_bytes) > 128 * 3_000 * 8
    for _ in range(40):
        num_bytes.clear()
        for seq in seqs:
            seq.sampled(0)
            seq.append(4_000 + seq.num_output_tokens)
        edits.of(seqs)
        assert sum(num_bytes) <= 128 * (8 + 4 * 8 + 16)


def test_counts_are_those_of_the_output_however_many_tokens_come():
    prompt, output = list(range(0, 300, 3)), [7, 3, 7, 299, 12]
    seq = sequence(prompt, output, repetition_penalty=1.1)
    later = [token_id % 997 for token_id in range(0, 4_000, 7)] + [3, 7, 996]
    for token_id in later:
        seq.sampled(0)
        seq.append(token_id)
    token_ids, counts = (array[: seq.counts.size] for array in seq.counts.arrays())
    expected = dict.fromkeys(prompt, 0) | Counter(output + later)
    assert len(token_ids) == len(expected)
    assert dict(zip(token_ids.tolist(), counts.tolist(), strict=True)) == expected


def test_edits_that_stay_joined_are_those_of_sequences_seen_for_the_first_time():
    """Sequences come, go and change places, count new tokens and old ones, and reach their min_tokens."""
    random = np.random.default_rng(5)
    edited = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4}
    forbidding = {"min_tokens": 60, "eos_token_ids": (5, 999), "stop_token_ids": (6,)}
    kinds = [{}, edited, forbidding, {"logit_bias": ((3, 2.0), (5, 1.5))}]
    kinds.append(kinds[1] | kinds[2] | kinds[3])
    seqs = [sequence(random.integers(0, 400, 40), max_tokens=400, **kinds[row % len(kinds)]) for row in range(10)]
    order = list(range(10))
    joined = JoinedEdits(HOST.upload)
    for step in range(250):
        if step % 20 == 0:
            order = random.permutation(10)[: random.integers(1, 11)].tolist()
        rows = [seqs[number] for number in order]
        logits_SV = random_logits(len(rows), 400, seed=step)
        expected_SV = logits_SV.clone()
        for logits, edits in ((logits_SV, joined.of(rows)), (expected_SV, JoinedEdits(HOST.upload).of(rows))):
            if edits is not None:
                cpu.edit_logits(logits, *edits)
        assert torch.equal(logits_SV, expected_SV)
        for seq in rows:
            seq.sampled(0)
            seq.append(int(random.integers(0, 400)))


def test_rows_without_edits_have_none_and_keep_nothing_of_those_before():
    joined = JoinedEdits(HOST.upload)
    assert joined.of([sequence(logit_bias=((3, 2.0),))]) is not None
    assert joined.of([sequence(), sequence(output=[1, 2], min_tokens=2, eos_token_ids=(5,))]) is None

"""The ledger: every token reaches its gateway once, whatever is lost, repeated or overtaken on the way."""

import random
from array import array

import pytest

from octavo.protocol.messages import Hello, Logprobs, Output, Submit, encode, pack_ids, unpack_ids
from octavo.protocol.sampling import Sampling
from octavo.scheduler.delivery import MAX_OUTPUTS_BYTES, Ledger
from octavo.scheduler.scheduler import Update

GATEWAY = b"gateway"


def hello(seq: int, *in_flight: tuple[str, int]) -> Hello:
    return Hello(1, "gateway", seq, list(in_flight))


def submit(request_id: str, hello_seq: int, num_output_tokens: int = 0) -> Submit:
    sampling = Sampling(max_tokens=99, seed=0)
    return Submit(request_id, hello_seq, pack_ids([1]), sampling, pack_ids(range(num_output_tokens)))


def logprobs(*values: float) -> Logprobs:
    alternatives = [value for value in values for _ in range(2)]
    return Logprobs(
        2,
        array("f", values).tobytes(),
        pack_ids(map(int, values)),
        pack_ids(map(int, alternatives)),
        array("f", alternatives).tobytes(),
    )


@pytest.fixture
def ledger() -> Ledger:
    """A ledger with one gateway that has said Hello 1, and its request "a", which is sequence 7."""
    ledger = Ledger(peer_timeout_s=10.0)
    ledger.hello(GATEWAY, hello(1), now_s=0.0)
    ledger.admit(GATEWAY, submit("a", 1), 7)
    return ledger


def deliver(ledger: Ledger, *, is_taken: bool = True, now_s: float = 0.0) -> list[Output]:
    """Return the outputs that the sockets of all gateways get; they take all outputs, or none."""
    given = []
    for gateway in ledger.gateways_behind(now_s):
        for outputs, records in ledger.batches(gateway):
            given += outputs.outputs
            if not is_taken:
                ledger.mark_blocked(gateway, now_s)
                break
            ledger.mark_sent(gateway, outputs, records)
    return given


def spans(outputs: list[Output]) -> list[tuple[str, int, list[int], str | None]]:
    return [(o.request_id, o.first_token_index, unpack_ids(o.token_ids).tolist(), o.finish_reason) for o in outputs]


def test_new_tokens_go_once(ledger):
    ledger.extend(Update(7, [10, 11]))
    assert spans(deliver(ledger)) == [("a", 0, [10, 11], None)]
    assert deliver(ledger) == []
    ledger.extend(Update(7, [12], "stop"))
    assert spans(deliver(ledger)) == [("a", 2, [12], "stop")]
    assert deliver(ledger) == []


def test_tokens_that_a_hello_lacks_are_sent_again(ledger):
    ledger.extend(Update(7, [10, 11, 12]))
    deliver(ledger)
    ledger.hello(GATEWAY, hello(2, ("a", 1)), 0.0)
    assert spans(deliver(ledger)) == [("a", 1, [11, 12], None)]
    ledger.hello(GATEWAY, hello(3, ("a", 3)), 0.0)
    assert deliver(ledger) == []


def test_a_finish_is_sent_until_the_request_is_no_longer_listed(ledger):
    ledger.extend(Update(7, [10], "length"))
    deliver(ledger)
    for seq in (2, 3):
        ledger.hello(GATEWAY, hello(seq, ("a", 1)), 0.0)
        assert spans(deliver(ledger)) == [("a", 1, [], "length")]
    outcome = ledger.hello(GATEWAY, hello(4), 0.0)
    assert (outcome.unknown, outcome.unwanted) == ([], [])
    assert ledger.num_records == 0
    assert deliver(ledger) == []


def test_a_hello_that_was_overtaken_is_ignored(ledger):
    ledger.extend(Update(7, [10]))
    deliver(ledger)
    ledger.hello(GATEWAY, hello(5, ("a", 1)), 0.0)
    assert ledger.hello(GATEWAY, hello(4, ("a", 0), ("b", 0)), 0.0) is None
    assert ledger.hello(GATEWAY, hello(5), 0.0) is None
    assert deliver(ledger) == []
    assert ledger.num_records == 1


def test_a_request_that_a_later_hello_does_not_list_is_aborted(ledger):
    assert ledger.hello(GATEWAY, hello(2), 0.0).unwanted == [7]
    ledger.extend(Update(7, [], "abort"))
    assert deliver(ledger) == []


def test_a_hello_from_before_the_submit_does_not_end_the_request(ledger):
    ledger.admit(GATEWAY, submit("b", 2), 8)  # Hello 2 was sent before the Submit, and arrives after it
    outcome = ledger.hello(GATEWAY, hello(2, ("a", 0)), 0.0)
    assert (outcome.unknown, outcome.unwanted) == ([], [])
    assert ledger.hello(GATEWAY, hello(3, ("a", 0)), 0.0).unwanted == [8]


def test_a_listed_request_that_the_ledger_lacks_is_unknown(ledger):
    assert ledger.hello(GATEWAY, hello(2, ("a", 0), ("b", 3)), 0.0).unknown == ["b"]
    assert ledger.hello(b"other", hello(1, ("a", 0)), 0.0).unknown == ["a"]


def test_a_submit_that_a_later_hello_has_left_out_is_unwanted(ledger):
    ledger.hello(GATEWAY, hello(4, ("a", 0), ("b", 0)), 0.0)
    assert ledger.is_wanted(GATEWAY, submit("b", 3))
    assert ledger.is_wanted(GATEWAY, submit("c", 4))
    assert not ledger.is_wanted(GATEWAY, submit("c", 3))
    assert not ledger.is_wanted(b"nobody", submit("c", 9))


def test_a_full_queue_merges_the_outputs_that_follow(ledger):
    ledger.extend(Update(7, [10]))
    assert len(deliver(ledger, is_taken=False)) == 1
    ledger.extend(Update(7, [11]))
    assert deliver(ledger, now_s=0.001) == []  # there is a pause between attempts
    ledger.extend(Update(7, [12], "stop"))
    assert spans(deliver(ledger, now_s=1.0)) == [("a", 0, [10, 11, 12], "stop")]
    assert deliver(ledger, now_s=2.0) == []


def test_a_resubmission_counts_on(ledger):
    ledger.admit(GATEWAY, submit("b", 1, num_output_tokens=5), 8)
    ledger.extend(Update(8, [10, 11]))
    assert spans(deliver(ledger)) == [("b", 5, [10, 11], None)]
    ledger.hello(GATEWAY, hello(2, ("a", 0), ("b", 6)), 0.0)
    assert spans(deliver(ledger)) == [("b", 6, [11], None)]
    ledger.hello(GATEWAY, hello(3, ("a", 0), ("b", 3)), 0.0)  # sent before it submitted again
    assert spans(deliver(ledger)) == [("b", 5, [10, 11], None)]


def test_logprobs_stay_with_their_tokens(ledger):
    ledger.extend(Update(7, [1, 2], logprobs=logprobs(1, 2)))
    ledger.extend(Update(7, [3], logprobs=logprobs(3)))
    [output] = deliver(ledger)
    assert output.logprobs == logprobs(1, 2, 3)
    ledger.hello(GATEWAY, hello(2, ("a", 1)), 0.0)
    [output] = deliver(ledger)
    assert output.logprobs == logprobs(2, 3)


def test_prompt_logprobs_go_with_the_first_token(ledger):
    ledger.extend(Update(7, [1], prompt_logprobs=logprobs(8, 9), num_cached_tokens=4))
    ledger.extend(Update(7, [2]))
    [output] = deliver(ledger)
    assert (output.prompt_logprobs, output.num_cached_tokens, output.logprobs) == (logprobs(8, 9), 4, None)
    ledger.extend(Update(7, [3]))
    [output] = deliver(ledger)
    assert (output.prompt_logprobs, output.num_cached_tokens) == (None, 4)
    ledger.hello(GATEWAY, hello(2, ("a", 0)), 0.0)
    [output] = deliver(ledger)
    assert output.prompt_logprobs == logprobs(8, 9)


def test_an_error_goes_with_the_finish(ledger):
    ledger.extend(Update(7, [], "error", error="no room"))
    [output] = deliver(ledger)
    assert (output.finish_reason, output.error) == ("error", "no room")


def test_messages_stay_small(ledger):
    num_requests = 5
    for seq_id in range(100, 100 + num_requests):
        ledger.admit(GATEWAY, submit(f"r{seq_id}", 1), seq_id)
        ledger.extend(Update(seq_id, [1] * (MAX_OUTPUTS_BYTES // 8)))
    [gateway] = ledger.gateways_behind(0.0)
    sizes = [len(outputs.outputs) for outputs, _ in ledger.batches(gateway)]
    assert sum(sizes) == num_requests
    assert max(sizes) == 1  # two of them fill a message by themselves


def test_a_long_output_of_one_request_is_cut_into_several_messages(ledger):
    """A gateway that reads nothing for a long time lacks more of one request than fits into a message."""
    num_tokens = MAX_OUTPUTS_BYTES // 8
    values = bytes(4 * num_tokens)
    ledger.extend(Update(7, [1] * num_tokens, "length", Logprobs(2, values, values, 2 * values, 2 * values)))
    [gateway] = ledger.gateways_behind(0.0)
    messages = [outputs for outputs, _ in ledger.batches(gateway)]
    assert max(len(encode(outputs)) for outputs in messages) < MAX_OUTPUTS_BYTES + 1000
    pieces = [output for outputs in messages for output in outputs.outputs]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert [piece.first_token_index for piece in pieces] == [
        sum(len(before.token_ids) // 4 for before in pieces[:index]) for index in range(len(pieces))
    ]
    assert sum(len(piece.token_ids) for piece in pieces) == 4 * num_tokens
    assert sum(len(piece.logprobs.top_logprobs) for piece in pieces) == 8 * num_tokens
    # If only the first message is taken, the others are sent later, with the finish.
    outputs, records = next(ledger.batches(gateway))
    ledger.mark_sent(gateway, outputs, records)
    assert next(output.first_token_index for output in deliver(ledger)) == len(pieces[0].token_ids) // 4
    assert deliver(ledger) == []


def test_only_outputs_that_the_socket_took_count_as_sent(ledger):
    """The queue fills between two messages of one delivery."""
    for seq_id in (100, 101):
        ledger.admit(GATEWAY, submit(f"r{seq_id}", 1), seq_id)
        ledger.extend(Update(seq_id, [1] * (MAX_OUTPUTS_BYTES // 4)))
    [gateway] = ledger.gateways_behind(0.0)
    outputs, records = next(ledger.batches(gateway))
    ledger.mark_sent(gateway, outputs, records)
    ledger.mark_blocked(gateway, 0.0)
    assert [output.request_id for output in deliver(ledger, now_s=1.0)] == ["r101"]


def test_a_silent_gateway_is_dead(ledger):
    ledger.hello(b"other", hello(1, ("x", 0)), now_s=5.0)
    ledger.admit(GATEWAY, submit("done", 1), 8)
    ledger.extend(Update(8, [1], "stop"))
    assert ledger.drop_dead(10.0, 10.0) == {}
    assert ledger.drop_dead(10.1, 10.1) == {GATEWAY: [7]}
    assert list(ledger.gateways) == [b"other"]
    assert ledger.num_records == 0
    assert ledger.hello(GATEWAY, hello(9, ("a", 0)), 11.0).unknown == ["a"]  # it was only frozen


def test_a_gateway_is_not_silent_while_its_messages_wait_to_be_read(ledger):
    assert ledger.drop_dead(99.0, all_heard_s=9.0) == {}
    ledger.hear(GATEWAY, 99.0)  # any message
    assert ledger.drop_dead(99.0, all_heard_s=99.0) == {}


def test_a_gateway_that_reads_nothing_is_dead(ledger):
    ledger.extend(Update(7, [1]))
    deliver(ledger, is_taken=False, now_s=1.0)
    for seq, now_s in enumerate((5.0, 11.0), start=2):
        ledger.hello(GATEWAY, hello(seq, ("a", 0)), now_s)
        assert ledger.drop_dead(now_s, now_s) == {}
        deliver(ledger, is_taken=False, now_s=now_s)
    assert ledger.drop_dead(11.1, 11.1) == {GATEWAY: [7]}


def test_a_gateway_that_reads_again_in_time_lives(ledger):
    ledger.extend(Update(7, [1]))
    deliver(ledger, is_taken=False, now_s=1.0)
    deliver(ledger, now_s=2.0)
    ledger.hello(GATEWAY, hello(2, ("a", 1)), 12.0)
    assert ledger.drop_dead(12.0, 12.0) == {}


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_events_delivers_every_token_once(seed):
    """A pure gateway and the ledger, with a link between them that loses, repeats and reorders."""
    drawn = random.Random(seed)
    ledger = Ledger(peer_timeout_s=1e9)
    ledger.hello(GATEWAY, hello(1), 0.0)
    ledger.admit(GATEWAY, submit("a", 1), 7)
    tokens = list(range(100, 100 + drawn.randrange(1, 30)))
    num_made, hello_seq, received, finishes = 0, 1, [], []
    up: list[Hello] = []
    down: list[Output] = []
    for turn in range(600):
        is_calm = turn > 300
        if num_made < len(tokens) and drawn.random() < 0.3:
            num_new = drawn.randrange(1, 4)
            new = tokens[num_made : num_made + num_new]
            num_made += len(new)
            ledger.extend(Update(7, new, "stop" if num_made == len(tokens) else None))
        if drawn.random() < 0.2:
            hello_seq += 1
            up.append(hello(hello_seq, *([] if finishes else [("a", len(received))])))
        if up and drawn.random() < 0.5:
            message = up[0] if is_calm else drawn.choice(up)
            if is_calm or drawn.random() < 0.7:
                up.remove(message)  # otherwise it arrives again
            if is_calm or drawn.random() < 0.8:
                ledger.hello(GATEWAY, message, 0.0)
        down += deliver(ledger, is_taken=is_calm or drawn.random() < 0.7, now_s=float(turn))
        if down and drawn.random() < 0.5:
            output = down[0] if is_calm else drawn.choice(down)
            if is_calm or drawn.random() < 0.7:
                down.remove(output)
            num_known = len(received) - output.first_token_index
            if finishes or num_known < 0:
                continue
            received += unpack_ids(output.token_ids).tolist()[num_known:]
            if output.finish_reason:
                finishes.append(output.finish_reason)
    assert received == tokens
    assert finishes == ["stop"]
    assert ledger.num_records == 0

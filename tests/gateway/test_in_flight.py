import msgspec
import pytest

from octavo.gateway.link.in_flight import GAP_HELLO_INTERVAL_S, HELLO_INTERVAL_S, Event, InFlight
from octavo.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admitted,
    Hello,
    Logprobs,
    Output,
    Outputs,
    Ready,
    Rejected,
    Submit,
    ToScheduler,
    Unknown,
    pack_ids,
    unpack_ids,
)
from octavo.protocol.sampling import Sampling
from tests.fakes.toy_model import logprobs_of

SUBMIT = Submit("r", 0, pack_ids([1, 2]), Sampling(max_tokens=9, seed=3))


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def in_flight(events: list[Event]) -> InFlight:
    """One request, submitted at 0 s to the scheduler "one" and admitted."""
    made = InFlight("g")
    assert made.due(0) == [Hello(PROTOCOL_VERSION, "g", 1, [])]
    made.receive(ready("one"), 0)
    assert made.submit(SUBMIT, events.append) == [Submit("r", 1, SUBMIT.prompt_token_ids, SUBMIT.sampling)]
    made.receive(Admitted("r"), 0)
    return made


def ready(incarnation: str, fingerprint: str = "model") -> Ready:
    return Ready(incarnation, fingerprint, 100, 50, 16, 8, 4)


def outputs(first: int, *token_ids: int, finish_reason: str | None = None) -> Outputs:
    return Outputs([Output("r", first, pack_ids(token_ids), finish_reason)])


def delivered(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Output) for token in unpack_ids(event.token_ids)]


def test_hello_lists_what_arrived_and_counts_up(in_flight: InFlight) -> None:
    in_flight.receive(outputs(0, 5, 6), 0)
    assert in_flight.due(HELLO_INTERVAL_S - 0.01) == []
    assert in_flight.due(HELLO_INTERVAL_S) == [Hello(PROTOCOL_VERSION, "g", 2, [("r", 2)])]
    assert in_flight.due(HELLO_INTERVAL_S, seek=True) == [Hello(PROTOCOL_VERSION, "g", 3, [("r", 2)])]


def test_known_tokens_are_dropped_and_new_ones_kept(in_flight: InFlight, events: list[Event]) -> None:
    for message in (outputs(0, 5, 6), outputs(0, 5, 6), outputs(1, 6, 7), outputs(0, 5), outputs(2, 7, 8)):
        in_flight.receive(message, 0)
    assert delivered(events) == [5, 6, 7, 8]
    assert len(events) == 4  # Admitted, and what brought something


def test_log_probabilities_are_cut_with_their_tokens(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.receive(outputs(0, 5), 0)
    in_flight.receive(Outputs([Output("r", 0, pack_ids([5, 6]), None, logprobs_of([5, 6], 2))]), 0)
    assert events[-1] == Output("r", 1, pack_ids([6]), None, logprobs_of([6], 2))


def test_log_probabilities_of_the_prompt_are_delivered_once(in_flight: InFlight, events: list[Event]) -> None:
    first = Outputs([Output("r", 0, pack_ids([5]), prompt_logprobs=logprobs_of([2], 0))])
    in_flight.receive(first, 0)
    in_flight.receive(first, 0)
    in_flight.receive(Outputs([Output("r", 1, pack_ids([6]), prompt_logprobs=Logprobs())]), 0)
    assert [event.prompt_logprobs is not None for event in events if isinstance(event, Output)] == [True, False]


def test_a_gap_says_hello_at_once_but_not_for_every_message(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.receive(outputs(0, 5), 0)
    assert in_flight.receive(outputs(2, 7), 0.1) == [Hello(PROTOCOL_VERSION, "g", 2, [("r", 1)])]
    assert in_flight.receive(outputs(3, 8), 0.1) == []
    assert len(in_flight.receive(outputs(4, 9), 0.1 + GAP_HELLO_INTERVAL_S)) == 1
    assert delivered(events) == [5]


def test_the_finish_is_delivered_once_and_ends_the_listing(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.receive(outputs(0, 5, finish_reason="stop"), 0)
    in_flight.receive(outputs(0, 5, finish_reason="stop"), 0)
    assert [event.finish_reason for event in events if isinstance(event, Output)] == ["stop"]
    assert in_flight.due(9) == [Hello(PROTOCOL_VERSION, "g", 2, [])]
    assert in_flight.abandon("r") == []


def test_outputs_stand_for_a_lost_admission(events: list[Event]) -> None:
    made = InFlight("g")
    made.submit(SUBMIT, events.append)
    made.receive(outputs(0, 5), 0)
    assert isinstance(events[0], Admitted)
    made.receive(Admitted("r"), 0)
    assert len(events) == 2
    assert all(isinstance(message, Hello) for message in made.due(9))


def test_a_submit_without_an_answer_is_repeated_once_a_hello_shows_that_it_was_lost(events: list[Event]) -> None:
    made = InFlight("g")
    made.submit(SUBMIT, events.append)
    assert made.due(0) == [Hello(PROTOCOL_VERSION, "g", 1, [("r", 0)], ["r"])]
    assert all(isinstance(message, Hello) for message in made.due(9))  # a busy scheduler gets no prompt twice
    [again] = made.receive(Unknown(["r"], hello_seq=2), 9)
    assert isinstance(again, Submit)
    assert (again.request_id, again.hello_seq) == ("r", 2)
    assert made.receive(Unknown(["r"], hello_seq=2), 9) == []  # it is on its way


def test_what_is_answered_is_asked_for_no_more(in_flight: InFlight) -> None:
    assert in_flight.due(9) == [Hello(PROTOCOL_VERSION, "g", 2, [("r", 0)], [])]


def shared(request_id: str) -> Submit:
    return msgspec.structs.replace(SUBMIT, request_id=request_id, prompt_id="p")


def prompts(messages: list[ToScheduler]) -> list[tuple[str, bytes]]:
    return [(m.request_id, m.prompt_token_ids) for m in messages if isinstance(m, Submit)]


def test_the_tokens_of_a_shared_prompt_travel_once(events: list[Event]) -> None:
    made, prompt = InFlight("g"), SUBMIT.prompt_token_ids
    sent = [message for name in "abc" for message in made.submit(shared(name), events.append)]
    assert prompts(sent) == [("a", prompt), ("b", b""), ("c", b"")]
    made.receive(ready("one"), 0)
    assert prompts(made.receive(ready("two"), 0)) == [("a", prompt), ("b", b""), ("c", b"")]
    made.due(0)
    assert prompts(made.receive(Unknown(["b", "c"], 1), 0)) == [("b", prompt), ("c", b"")]
    for name in "abc":
        made.abandon(name)
    assert prompts(made.submit(shared("d"), events.append)) == [("d", prompt)]


def test_a_rejection_ends_only_what_was_not_admitted(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.submit(Submit("s", 0, b"", SUBMIT.sampling), events.append)
    in_flight.receive(Rejected("s", "full", 1.0), 0)
    assert events[-1] == Rejected("s", "full", 1.0)
    in_flight.receive(Rejected("r", "full", 1.0), 0)  # the answer to a Submit that was repeated and then taken
    in_flight.receive(outputs(0, 5), 0)
    assert delivered(events) == [5]


def test_another_incarnation_gets_everything_with_the_tokens_so_far(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.receive(outputs(0, 5, 6), 0)
    [again] = in_flight.receive(ready("two"), 1)
    assert again == Submit("r", 1, SUBMIT.prompt_token_ids, SUBMIT.sampling, pack_ids([5, 6]))
    assert in_flight.receive(ready("two"), 1) == []
    assert in_flight.receive(Unknown(["r"], 1), 1) == []  # it is on its way
    in_flight.receive(Admitted("r"), 1)
    in_flight.receive(outputs(2, 7, finish_reason="length"), 1)
    assert delivered(events) == [5, 6, 7]


def test_news_of_a_scheduler_that_is_gone_changes_nothing(in_flight: InFlight) -> None:
    in_flight.receive(ready("two"), 1)
    assert in_flight.receive(ready("one", "old model"), 1) == []
    assert in_flight.ready == ready("two")
    assert len(in_flight) == 1


def test_unknown_requests_are_submitted_again(in_flight: InFlight) -> None:
    in_flight.receive(outputs(0, 5), 0)
    in_flight.due(9)
    [again] = in_flight.receive(Unknown(["r", "not mine"], 2), 0)
    assert isinstance(again, Submit)
    assert again.output_token_ids == pack_ids([5])


def test_a_full_successor_is_asked_again_when_it_said(in_flight: InFlight) -> None:
    in_flight.receive(ready("two"), 1)
    in_flight.receive(Rejected("r", "full", 3.0), 1)
    in_flight.due(2)
    assert in_flight.receive(Unknown(["r"], 2), 2) == []
    assert not any(isinstance(message, Submit) for message in in_flight.due(3.9))
    assert any(isinstance(message, Submit) for message in in_flight.due(4.0))


def test_a_successor_that_refuses_for_good_ends_the_request(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.receive(outputs(0, 5), 0)
    in_flight.receive(ready("two"), 1)
    in_flight.receive(Rejected("r", "its pool is smaller"), 1)
    assert isinstance(events[-1], Output)
    assert (events[-1].finish_reason, "its pool is smaller" in (events[-1].error or "")) == ("error", True)
    assert len(in_flight) == 0


def test_another_model_ends_everything(in_flight: InFlight, events: list[Event]) -> None:
    in_flight.receive(outputs(0, 5), 0)
    assert in_flight.receive(ready("two", "another model"), 1) == [Abort("r")]
    assert isinstance(events[-1], Output)
    assert (events[-1].finish_reason, events[-1].first_token_index) == ("error", 1)


def test_an_abandoned_request_is_aborted_and_heard_of_no_more(in_flight: InFlight, events: list[Event]) -> None:
    assert in_flight.abandon("r") == [Abort("r")]
    assert in_flight.abandon("r") == []
    for message in (outputs(0, 5), Admitted("r"), Rejected("r", ""), Unknown(["r"], 9)):
        assert in_flight.receive(message, 0) == []
    assert events == [Admitted("r")]

"""What the chunks of a chat stream say together, in the shape of the answer in one piece, with the rules of streams."""

from itertools import chain
from typing import Any

from tests.fakes.gateway_server import Served


async def same_streamed_and_not(served: Served, body: dict[str, Any]) -> list[Any]:
    """Return the choices of a chat request, after a check that a stream says the same."""
    response = await served.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    chunks = await served.stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    choices = [without_ids(choice) for choice in answer["choices"]]
    assert [without_ids(choice_of(chunks, index)) for index in range(len(choices))] == choices
    assert chunks[-1]["usage"] == answer["usage"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return choices


def choice_of(chunks: list[Any], index: int) -> Any:
    """Return one choice of a stream. It has one terminal chunk, its last; the first has the role."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is not None for choice in own] == [False] * (len(own) - 1) + [True]
    deltas = [choice["delta"] for choice in own]
    assert deltas[0] == {"content": "", "role": "assistant"}
    assert all("role" not in delta for delta in deltas[1:])
    assert all(delta.get("content") != "" for delta in deltas[1:-1]), "only the first and the last delta are empty"
    calls = calls_of(deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    message = {"content": content or (None if calls else ""), "role": "assistant", "refusal": None}
    if calls:
        message["tool_calls"] = calls
    if reasoning := "".join(delta.get("reasoning", "") for delta in deltas):
        assert reasoning == "".join(delta.get("reasoning_content", "") for delta in deltas)
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    logprobs = [choice["logprobs"]["content"] for choice in own if choice["logprobs"]]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": list(chain(*logprobs)), "refusal": None} if logprobs else None,
        "finish_reason": own[-1]["finish_reason"],
        "stop_reason": own[-1]["stop_reason"],
    }


def calls_of(deltas: list[Any]) -> list[Any]:
    """Return the calls of a stream. The first delta of each has all but the arguments, which follow as text."""
    calls: list[Any] = []
    for piece in chain(*(delta.get("tool_calls", []) for delta in deltas)):
        if piece["index"] == len(calls):
            assert piece.keys() == {"index", "id", "type", "function"}
            assert piece["function"].keys() == {"name", "arguments"}
            calls.append({key: value for key, value in piece.items() if key != "index"})
        else:
            assert piece["index"] == len(calls) - 1, "a call begins after the one before it is complete"
            assert piece.keys() == {"index", "function"}
            assert piece["function"].keys() == {"arguments"}
            function = calls[-1]["function"]
            calls[-1]["function"] = function | {"arguments": function["arguments"] + piece["function"]["arguments"]}
    return calls


def without_ids(choice: Any) -> Any:
    """Return `choice` without the ids of its calls, which are drawn; each must have one of its own."""
    calls = choice["message"].get("tool_calls")
    if calls is None:
        return choice
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"] for call in calls)
    calls = [{key: value for key, value in call.items() if key != "id"} for call in calls]
    return choice | {"message": choice["message"] | {"tool_calls": calls}}

"""Makes the requests of a load: pure, so that the same work gives every server the same bytes but for the model."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from octavo.bench.serve.lengths import parse_lengths
from octavo.bench.serve.work import Work

# Common words, each about one token of most tokenizers.
WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name
"""
WORDS = WORD_LIST.split()


class Message(NamedTuple):
    role: str
    content: str


class Request(NamedTuple):
    """What one request asks: messages (one, of the user, where text is all there is) and how many tokens at most."""

    messages: tuple[Message, ...]
    max_tokens: int


def random_requests(work: Work, repetition: str = "") -> list[Request]:
    """Return the requests of `work` that has no dataset.

    Lengths are the same in every `repetition`, words are others, as in other works: what a server remembers of one
    does not help in the next.
    """
    lengths, words = random.Random(f"{work.seed} lengths"), random.Random(f"{work.seed} words {work.name} {repetition}")
    input_len, output_len = parse_lengths(work.input_len), parse_lengths(work.output_len)
    prefixes = [_text(words, work.prefix_len) for _ in range(work.num_prefixes)] if work.prefix_len else [""]
    return [
        Request(
            (Message("user", " ".join(filter(None, (prefixes[index % len(prefixes)], text)))),),
            output_len.draw(lengths),
        )
        for index, text in enumerate(_texts(work.num_prompts, words, lengths, input_len.draw))
    ]


def _texts(count: int, words: random.Random, lengths: random.Random, draw: Any) -> Iterator[str]:
    for _ in range(count):
        yield _text(words, draw(lengths))


def _text(words: random.Random, num_tokens: int) -> str:
    return " ".join(words.choices(WORDS, k=num_tokens))


def bodies(requests: Sequence[Request], work: Work, model: str) -> list[bytes]:
    """Return the bodies to be sent for `requests`, in JSON."""
    return [msgspec.json.encode(_body(request, work, model)) for request in requests]


def _body(request: Request, work: Work, model: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": model}
    if work.endpoint == "chat":
        asked["messages"] = [message._asdict() for message in request.messages]
    else:
        asked["prompt"] = request.messages[-1].content
    asked |= {"max_tokens": request.max_tokens, "temperature": work.temperature}
    if work.temperature > 0:
        asked["seed"] = work.seed
    if work.ignore_eos:
        asked["ignore_eos"] = True
    return asked | {"stream": True, "stream_options": {"include_usage": True}}

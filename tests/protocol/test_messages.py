"""Every message crosses a socket unchanged, in every field; a malformed frame is an error."""

import pickle
import typing
from array import array

import msgspec
import pytest

from octavo.protocol import messages
from octavo.protocol.messages import (
    ExecutorReady,
    Logprobs,
    SequenceInit,
    SequenceStep,
    Step,
    Submit,
    pack_ids,
    unpack_ids,
)
from octavo.protocol.sampling import Sampling

UNIONS = {
    "to_scheduler": (messages.ToScheduler, messages.decode_to_scheduler),
    "to_gateway": (messages.ToGateway, messages.decode_to_gateway),
    "from_executor": (messages.FromExecutor, messages.decode_from_executor),
    "to_executor": (messages.ToExecutor, messages.decode_to_executor),
}
CASES = [
    pytest.param(kind, decode, id=f"{link}-{kind.__name__}")
    for link, (union, decode) in UNIONS.items()
    for kind in typing.get_args(union)
]


class Samples:
    """Values of any message type. No two are alike, so that a swapped or lost field shows."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, kind: typing.Any) -> typing.Any:
        self.count += 1
        arguments = typing.get_args(kind)
        match typing.get_origin(kind) or kind:
            case typing.Annotated:
                return self.of(arguments[0])
            case typing.Literal:
                return arguments[-1]
            case _ if type(None) in arguments:
                return self.of(next(option for option in arguments if option is not type(None)))
            case builtin if builtin is list:
                return [self.of(arguments[0]), self.of(arguments[0])]
            case builtin if builtin is dict:
                return {self.of(arguments[0]): self.of(arguments[1])}
            case builtin if builtin is tuple:
                return self._tuple(arguments)
            case builtin if builtin is bool:
                return True
            case builtin if builtin is bytes:
                return pack_ids([self.count])
            case builtin if builtin in (int, float, str):
                return builtin(self.count)
            case struct:
                return self.struct(struct)

    def _tuple(self, arguments: tuple[typing.Any, ...]) -> tuple[typing.Any, ...]:
        if arguments[-1] is Ellipsis:
            return (self.of(arguments[0]), self.of(arguments[0]))
        return tuple(self.of(argument) for argument in arguments)

    def struct(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        if kind is Sampling:
            return Sampling(
                self.count, 2**64 - 1, 0.5, 7, 0.25, 0.125, 1.5, -1.5, 1.1, 3, (1, 2), (3,), ((4, -0.5),), 5, 6
            )
        return kind(**{field.name: self.of(field.type) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize(("kind", "decode"), CASES)
def test_every_field_survives(kind, decode):
    message = Samples().of(kind)
    decoded = decode(messages.encode(message))
    assert type(decoded) is kind
    for field in msgspec.structs.fields(kind):
        assert getattr(decoded, field.name) == getattr(message, field.name), field.name


@pytest.mark.parametrize(("kind", "decode"), CASES)
def test_no_field_of_the_sample_is_its_default(kind, decode):
    message = Samples().of(kind)
    for field in msgspec.structs.fields(kind):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        # A sample has True for every bool, so it cannot differ from the default True.
        assert default is True or getattr(message, field.name) != default, field.name


@pytest.mark.parametrize(("kind", "decode"), CASES)
def test_a_later_version_may_add_a_field(kind, decode):
    fields = msgspec.msgpack.decode(messages.encode(Samples().of(kind)))
    assert type(decode(msgspec.msgpack.encode([*fields, "new"]))) is kind


@pytest.mark.parametrize(("kind", "decode"), CASES)
def test_a_first_field_of_the_wrong_type_is_refused(kind, decode):
    fields = msgspec.msgpack.decode(messages.encode(Samples().of(kind)))
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode([fields[0], {"not": "this"}, *fields[2:]]))


@pytest.mark.parametrize("decode", [decode for _, decode in UNIONS.values()], ids=list(UNIONS))
@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"hello", msgspec.msgpack.encode(["Nobody", 1]), msgspec.msgpack.encode({"type": "Step"})]
)
def test_a_malformed_frame_is_refused(decode, frame):
    with pytest.raises(msgspec.MsgspecError):
        decode(frame)


def test_messages_of_another_link_are_refused():
    for link, (union, _) in UNIONS.items():
        for other, (_, decode) in UNIONS.items():
            if link != other:
                with pytest.raises(msgspec.ValidationError):
                    decode(messages.encode(Samples().of(typing.get_args(union)[0])))


def test_tags_are_unique():
    kinds = [kind.__name__ for union, _ in UNIONS.values() for kind in typing.get_args(union)]
    assert len(set(kinds)) == len(kinds)


def test_ids_are_int32():
    ids = [0, 1, 2**31 - 1, -(2**31)]
    assert unpack_ids(pack_ids(ids)) == array("i", ids)
    assert len(pack_ids(ids)) == 16
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"12345")


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_logprobs_join_and_split():
    first = Logprobs(2, floats(-1), pack_ids([1]), pack_ids([5, 6]), floats(-1, -2))
    rest = Logprobs(2, floats(-3, -4), pack_ids([3, 4]), pack_ids([7, 8, 9, 10]), floats(-5, -6, -7, -8))
    joined = first + rest
    assert (first.num_tokens, rest.num_tokens, joined.num_tokens) == (1, 2, 3)
    assert joined.tail(1) == rest
    assert joined.tail(0) == joined
    assert joined.tail(3).num_tokens == 0
    assert joined.tail(2) == Logprobs(2, floats(-4), pack_ids([4]), pack_ids([9, 10]), floats(-7, -8))


def test_logprobs_without_alternatives():
    logprobs = Logprobs(0, floats(-1, -2), pack_ids([1, 9]))
    assert logprobs.tail(1) == Logprobs(0, floats(-2), pack_ids([9]))
    assert logprobs.tail(0) == logprobs


def test_sampling_is_checked_at_the_door():
    good = Submit("r", 1, pack_ids([1]), Sampling(max_tokens=1, seed=0))
    fields = msgspec.msgpack.decode(messages.encode(good))
    for index, bad in [
        (0, -1),
        (1, -1),
        (2, -0.1),
        (2, 2.1),
        (4, 0.0),
        (5, 1.1),
        (6, 2.1),
        (8, 0.0),
        (0, 2**31),
        (3, 2**63),
    ]:
        sampling = list(fields[4])
        sampling[index] = bad
        with pytest.raises(msgspec.ValidationError):
            messages.decode_to_scheduler(msgspec.msgpack.encode([*fields[:4], sampling, *fields[5:]]))


def test_nested_records_survive():
    init = SequenceInit(Sampling(max_tokens=9, seed=2**64 - 1, num_logprobs=0), 2, 1, pack_ids([1, 2]))
    step = Step("s", "e", 3, [SequenceStep(1, 0, pack_ids([1, 2, 3]), pack_ids([4, 5]), True, init)], [2])
    assert messages.decode_to_executor(messages.encode(step)) == step


@pytest.mark.parametrize("decode", [messages.decode_to_scheduler, messages.decode_from_executor])
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x92\xa5Abort\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        b"\x93\xa5Abort\xa1a" + b"\x91" * 100_000 + b"\x90",  # a later version's field, nested without end
        b"\x94\xa8Progress\xa1a\x01" + b"\x91" * 100_000 + b"\x90",
        pickle.dumps({"a": 1}),
    ],
    ids=["empty", "not UTF-8", "cut short", "deep Abort", "deep Progress", "pickle"],
)
def test_every_malformed_frame_is_one_kind_of_error(decode, frame):
    with pytest.raises(msgspec.MsgspecError):
        decode(frame)


def test_an_executor_without_blocks_or_vocabulary_is_refused():
    good = ExecutorReady("e", 4, 16, 100, 50, "f")
    fields = msgspec.msgpack.decode(messages.encode(good))
    for index, bad in [(3, 0), (3, -1), (3, 2**31), (4, 0), (5, 0), (6, -5)]:
        with pytest.raises(msgspec.ValidationError):
            messages.decode_from_executor(msgspec.msgpack.encode([*fields[:index], bad, *fields[index + 1 :]]))

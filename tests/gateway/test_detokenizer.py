from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.gateway.text.detokenizer import MAX_UNDECIDED_TOKENS
from octavo.gateway.text.tokenizer import Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("a 🫠🥹龜é\u200d\ufffd\n", max_size=40)


def stream(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.step(token_id))
    return [*pieces, detokenizer.flush()]


@given(text=TEXTS)
@settings(deadline=None, max_examples=150)
def test_any_unicode_comes_out_as_one_decode_gives_it(
    demo: Tokenizer, byte_level: Tokenizer, metaspace: Tokenizer, text: str
) -> None:
    for tokenizer in (demo, byte_level, metaspace):
        # Byte tokens that spell several U+FFFD cannot be told from broken ones until their run ends.
        typed = text.replace("\ufffd", "?") if tokenizer is metaspace else text
        token_ids = tokenizer.encode_now(typed, add_special_tokens=False)
        assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)
    # This one has a token for each byte: nothing is lost.
    token_ids = byte_level.encode_now(text, add_special_tokens=False)
    assert "".join(stream(byte_level, token_ids, skip_special_tokens=False)) == text


@given(data=st.data(), skip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_random_tokens_of_a_byte_level_vocabulary_come_out_as_one_decode_gives_them(
    demo: Tokenizer, byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    for tokenizer, num_tokens in ((demo, 49160), (byte_level, 500)):  # the last ones do not exist
        token_ids = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=60))
        decoded = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, token_ids, skip_special_tokens=skip)) == decoded


@given(token_ids=st.lists(st.integers(0, 4) | st.integers(261, 500), max_size=40))
@settings(deadline=None, max_examples=150)
@example(token_ids=[*range(300, 309), 500, 261, 361, 362])  # 500: no token; 261: a space
def test_random_pieces_of_a_sentencepiece_vocabulary_come_out_as_one_decode_gives_them(
    metaspace: Tokenizer, token_ids: list[int]
) -> None:
    assert "".join(stream(metaspace, token_ids)) == metaspace.decode(token_ids)


@given(token_ids=st.lists(st.integers(5, 260) | st.integers(261, 380), max_size=60))
@example(token_ids=[5 + ord("A"), *[5 + 0x80] * 30])
@settings(deadline=None, max_examples=150)
def test_byte_tokens_that_are_no_character_neither_raise_nor_wait(metaspace: Tokenizer, token_ids: list[int]) -> None:
    text = "".join(stream(metaspace, token_ids))
    assert len(text) <= sum(len(metaspace.token_bytes(token_id)) for token_id in token_ids)


def test_a_character_is_let_out_with_its_last_token_and_not_before(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode_now("a🫠b", add_special_tokens=False)
    assert len(token_ids) == 6
    assert stream(byte_level, token_ids) == ["a", "", "", "", "🫠", "b", ""]


def test_an_unfinished_character_at_the_end_is_shown_as_such(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode_now("a🫠", add_special_tokens=False)[:-1]
    assert stream(byte_level, token_ids) == ["a", "", "", "", "\ufffd"]


def test_tokens_that_never_complete_a_character_are_let_out_after_a_few(byte_level: Tokenizer) -> None:
    [continuation] = [token_id for token_id in range(300) if byte_level.token_bytes(token_id) == b"\x80"]
    pieces = stream(byte_level, [continuation] * 1000)
    assert "".join(pieces) == "\ufffd" * 1000
    assert max(map(len, pieces)) < 2 * MAX_UNDECIDED_TOKENS


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    token_ids = [4, *byte_level.encode_now("x", add_special_tokens=False), 3]
    assert stream(byte_level, token_ids) == ["", "x", "", ""]
    assert stream(byte_level, token_ids, skip_special_tokens=False) == ["<|im_end|>", "x", "<|im_start|>", ""]


def test_a_special_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode_now("é", add_special_tokens=False)
    assert stream(byte_level, [first, 4, *rest]) == ["", "", "é", ""]

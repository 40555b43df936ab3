from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.text.stop_strings import StopStrings


def brute_force(text: str, stops: list[str]) -> tuple[str, int] | None:
    """Return the stop string that is complete first, of two the longer, and where it ends."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return max(complete, key=len), end
    return None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=8),
)
def test_the_first_stop_string_is_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    watched, before = StopStrings(stops), 0
    for piece in pieces:
        if found := watched.feed(piece):
            stop, end = found
            assert brute_force("".join(pieces), stops) == (stop, before + end)
            return
        before += len(piece)
    assert brute_force("".join(pieces), stops) is None


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=8))
def test_exactly_what_may_become_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    watched = StopStrings(stops)
    if watched.feed(text) is None:
        starts = [
            length for length in range(len(text) + 1) for stop in stops if stop[:length] == text[len(text) - length :]
        ]
        assert watched.num_held == max(starts, default=0)


def test_a_string_does_not_stop_before_it_may() -> None:
    watched = StopStrings(["ab"])
    assert watched.feed("xab", armed=False) is None
    assert watched.feed("ab") == ("ab", 2)


def test_the_longest_of_many_strings_that_end_together_wins() -> None:
    many = [f"{number:03}x" for number in range(62)]
    watched = StopStrings([*many, "b", "aab"])
    assert watched.feed("aa") is None
    assert watched.num_held == 2
    assert watched.feed("b") == ("aab", 1)


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=64),
    num_unarmed=st.integers(0, 10),
)
def test_many_strings_are_found_from_where_they_may_stop(text: str, stops: list[str], num_unarmed: int) -> None:
    watched = StopStrings(stops)
    assert watched.feed(text[:num_unarmed], armed=False) is None
    ends = [end for end in range(num_unarmed + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    found = watched.feed(text[num_unarmed:])
    assert (found and found[1] + min(num_unarmed, len(text))) == (ends[0] if ends else None)


def test_overlapping_matches_go_on_after_one_that_may_not_stop() -> None:
    watched = StopStrings(["aa"])
    assert watched.feed("aa", armed=False) is None
    assert watched.feed("a") == ("aa", 1)

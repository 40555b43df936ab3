"""Divides thinking from what follows it, where a tag stands before and one behind the thinking."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.gateway.parsing.markers import Markers

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Tags:
    start: str
    end: str


class Thinking:
    """For one choice. `feed` gives the next piece of thinking, and the text that is to be read further.

    Whitespace around the thinking belongs to the tags. `switches` are the places in the whole text where thinking
    begins and ends; tags are a part of the thinking.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        """`is_open`: the prompt ends with the start tag, or the model leaves the tag out."""
        self._start, self._end = Markers([tags.start]), Markers([tags.end])
        self._is_open = is_open
        self._text = ""  # not read
        self._num_fed = 0
        self._state: Callable[[], bool] = self._begin
        self._thoughts: list[str] = []
        self._rest: list[str] = []
        self.switches: list[int] = []
        self.is_decided = False

    def feed(self, text: str) -> tuple[str, str]:
        if self._state == self._pass:
            return "", text
        self._text += text
        self._num_fed += len(text)
        while self._state():
            pass
        return self._taken()

    def end(self) -> tuple[str, str]:
        """Return what is held."""
        if self._state == self._think:
            self._thoughts.append(self._text.rstrip(SPACE))
        elif self._state == self._begin:
            self._rest.append(self._text)
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        taken = "".join(self._thoughts), "".join(self._rest)
        self._thoughts, self._rest = [], []
        return taken

    def _begin(self) -> bool:
        text = self._text.lstrip(SPACE)
        if not text or self._start.num_held(text) == len(text):
            return False
        self.is_decided, self._state = True, self._pass
        if tag := self._start.match(text):
            text = text[tag.end() :]
        if tag or self._is_open:
            self.switches.append(0)
            self._text, self._state = text, self._first_thought
        return True

    def _first_thought(self) -> bool:
        self._text = self._text.lstrip(SPACE)
        if not self._text:
            return False
        self._state = self._think
        return True

    def _think(self) -> bool:
        tag = self._end.find(self._text)
        if tag is None:
            kept = len(self._text) - self._end.num_held(self._text)
            kept = len(self._text[:kept].rstrip(SPACE))
            self._thoughts.append(self._text[:kept])
            self._text = self._text[kept:]
            return False
        self._thoughts.append(self._text[: tag.start()].rstrip(SPACE))
        self._text, self._state = self._text[tag.end() :], self._behind
        self.switches.append(self._num_fed - len(self._text))
        return True

    def _behind(self) -> bool:
        self._text = self._text.lstrip(SPACE)
        if not self._text:
            return False
        self._state = self._pass
        return True

    def _pass(self) -> bool:
        self._rest.append(self._text)
        self._text = ""
        return False

"""Stop strings: cut a stream of text at the first one, however the stream is cut into pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Automaton:
    """Aho-Corasick automaton over the stop strings (Aho and Corasick, 1975).

    After reading some text, the state is the longest suffix of it that begins some stop string; ``depth`` is
    that suffix's length and ``match`` the longest stop string that ends there, if any.
    """

    def __init__(self, stops: Sequence[str]):
        self.depth = [0]
        self.match: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
                self._next.append({})
                self._fail.append(0)
            state = self._next[state][char]
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


class StopChecker:
    """Holds back text that may begin a stop string and cuts at the first stop string.

    First is the one that is complete first, and of those that end there the longest: the only rule that needs
    no text beyond the match, so the same text is cut at the same place whatever its pieces. Time is linear in
    the text and memory in the stop strings, whose number and length the caller bounds.

    ``stopped`` is the stop string found, or None. Raises ``ValueError`` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False):
        if not all(stops):
            raise ValueError("a stop string is not empty")
        self.stopped: str | None = None
        self._include_stop = include_stop_str_in_output
        self._automaton = _Automaton(stops) if stops else None
        self._state = 0
        self._held = ""

    def push(self, piece: str) -> str:
        """Add text and return what may be shown; nothing after a stop string was found."""
        if self.stopped is not None:
            return ""
        if self._automaton is None:
            return piece
        text, seen = self._held + piece, len(self._held)
        for end, char in enumerate(piece, seen + 1):
            self._state = self._automaton.step(self._state, char)
            found = self._automaton.match[self._state]
            if found is not None:
                return self._stop(text[:end], found)
        free = len(text) - self._automaton.depth[self._state]
        self._held = text[free:]
        return text[:free]

    def finish(self) -> str:
        """End the text and return what was held back."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, found: str) -> str:
        self.stopped, self._held = found, ""
        return text if self._include_stop else text[: len(text) - len(found)]

"""Text that can be shown while it is still being written: no half characters, no stop strings.

A stop string may begin in one token and end three tokens later, so what could still become one is
held back until it is clear. With stop "\\n\\n":

    tokens   Hello   \\n   there   \\n      \\n
    shown    Hello        \\nthere         (cut here, nothing of the stop string was shown)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class TextDecoder(Protocol):
    """Turns ids into text piece by piece: `tokenize.Detokenizer`."""

    def push(self, token_id: int) -> str:
        """The text that this id completes."""
        ...

    def finish(self) -> str:
        """The text still held back."""
        ...


class TextStream:
    """Ids in, text that is safe to show out; `stopped_by` is the stop string that was met."""

    def __init__(self, decoder: TextDecoder, stop: Iterable[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""
        self._may_stop = True
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take a token; return the text that is safe to show.

        may_stop: False while `min_tokens` forbids an end; a stop string complete by then is text.
        """
        self._may_stop = may_stop
        return self._release(self._decoder.push(token_id))

    def finish(self) -> str:
        """The end: return what was held back, unless a stop string has cut it off."""
        if self.stopped_by is not None:
            return ""
        shown = self._release(self._decoder.finish())
        held, self._held = self._held, ""
        return shown + held

    def _release(self, new: str) -> str:
        text = self._held + new
        found = []
        for stop in self._stop:
            start = max(0, len(self._held) - len(stop) + 1)  # those that end in `new`
            if self._may_stop and (at := text.find(stop, start)) >= 0:
                found.append((at + len(stop), at, stop))
        if found:  # the one that is complete first, so that it does not matter how tokens split it
            _, at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        longest = max((_overlap(text, stop) for stop in self._stop), default=0)
        split = len(text) - longest
        self._held = text[split:]
        return text[:split]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

"""Idle conversations: their users read an answer, and may go on with it.

A prompt goes on with an answer if it has a block at whose end the answer's request could be continued: the last whole block of the request's
prompt, or a block of the answer, if the answer's text is cut into the same tokens again. A block that several idle conversations end with
tells nothing: with a short message behind a common system prompt the last whole block is everybody's.
"""

from collections.abc import Iterable, Sequence

_CONVERSATIONS_MAX = 4096
"""As many as the store watches; those that have been idle longest are forgotten."""

_ENDS_MAX = 8
"""Blocks by which a conversation is known: the first, which is its prompt's, and the last ones."""


class IdleConversations:
    """By the blocks at their ends. Each conversation is named by its last block."""

    def __init__(self, conversations_max: int = _CONVERSATIONS_MAX) -> None:
        self._conversations_max = conversations_max
        self._ends: dict[bytes, list[bytes]] = {}
        self._names: dict[bytes, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, name: bytes, ends: Sequence[bytes]) -> None:
        """A conversation is idle; prompts that have one of the blocks `ends`, and no other conversation has it, go on with it."""
        self.remove(name)
        kept = [*ends[:1], *ends[1:][-_ENDS_MAX + 1 :]]
        self._ends[name] = kept
        for end in kept:
            self._names.setdefault(end, []).append(name)
        while len(self._ends) > self._conversations_max:
            self.remove(next(iter(self._ends)))

    def remove(self, name: bytes) -> None:
        for end in self._ends.pop(name, ()):
            names = self._names[end]
            names.remove(name)
            if not names:
                del self._names[end]

    def take_continued(self, blocks_from_the_last: Iterable[bytes]) -> bytes | None:
        """Removes and names the conversation that a prompt with these blocks goes on with."""
        if not self._ends:
            return None
        for block in blocks_from_the_last:
            names = self._names.get(block, ())
            if names:
                # What comes before this block is no end of a single conversation either.
                if len(names) > 1:
                    return None
                (name,) = names
                self.remove(name)
                return name
        return None

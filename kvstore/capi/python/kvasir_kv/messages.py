"""What the scheduler's side and the workers' sides of an engine tell each other once in each step.

Blocks are named by the engine's own hashes here: only a worker knows the layout that is part of their identity.
"""

from dataclasses import dataclass, field

from .handoff import Leg


@dataclass
class Save:
    """Blocks of the engine that have been computed at the end of this step: one after the other in a prompt, of which `first` is the
    first one's number and `parent` the hash of the block before it, none at the beginning.
    """

    job: int
    hashes: list[bytes]
    blocks: list[int]
    first: int = 0
    parent: bytes | None = None


@dataclass
class Source:
    """Another engine that sends the blocks of a load, of which the first is the `first_block` of the prompt."""

    leg: Leg
    content: bytes
    first_block: int


@dataclass
class Load:
    """Blocks of the engine that a request waits for: from the store by their hashes, or from another engine."""

    job: int
    request: str
    hashes: list[bytes]
    blocks: list[int]
    source: Source | None = None


@dataclass
class Push:
    """Blocks of the engine that are computed in this step, for the engine that generates from them.

    `is_last`: none will follow.
    """

    job: int
    leg: Leg
    content: bytes
    first_block: int
    blocks: list[int]
    is_last: bool


@dataclass
class Question:
    """How many of these blocks, from the first on, does the worker have? Each question has a number of its own.

    With `held`, which may be 0, the blocks begin with the prompt's first one: the engine has so many, which do not count, and those behind
    them are brought here from other nodes, if these have them.
    """

    number: int
    hashes: list[bytes]
    held: int | None = None


@dataclass
class Step:
    """From the scheduler to each worker."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    cancelled: list[Leg] = field(default_factory=list)
    """Hand-offs that are to stop."""
    declined: list[Leg] = field(default_factory=list)
    """Hand-offs of which nothing is wanted."""

    def is_empty(self) -> bool:
        return not any(vars(self).values())


@dataclass
class Tally:
    """How many workers have said something, and the least that one of them said."""

    workers: int
    least: int

    def add(self, other: "Tally") -> "Tally":
        return Tally(self.workers + other.workers, min(self.least, other.least))


@dataclass
class TierChange:
    """A tier of a worker's store has gained (`is_stored`) or lost these blocks, which go by the engine's short hashes."""

    tier: int
    is_stored: bool
    hashes: list[int]
    tokens: list[int] = field(default_factory=list)
    """Of one block that the engine's own cache may not have."""
    parent: bytes | None = None
    """The hash of the block before that one; none at the beginning of a prompt."""


@dataclass
class Report:
    """From the workers to the scheduler: jobs that are over, with the number of blocks, and answers to questions."""

    saved: dict[int, Tally] = field(default_factory=dict)
    loaded: dict[int, Tally] = field(default_factory=dict)
    answers: dict[int, Tally] = field(default_factory=dict)
    tiers: list[TierChange] = field(default_factory=list)
    """In their order."""

    def is_empty(self) -> bool:
        return not (self.saved or self.loaded or self.answers or self.tiers)

    def add(self, other: "Report") -> None:
        """Takes in another worker's report, or a later one."""
        _add(self.saved, other.saved)
        _add(self.loaded, other.loaded)
        _add(self.answers, other.answers)
        self.tiers += other.tiers

    def take_complete(self, workers: int) -> "Report":
        """Removes and returns what all workers have said."""
        return Report(_take(self.saved, workers), _take(self.loaded, workers), _take(self.answers, workers))


def _add(mine: dict[int, Tally], theirs: dict[int, Tally]) -> None:
    for number, tally in theirs.items():
        mine[number] = mine[number].add(tally) if number in mine else tally


def _take(tallies: dict[int, Tally], workers: int) -> dict[int, Tally]:
    complete = [number for number, tally in tallies.items() if tally.workers >= workers]
    return {number: tallies.pop(number) for number in complete}

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
    tenant: int = 0
    """Whose share of the tiers they count against."""


@dataclass
class Source:
    """Another engine that sends the blocks of a load, of which the first is the `first_block` of the prompt."""

    leg: Leg
    content: bytes
    first_block: int


@dataclass
class Load:
    """Blocks of the engine that a request waits for: from the store by their hashes, or from another engine.

    From the store no longer than `deadline` seconds, if that is not 0: what has not come by then is computed. `all_or_nothing`: a part of them is
    of no use, since a window of layers may end behind the missing block.
    """

    job: int
    request: str
    hashes: list[bytes]
    blocks: list[int]
    source: Source | None = None
    deadline: float = 0.0
    all_or_nothing: bool = False


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
    """How many blocks of a prompt are worth loading? Each question has a number of its own.

    The engine has `held` blocks of it and `hashes` name the next ones, in a prompt of `tokens` tokens; before it the engine computes
    `queued_tokens` of others. With `may_fetch` the hashes begin with the prompt's very first block, and what is not here is brought here from
    other nodes first, if that is worth it. `groups` are the hashes of further groups of layers, of the same blocks, with the number of
    blocks before the first computed one that each needs.
    """

    number: int
    hashes: list[bytes]
    held: int
    tokens: int
    block_tokens: int
    queued_tokens: int = 0
    may_fetch: bool = False
    groups: list[tuple[list[bytes], int]] = field(default_factory=list)
    tenant: int = 0
    """Whose share of the tiers blocks count against that are brought here."""
    others: int | None = None
    """How many blocks of the prompt, from its first one on, other nodes are known to hold; None: not known."""

    def wanted(self, hashes: list[bytes]) -> list[bytes]:
        """Of `hashes`, or those of a group: the blocks behind those that the engine has."""
        return hashes[self.held :] if self.may_fetch else hashes

    @property
    def blocks_max(self) -> int:
        """How many blocks may be brought here from other nodes."""
        prefix = len(self.wanted(self.hashes))
        return prefix + sum(min(window, prefix) for _, window in self.groups)


@dataclass(frozen=True)
class Answer:
    """How many blocks are worth loading, and for how many seconds; `wants_fetch`: other nodes should be asked first."""

    blocks: int
    deadline: float = 0.0
    wants_fetch: bool = False


@dataclass(frozen=True)
class Prefill:
    """A step of the engine that computed `tokens` tokens of prompts behind `context` tokens."""

    tokens: int
    context: int
    seconds: float


@dataclass
class Retain:
    """Blocks of a prompt and its answer, from the first one on, that are to be retained for so many seconds."""

    hashes: list[bytes]
    seconds: int


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
    prefills: list[Prefill] = field(default_factory=list)
    """Earlier steps, from which the workers' stores learn how fast the engine is."""

    continued: list[bytes] = field(default_factory=list)
    """The last blocks of conversations that go on."""
    idle: list[list[bytes]] = field(default_factory=list)
    """The blocks of each conversation whose answer is complete."""
    retentions: list[Retain] = field(default_factory=list)
    """Blocks that are to be retained."""

    def is_empty(self) -> bool:
        return not any(vars(self).values())


@dataclass
class Tally:
    """How many workers have said something, and the least and the most that one of them said; of an answer with its shortest deadline."""

    workers: int
    least: int
    deadline: float = 0.0
    most: int = 0

    def __post_init__(self) -> None:
        self.most = max(self.most, self.least)

    def add(self, other: "Tally") -> "Tally":
        workers, least = self.workers + other.workers, min(self.least, other.least)
        return Tally(workers, least, min(self.deadline, other.deadline), max(self.most, other.most))


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

"""Judges answers of an engine whose KV blocks came from elsewhere by what the engine alone answers on the same machine.

Two ways of computing one prompt (whole, behind a cached beginning, in a batch) round differently: on some processors
not at all, on others by 0.2 in a log-probability, and for a few ill-conditioned prompts by 1.6. A fixed tolerance
therefore holds on one make of processor only. Here the engine alone answers each prompt in several ways; the largest
distance between the first tokens' distributions of these answers is the prompt's spread. Another answer is right if
its first token's distribution is no farther than FACTOR spreads from the nearest of them. Prompts with a large spread
are left out, and a lane fails if these are more than a share of its prompts.

Later tokens depend on earlier ones: texts are compared up to the first token that differs, and no further. A text that
parts there onto a token that the engine alone had not among its likeliest has jumped; a few may, because a prompt's
spread says nothing about later tokens, but not most of them.

The tests of this module are in test_judge.py; they need no engine.
"""

import collections
import concurrent.futures
import enum
import itertools
import statistics

TOP = 20
"""Likeliest tokens of a distribution that are asked for; vLLM gives no more."""

LEADERS = 5
"""Likeliest tokens of either distribution whose differences count. With all 20, distances would hardly grow beyond 0.8:
a token that falls out of the other's 20 counts by its distance from the last of them, which is small for most."""

FLOOR = 0.0625
"""Distance in nats that is always allowed: one step of bfloat16 for logits between 8 and 16."""

FACTOR = 2.0
"""Spreads that an answer may be away from the nearest of the engine's own."""

SPREAD_MAX = 0.25
"""Prompts with a larger spread are left out. For normal logits as wide as the tiny model's, other
logits are 2 away, and those with a quarter of their variance replaced 1.3 (0.9 at least, of a dozen)."""

LEFT_OUT_MAX = 1 / 3
"""Share of the prompts that may be left out."""

JUMPED_MAX = 1 / 2
"""Share of the compared texts that may jump; one always may."""

FOUND_MIN = 3 / 4
"""Share of the planted faults that must be found, of those in prompts that are not left out."""

CUTS = (0.25, 0.5, 0.75)
"""Parts of a prompt, by its words, up to which the engine alone has cached it when it is asked for the whole."""


class Verdict(enum.Enum):
    """What is said of one answer."""

    EQUAL = "equal"
    PARTED = "parted"
    JUMPED = "jumped"
    LEFT_OUT = "left out"
    BEYOND = "beyond the spread"
    WRONG_TEXT = "wrong text"


FAULTS = (Verdict.BEYOND, Verdict.WRONG_TEXT)


def distance(one, other):
    """The mean difference in nats over all tokens that are LEADERS of one of two distributions.

    A token that only one of them has is at most as likely in the other as the last that is told there: the difference
    to that one is the least that it can be.
    """
    least = {id(one): min(one.values()), id(other): min(other.values())}

    def difference(token):
        if token in one and token in other:
            return abs(one[token] - other[token])
        has, lacks = (one, other) if token in one else (other, one)
        return max(has[token] - least[id(lacks)], 0.0)

    return statistics.fmean(difference(token) for token in leaders(one) | leaders(other))


def leaders(distribution):
    return set(sorted(distribution, key=distribution.get)[-LEADERS:])


class Own:
    """The engine's own answers to one prompt: `wanted`, which is a whole one, and the first tokens of all."""

    def __init__(self, wanted, others):
        answers = [wanted, *others]
        if not all(answer.tops and answer.tops[0] for answer in answers):
            raise ValueError("the engine alone gave an answer without log-probabilities")
        self.wanted = wanted
        self.firsts = [answer.tops[0] for answer in answers]
        self.points = {answer.cached or 0 for answer in answers}
        self.spread = max((distance(*pair) for pair in itertools.combinations(self.firsts, 2)), default=0.0)

    @property
    def allowed(self):
        return max(FLOOR, FACTOR * self.spread)

    @property
    def is_left_out(self):
        return self.spread > SPREAD_MAX

    def difference(self, answer):
        """To the nearest of the engine's own."""
        return min(distance(answer.tops[0], first) for first in self.firsts)


def measure(ask, bodies, at_once=False, cuts=CUTS):
    """Asks the engine alone for each prompt in several ways; `ask` gives the answer to a body, or raises.

    Computed whole; out of the engine's own cache; cached up to several points; and with `at_once` all prompts in a
    batch. Each way has a cache salt of its own, so that it finds only what it put there itself.
    """
    answers = []
    for body in bodies:
        wanted = ask(body | {"cache_salt": "alone"})
        short = body | {"max_tokens": 1}
        others = [ask(short | {"cache_salt": "alone"})]
        for cut in cuts:
            salt = {"cache_salt": f"alone up to {cut}"}
            ask(beginning(short, cut) | salt)
            others.append(ask(short | salt))
        answers.append((wanted, others))
    if at_once:
        together = [body | {"max_tokens": 1, "cache_salt": "at once"} for body in bodies]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads:
            for (_, others), answer in zip(answers, threads.map(ask, together)):
                others.append(answer)
    return [Own(wanted, others) for wanted, others in answers]


def beginning(body, part):
    """The same body with only the first part of its prompt's words."""
    (message,) = body["messages"]
    words = message["content"].split(" ")
    return body | {"messages": [message | {"content": " ".join(words[: max(int(len(words) * part), 1)])}]}


def check_prompts(what, owns):
    """Can these prompts be judged by? Whether they can, and a line about them."""
    left_out = sum(own.is_left_out for own in owns)
    unmeasured = sum(len(own.points) < 2 for own in owns)
    problems = []
    if not owns:
        problems.append("no prompts")
    if left_out > LEFT_OUT_MAX * len(owns):
        problems.append(f"more than {LEFT_OUT_MAX:.0%} are left out")
    if unmeasured:
        problems.append(f"of {unmeasured} the engine alone had nothing cached: their spread is not known")
    spreads = [own.spread for own in owns] or [0.0]
    text = (f"{what}: the engine alone differs by {statistics.median(spreads):.2g} (median), {max(spreads):.2g} "
            f"(most); {left_out} of {len(owns)} prompts are left out, whose spread is above {SPREAD_MAX}")
    return not problems, "; ".join([text, *problems])


class Tally:
    """The verdicts on the answers of one scenario."""

    def __init__(self):
        self.verdicts = collections.Counter()
        self.largest = 0.0  # of the differences that were compared
        self.same = 0  # first tokens that are one of the engine's own to the last bit
        self.earliest = None  # tokens before the earliest parting

    def add(self, answer, own, whole=True):
        """Judges an answer, or with `whole` false the beginning of one, and counts its verdict."""
        verdict = self._judge(answer, own, whole)
        self.verdicts[verdict] += 1
        return verdict

    def _judge(self, answer, own, whole):
        wanted = own.wanted
        if not (answer.tops and answer.tops[0]):
            # A stream may end before its first token, an answer may not.
            return Verdict.WRONG_TEXT if whole or answer.text else Verdict.EQUAL
        at = parting(answer.tokens, wanted.tokens)
        if at is None and not is_text_right(answer, wanted, whole):
            return Verdict.WRONG_TEXT
        if own.is_left_out:
            return Verdict.LEFT_OUT
        difference = own.difference(answer)
        self.largest = max(self.largest, difference)
        self.same += difference == 0.0
        if difference > own.allowed:
            return Verdict.BEYOND
        if at is None:
            return Verdict.EQUAL
        self.earliest = at if self.earliest is None else min(self.earliest, at)
        return Verdict.PARTED if answer.tokens[at] in wanted.tops[at] else Verdict.JUMPED

    @property
    def compared(self):
        return self.verdicts.total() - self.verdicts[Verdict.LEFT_OUT]

    def problems(self):
        """All that must not be, in words."""
        found = [f"{self.verdicts[fault]} {fault.value}" for fault in FAULTS if self.verdicts[fault]]
        if self.verdicts[Verdict.JUMPED] > max(1, JUMPED_MAX * self.compared):
            found.append(f"more than {JUMPED_MAX:.0%} jumped")
        return found

    def result(self, what):
        """Is the scenario right? Whether it is, and a line about it."""
        problems = self.problems() + ([] if self.compared else ["nothing was compared"])
        return not problems, "; ".join([f"{what}: {self}", *problems])

    def figures(self):
        """How far first tokens were from the engine's own, and where texts parted."""
        if not self.compared:
            return "no first token was compared"
        earliest = "" if self.earliest is None else f"; the first to part did so after {self.earliest} tokens"
        return f"first tokens within {self.largest:.2g} of the engine's own, {self.same} to the last bit{earliest}"

    def __str__(self):
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in self.verdicts.items())
        return f"{counts or 'no answers'}; {self.figures()}"


def parting(tokens, wanted):
    """Where two texts choose different tokens; None if one is the beginning of the other."""
    return next((at for at, (one, other) in enumerate(zip(tokens, wanted)) if one != other), None)


def is_text_right(answer, wanted, whole):
    """For equal tokens: is the text theirs, and is it all of it?"""
    if whole:
        return len(answer.tokens) == len(wanted.tokens) and answer.text == wanted.text
    # Where a stream ends within a character, what has come of it is shown as a replacement character.
    return len(answer.tokens) <= len(wanted.tokens) and wanted.text.startswith(answer.text.rstrip("\ufffd"))


def found(what, answers, owns):
    """Has the judgement found faults that were planted, one in each answer? Whether it has, and a line about it."""
    tally = Tally()
    for answer, own in zip(answers, owns):
        tally.add(answer, own)
    count = tally.verdicts[Verdict.BEYOND]
    good = tally.compared > 0 and count >= FOUND_MIN * tally.compared
    return good, (f"{what}: found in {count} of {tally.compared} answers, {tally.verdicts[Verdict.LEFT_OUT]} left out; "
                  f"at least {FOUND_MIN:.0%} must be; first tokens up to {tally.largest:.2g} from the engine's own")

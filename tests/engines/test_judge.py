"""Tests of the judgement with made-up distributions, without an engine.

    python3 tests/engines/test_judge.py
"""

import unittest

import judge
from engines import Answer
from judge import Own, Tally, Verdict

COUNT = 8


def likeliest(change=0.0, names="t"):
    """Twenty tokens, 0.2 nats from one to the next, each moved up or down by `change`."""
    return {f"{names}{at}": -1.0 - 0.2 * at + (change if at % 2 else -change) for at in range(judge.TOP)}


def answer(first=None, tokens="abcd", text=None, cached=0):
    """An answer whose first token has this distribution; later ones have the likeliest tokens a to f."""
    rest = [dict.fromkeys("abcdef", -1.0)] * (len(tokens) - 1)
    return Answer(status=200, tokens=list(tokens), tops=[first or likeliest(), *rest],
                  text=tokens if text is None else text, usage={"prompt_tokens_details": {"cached_tokens": cached}})


def own(spread=0.0):
    """The engine's own answers to a prompt, `spread` apart."""
    return Own(answer(), [answer(likeliest(spread), cached=32)])


def verdict(one, of=None, whole=True):
    return Tally().add(one, of or own(), whole)


class Distance(unittest.TestCase):
    def test_equal_distributions_are_not_apart(self):
        self.assertEqual(judge.distance(likeliest(), likeliest()), 0.0)

    def test_tokens_that_both_have_count_by_their_difference(self):
        self.assertAlmostEqual(judge.distance(likeliest(), likeliest(0.03)), 0.03)

    def test_other_tokens_count_by_what_they_rise_above_the_last(self):
        self.assertAlmostEqual(judge.distance(likeliest(), likeliest(names="u")), 3.4)

    def test_a_token_that_only_just_falls_out_costs_next_to_nothing(self):
        one, other = {"a": -1.0, "b": -2.0, "c": -5.0}, {"a": -1.0, "b": -2.0, "d": -5.0}
        self.assertEqual(judge.distance(one, other), 0.0)

    def test_it_is_the_same_both_ways(self):
        one, other = {"a": -1.0, "b": -2.0, "c": -4.0}, {"a": -2.0, "d": -2.5}
        self.assertEqual(judge.distance(one, other), judge.distance(other, one))


class Judgement(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(verdict(answer()), Verdict.EQUAL)

    def test_rounding_is_allowed_where_the_engine_alone_has_no_spread(self):
        self.assertEqual(verdict(answer(likeliest(judge.FLOOR * 0.9))), Verdict.EQUAL)

    def test_within_the_prompts_own_spread(self):
        self.assertEqual(verdict(answer(likeliest(-0.15)), own(0.1)), Verdict.EQUAL)

    def test_beyond_the_prompts_own_spread(self):
        self.assertEqual(verdict(answer(likeliest(-0.25)), own(0.1)), Verdict.BEYOND)

    def test_a_spread_allows_nothing_in_other_prompts(self):
        self.assertEqual(verdict(answer(likeliest(-0.15)), own(0.0)), Verdict.BEYOND)

    def test_a_wrong_block_is_found_at_the_largest_spread_that_is_judged(self):
        widest = own(judge.SPREAD_MAX * 0.99)
        self.assertFalse(widest.is_left_out)
        self.assertEqual(verdict(answer(likeliest(names="u")), widest), Verdict.BEYOND)

    def test_a_wrong_block_is_found_although_the_text_is_equal(self):
        wrong = answer(likeliest(0.6))
        self.assertEqual((wrong.text, verdict(wrong)), (own().wanted.text, Verdict.BEYOND))

    def test_an_ill_conditioned_prompt_is_left_out(self):
        self.assertEqual(verdict(answer(likeliest(names="u")), own(1.6)), Verdict.LEFT_OUT)

    def test_texts_that_part_onto_a_likely_token_are_not_compared_on(self):
        self.assertEqual(verdict(answer(tokens="abef")), Verdict.PARTED)

    def test_texts_that_part_onto_an_unlikely_token_have_jumped(self):
        self.assertEqual(verdict(answer(tokens="abxd")), Verdict.JUMPED)

    def test_equal_tokens_have_one_text(self):
        self.assertEqual(verdict(answer(text="abc?")), Verdict.WRONG_TEXT)
        self.assertEqual(verdict(answer(text="abc?"), own(1.6)), Verdict.WRONG_TEXT)

    def test_an_answer_is_whole(self):
        self.assertEqual(verdict(answer(tokens="abc")), Verdict.WRONG_TEXT)
        self.assertEqual(verdict(answer(tokens="abcda")), Verdict.WRONG_TEXT)
        self.assertEqual(verdict(Answer(status=200)), Verdict.WRONG_TEXT)

    def test_the_beginning_of_an_answer_may_end_anywhere(self):
        self.assertEqual(verdict(answer(tokens="abc"), whole=False), Verdict.EQUAL)
        self.assertEqual(verdict(answer(tokens="abc", text="ab\ufffd"), whole=False), Verdict.EQUAL)
        self.assertEqual(verdict(Answer(status=200), whole=False), Verdict.EQUAL)
        self.assertEqual(verdict(answer(tokens="abc", text="ac"), whole=False), Verdict.WRONG_TEXT)
        self.assertEqual(verdict(answer(likeliest(0.6), tokens="abc"), whole=False), Verdict.BEYOND)


class Scenarios(unittest.TestCase):
    def tally(self, answers, of=None):
        tally = Tally()
        for one in answers:
            tally.add(one, of or own())
        return tally

    def test_one_answer_beyond_the_spread_fails_all(self):
        good, text = self.tally([answer()] * 99 + [answer(likeliest(0.6))]).result("x")
        self.assertFalse(good)
        self.assertIn("1 beyond the spread", text)

    def test_equal_and_parted_answers_are_right(self):
        good, text = self.tally([answer(), answer(tokens="abef")]).result("x")
        self.assertTrue(good, text)
        self.assertIn("the first to part did so after 2 tokens", text)
        self.assertIn("2 to the last bit", text)

    def test_most_texts_must_not_jump(self):
        self.assertTrue(self.tally([answer(tokens="abxd")]).result("x")[0])
        self.assertTrue(self.tally([answer(tokens="abxd")] * 4 + [answer()] * 4).result("x")[0])
        self.assertFalse(self.tally([answer(tokens="abxd")] * 5 + [answer()] * 3).result("x")[0])

    def test_something_must_have_been_compared(self):
        self.assertFalse(self.tally([]).result("x")[0])
        self.assertFalse(self.tally([answer()], own(1.6)).result("x")[0])

    def test_a_share_of_the_prompts_may_be_left_out_and_no_more(self):
        few, many = [own(1.6)] * 2 + [own()] * 4, [own(1.6)] * 3 + [own()] * 4
        self.assertTrue(judge.check_prompts("x", few)[0])
        good, text = judge.check_prompts("x", many)
        self.assertFalse(good)
        self.assertIn("3 of 7 prompts are left out", text)

    def test_prompts_that_were_never_cached_have_no_spread(self):
        self.assertFalse(judge.check_prompts("x", [own(), Own(answer(), [answer()])])[0])
        self.assertFalse(judge.check_prompts("x", [])[0])

    def test_planted_faults_must_be_found(self):
        wrong, owns = answer(likeliest(names="u")), [own()] * COUNT
        self.assertTrue(judge.found("x", [wrong] * 6 + [answer()] * 2, owns)[0])
        self.assertFalse(judge.found("x", [wrong] * 5 + [answer()] * 3, owns)[0])
        self.assertFalse(judge.found("x", [answer()] * COUNT, owns)[0])

    def test_planted_faults_in_prompts_that_are_left_out_do_not_count(self):
        wrong = answer(likeliest(names="u"))
        self.assertTrue(judge.found("x", [wrong] * 3, [own(), own(1.6), own(1.6)])[0])
        self.assertFalse(judge.found("x", [wrong] * 3, [own(1.6)] * 3)[0])


class Engine:
    """Answers as an engine that rounds by `step` for each cached block of eight words; it parts nothing else."""

    def __init__(self, step):
        self.step = step
        self.asked = []
        self.cache = set()

    def ask(self, body):
        self.asked.append(body)
        words, salt = body["messages"][0]["content"].split(), body["cache_salt"]
        prefixes = [(salt, *words[:end]) for end in range(8, len(words) + 1, 8)]
        blocks = next((at for at, prefix in enumerate(prefixes) if prefix not in self.cache), len(prefixes))
        self.cache.update(prefixes)
        return answer(likeliest(self.step * blocks), "abcd"[: body["max_tokens"]], cached=blocks * 32)


class Measurement(unittest.TestCase):
    def body(self, name):
        content = " ".join(f"{name}{at}" for at in range(32))
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}

    def test_prompts_are_computed_cached_and_cached_up_to_several_points(self):
        engine = Engine(0.01)
        bodies = [self.body("x"), self.body("y")]
        for one in judge.measure(engine.ask, bodies, at_once=True):
            self.assertEqual(one.points, {0, 32, 64, 96, 128})
            self.assertAlmostEqual(one.spread, 0.04)
            self.assertEqual((one.wanted.text, one.wanted.cached), ("abcd", 0))
        self.assertEqual(bodies, [self.body("x"), self.body("y")])
        self.assertEqual(sum(body["cache_salt"] == "at once" for body in engine.asked), 2)

    def test_an_engine_that_rounds_alike_has_no_spread(self):
        (one,) = judge.measure(Engine(0.0).ask, [self.body("x")])
        self.assertEqual((one.spread, one.allowed), (0.0, judge.FLOOR))

    def test_answers_without_distributions_are_no_measure(self):
        with self.assertRaises(ValueError):
            Own(answer(), [Answer(status=200)])

    def test_a_chats_tokens_are_read_from_the_answer(self):
        one = Answer()
        named = (("a", -0.1), ("\ufffd", -3.0), ("\ufffd", -4.0))
        top = [{"token": name, "logprob": logprob} for name, logprob in named]
        content = [{"token": "a", "logprob": -0.1, "top_logprobs": top}, {"token": "b", "logprob": -0.2}]
        one.take([{"message": {"content": "ab"}, "logprobs": {"content": content}}], "message")
        self.assertEqual((one.text, one.tokens, one.logprobs), ("ab", ["a", "b"], [-0.1, -0.2]))
        # Of tokens that look alike the likeliest counts.
        self.assertEqual(one.tops, [{"a": -0.1, "\ufffd": -3.0}, {}])


if __name__ == "__main__":
    unittest.main()

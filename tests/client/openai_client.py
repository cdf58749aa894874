"""Speaks to a running gateway with the official `openai` client, as an application would.

    python3 tests/client/openai_client.py http://127.0.0.1:8000/v1 kvasir-tiny

Prints one line for each thing that works; the first that does not ends it with a traceback.
"""

import math
import sys

import openai

base_url, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def passed(what):
    print(f"ok: {what}", flush=True)


def refused(kind, param, call):
    try:
        call()
    except kind as error:
        assert error.body["param"] == param, (param, error.body)
        assert error.body["message"], error.body
        return error
    raise AssertionError(f"{param}: was not refused")


models = client.models.list().data
assert [entry.id for entry in models] == [model], models
assert client.models.list().data[0].object == "model"
passed("models")

system = {"role": "system", "content": "You are a terse assistant. " * 12}
first_turn = [system, {"role": "user", "content": "Hello, who are you?"}]
chat = client.chat.completions.create(model=model, messages=first_turn, max_completion_tokens=24, temperature=0)
choice = chat.choices[0]
assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length"), chat
assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens, chat.usage
passed("chat")

second_turn = first_turn + [
    {"role": "assistant", "content": choice.message.content},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
]
again = client.chat.completions.create(model=model, messages=second_turn, max_tokens=8, temperature=0)
cached = again.usage.prompt_tokens_details.cached_tokens
assert cached > 0, again.usage
passed(f"second turn: {cached} of {again.usage.prompt_tokens} prompt tokens cached")

stream = client.chat.completions.create(
    model=model, messages=first_turn, max_tokens=24, temperature=0, stream=True,
    stream_options={"include_usage": True},
)
text, finish, usage, roles = "", None, None, []
for chunk in stream:
    if chunk.usage:
        assert not chunk.choices, chunk
        usage = chunk.usage
    for part in chunk.choices:
        if part.delta.role:
            roles.append(part.delta.role)
        text += part.delta.content or ""
        finish = part.finish_reason or finish
assert text == choice.message.content, (text, choice.message.content)
assert roles == ["assistant"] and finish == choice.finish_reason, (roles, finish)
assert usage and usage.completion_tokens == chat.usage.completion_tokens, usage
passed("chat stream with usage, equal to the whole answer")

ids = [72, 101, 108, 108, 111]
by_ids = client.completions.create(model=model, prompt=ids, max_tokens=10, temperature=0)
by_text = client.completions.create(model=model, prompt="Hello", max_tokens=10, temperature=0)
assert by_ids.choices[0].text == by_text.choices[0].text and by_ids.usage.prompt_tokens == len(ids)
passed("completions with token ids and with text")

streamed = client.completions.create(model=model, prompt=ids, max_tokens=10, temperature=0, stream=True)
assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == by_ids.choices[0].text
passed("completions stream")

several = client.completions.create(model=model, prompt=["Hello", "World"], n=2, max_tokens=6, seed=5)
assert [entry.index for entry in several.choices] == [0, 1, 2, 3], several
repeated = client.completions.create(model=model, prompt=["Hello", "World"], n=2, max_tokens=6, seed=5)
assert [entry.text for entry in several.choices] == [entry.text for entry in repeated.choices], "seeded"
assert several.choices[0].text != several.choices[1].text, "choices of one prompt differ"
passed("several prompts, n, seed")

scored = client.completions.create(model=model, prompt=ids, max_tokens=4, temperature=0, logprobs=3).choices[0].logprobs
assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs) == len(scored.text_offset) == 4
for token, logprob, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs):
    assert math.isclose(logprob, max(top.values()), abs_tol=1e-6) and top[token] == logprob, (token, logprob, top)
    assert len(top) == 3 and sum(math.exp(value) for value in top.values()) <= 1 + 1e-6, top
passed("completions logprobs")

scored = client.chat.completions.create(
    model=model, messages=first_turn, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
).choices[0].logprobs.content
assert len(scored) == 4
for token in scored:
    assert len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token, token
    assert bytes(token.bytes).decode("utf-8", "replace") == token.token, token
passed("chat logprobs")

whole = by_ids.choices[0].text
stop = whole[3:5]
stopped = client.completions.create(model=model, prompt=ids, max_tokens=10, temperature=0, stop=[stop]).choices[0]
assert stopped.text == whole[: whole.index(stop)] and stopped.finish_reason == "stop", (whole, stopped)
passed("stop strings")

echoed = client.completions.create(model=model, prompt="Hello", max_tokens=3, temperature=0, echo=True).choices[0].text
assert echoed.startswith("Hello") and len(echoed) >= 8, echoed
passed("echo")

bad, missing = openai.BadRequestError, openai.NotFoundError
refused(bad, "temperature", lambda: client.completions.create(model=model, prompt="x", temperature=9))
refused(bad, "max_tokens", lambda: client.completions.create(model=model, prompt="x", max_tokens=0))
refused(bad, "n", lambda: client.chat.completions.create(model=model, messages=first_turn, n=99))
refused(bad, "messages", lambda: client.chat.completions.create(model=model, messages=[]))
refused(bad, "messages[0].content", lambda: client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/x"}}]}]))
refused(missing, "model", lambda: client.chat.completions.create(model="other", messages=first_turn))
too_long = refused(bad, "prompt", lambda: client.completions.create(model=model, prompt=[65] * 100_000))
assert too_long.body["code"] == "context_length_exceeded", too_long.body
raw = client.completions.with_raw_response.create(model=model, prompt=ids, max_tokens=1)
assert "worker=" in raw.headers["x-kvasir-route"] and raw.headers["x-request-id"], raw.headers
passed("errors name their parameter; headers explain the route")

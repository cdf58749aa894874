"""Speaks to a gateway in front of vLLM-like engines with the official `openai` and `anthropic` clients.

    python3 tests/client/engines_client.py http://127.0.0.1:8000 tiny

Prints one line for each thing that works; the first that does not ends it with a traceback.
"""

import json
import sys
import urllib.request

import anthropic
import openai

base, model = sys.argv[1], sys.argv[2]
chat_client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
message_client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
question = [{"role": "user", "content": "Hello there, who are you?"}]
weather = {
    "name": "weather",
    "description": "The weather in a town.",
    "schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def passed(what):
    print(f"ok: {what}", flush=True)


chat = chat_client.chat.completions.create(model=model, messages=question, max_tokens=12, temperature=0)
text = chat.choices[0].message.content
assert text and chat.usage.completion_tokens == 12 and chat.usage.prompt_tokens_details.cached_tokens is not None
passed("chat")

pieces = list(
    chat_client.chat.completions.create(
        model=model, messages=question, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
assert pieces[-1].usage.completion_tokens == 12 and not pieces[-1].choices
passed("streamed chat with usage")

several = chat_client.chat.completions.create(
    model=model, messages=question, max_tokens=4, n=3, logprobs=True, top_logprobs=2, stop=["\x00"], seed=1,
    logit_bias={"65": 1}, user="u", metadata={"a": "b"}, service_tier="auto", store=False,
)
assert [choice.index for choice in several.choices] == [0, 1, 2]
assert len(several.choices[0].logprobs.content[0].top_logprobs) == 2
passed("n, logprobs, stop, seed, logit_bias, user, metadata, service_tier, store")

tool = {"type": "function", "function": {"name": "weather", "parameters": weather["schema"]}}
called = chat_client.chat.completions.create(
    model=model, messages=question, max_tokens=64, tools=[tool], tool_choice="required", parallel_tool_calls=False
)
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "weather" and "town" in json.loads(call.function.arguments)
assert called.choices[0].finish_reason == "tool_calls"
passed("a forced tool call")

answered = chat_client.chat.completions.create(
    model=model, max_tokens=8, tools=[tool],
    messages=[*question, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}],
)
assert answered.choices[0].message.content
passed("its result")

shape = {"type": "json_schema", "json_schema": {"name": "town", "schema": weather["schema"]}}
shaped = chat_client.chat.completions.create(model=model, messages=question, max_tokens=64, response_format=shape)
assert "town" in json.loads(shaped.choices[0].message.content)
passed("response_format with a JSON schema")

image = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
seen = chat_client.chat.completions.create(model=model, messages=[{"role": "user", "content": image}], max_tokens=4)
assert seen.choices[0].message.content
passed("an image part passes through")

completion = chat_client.completions.create(model=model, prompt="Once", max_tokens=6, temperature=0)
ids = chat_client.completions.create(model=model, prompt=[79, 110, 99, 101], max_tokens=6, temperature=0)
assert completion.choices[0].text and ids.choices[0].text
passed("completions of text and of ids")

vector = chat_client.embeddings.create(model=model, input=["a", "b"])
assert len(vector.data) == 2 and vector.data[0].embedding
passed("embeddings")



def posted(path, body):
    """What no official client asks for."""
    head = {"content-type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


documents = ["a cat sat on the mat", "what is the weather in the town", "rain"]
for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
    ranked = posted(path, {"model": model, "query": "weather in the town", "documents": documents, "top_n": 2})
    assert [result["index"] for result in ranked["results"]][0] == 1 and len(ranked["results"]) == 2, ranked
passed("documents ranked")

scored = posted("/v1/score", {"model": model, "text_1": "rain", "text_2": documents})
assert [entry["score"] for entry in scored["data"]][2] == 1, scored
passed("texts scored")

spoken = chat_client.audio.speech.create(model=model, voice="any", input="Hello there", response_format="wav")
assert spoken.content == b"RIFF\0\xff\xfe" + bytes(255 - byte for byte in b"Hello there"), spoken.content
passed("a text is spoken")

sound = b"RIFF\0\xff\r\n--edge" + bytes(range(256)) * 300
named = ("speech.wav", sound, "audio/wav")
heard = f"of {len(sound)} bytes, sum {sum(sound)}, of speech.wav audio/wav: "
written = chat_client.audio.transcriptions.create(
    model=model, file=named, language="en", prompt="ä name", timestamp_granularities=["word", "segment"], temperature=0.5,
)
assert written.text.startswith(f"transcriptions {heard}"), written.text
for field in ("language=en", "prompt=ä name", "temperature=0.5", "timestamp_granularities[]=word+segment"):
    assert field in written.text, written.text
assert chat_client.audio.translations.create(model=model, file=named).text.startswith(f"translations {heard}")
plain = chat_client.audio.transcriptions.create(model=model, file=named, response_format="text")
assert plain.startswith(f"transcriptions {heard}"), plain
streamed = chat_client.audio.transcriptions.create(model=model, file=named, language="en", stream=True)
pieces = [event.model_extra["choices"] for event in streamed]
assert all(pieces), "the usage was not asked for"
assert "".join(piece[0]["delta"]["content"] for piece in pieces).startswith(f"transcriptions {heard}"), pieces
for wrong, status in ((dict(model="nobody", file=named), 404), (dict(model=model, file=named, extra_body={"a b": "1"}), 400)):
    try:
        chat_client.audio.transcriptions.create(**wrong)
    except openai.APIStatusError as error:
        assert error.status_code == status, error
    else:
        raise AssertionError(f"{wrong} was not refused")
passed("a recording is transcribed and translated")

tokens = posted("/tokenize", {"model": model, "prompt": "Hello there"})["tokens"]
assert "Hello there" in posted("/detokenize", {"model": model, "tokens": tokens})["prompt"]
passed("a text as tokens and back")

response = chat_client.responses.create(model=model, input="Hello there, who are you?", max_output_tokens=12, store=False)
assert response.output_text == text and response.status == "incomplete"
passed("a response")

with chat_client.responses.stream(model=model, input="Hello there, who are you?", max_output_tokens=12) as stream:
    events = list(stream)
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
passed("a streamed response")

for wrong in (dict(previous_response_id="resp_1"), dict(background=True)):
    try:
        chat_client.responses.create(model=model, input="x", **wrong)
    except openai.BadRequestError as error:
        assert error.body["message"], error.body
    else:
        raise AssertionError(f"{wrong} was not refused")
passed("what needs a memory is refused")

message = message_client.messages.create(model=model, max_tokens=12, messages=question)
assert message.content[0].text == text and message.stop_reason == "max_tokens" and message.usage.output_tokens == 12
passed("a message")

with message_client.messages.stream(model=model, max_tokens=12, messages=question) as stream:
    assert "".join(stream.text_stream) == text
    assert stream.get_final_message().stop_reason == "max_tokens"
passed("a streamed message")

used = message_client.messages.create(
    model=model, max_tokens=64, messages=question, system="Be brief.", tool_choice={"type": "any"},
    tools=[{"name": "weather", "description": weather["description"], "input_schema": weather["schema"]}],
)
block = next(block for block in used.content if block.type == "tool_use")
assert used.stop_reason == "tool_use" and "town" in block.input
passed("a tool in a message")

result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
after = message_client.messages.create(
    model=model, max_tokens=8,
    messages=[*question, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}],
)
assert after.content[0].text
passed("its result in a message")

try:
    message_client.messages.create(model="nobody", max_tokens=4, messages=question)
except anthropic.NotFoundError as error:
    assert error.body["type"] == "error" and error.body["error"]["type"] == "not_found_error", error.body
else:
    raise AssertionError("a model that does not exist was served")
passed("an error in Anthropic's shape")

try:
    chat_client.chat.completions.create(model=model, messages=question, max_tokens=-1)
except openai.BadRequestError as error:
    assert error.body["message"], error.body
else:
    raise AssertionError("max_tokens=-1 was served")
passed("an engine's refusal in OpenAI's shape")

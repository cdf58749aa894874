"""Holds example translations against the official `anthropic` and `openai` clients.

    cargo run -p router-surfaces --example samples -- /tmp/samples
    python3 tests/client/surface_types.py /tmp/samples

Each example is a chat completion, and what it becomes as a message and as a response, whole and streamed. The whole
ones must satisfy the clients' own types, strictly; the streams go through the clients themselves over a transport that
answers from the file, and what they assemble must say the same as the whole. The first that does not ends it with a
traceback.
"""

import json
import pathlib
import sys

import anthropic
import openai
import pydantic
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent

try:
    import httpx2 as httpx
except ImportError:
    import httpx

folder = pathlib.Path(sys.argv[1])
names = sorted(path.stem.removeprefix("chat_") for path in folder.glob("chat_*.json"))
assert names, f"no examples in {folder}"
messages = [{"role": "user", "content": "Hi"}]
message_event = pydantic.TypeAdapter(RawMessageStreamEvent)
response_event = pydantic.TypeAdapter(ResponseStreamEvent)


def passed(what):
    print(f"ok: {what}", flush=True)


def read(name):
    return (folder / name).read_text(encoding="utf-8")


def transport(body, kind, status=200):
    def answer(request):
        return httpx.Response(status, headers={"content-type": kind}, content=body.encode())

    return httpx.Client(transport=httpx.MockTransport(answer))


def anthropic_client(body, kind="text/event-stream", status=200):
    return anthropic.Anthropic(
        api_key="none", base_url="http://nowhere", max_retries=0, http_client=transport(body, kind, status)
    )


def openai_client(body, kind="text/event-stream", status=200):
    return openai.OpenAI(
        api_key="none", base_url="http://nowhere/v1", max_retries=0, http_client=transport(body, kind, status)
    )


def strictly(adapter, text):
    """Validates with types as they are: the clients themselves never check."""
    return adapter.validate_json(text, strict=True)


def known(value, model, at="$"):
    """No field that the client's types do not know of, wherever the type is a plain model."""
    for name, inner in value.model_extra.items() if value.model_extra else ():
        raise AssertionError(f"{at}.{name}: {model.__name__} has no such field: {inner!r}")
    for name in type(value).model_fields:
        inner = getattr(value, name)
        for index, item in enumerate(inner if isinstance(inner, list) else [inner]):
            if isinstance(item, pydantic.BaseModel):
                known(item, type(item), f"{at}.{name}[{index}]")


def events(text, adapter):
    for event in text.removesuffix("\n\n").split("\n\n"):
        head, data = event.split("\n")
        parsed = strictly(adapter, data.removeprefix("data: "))
        known(parsed, type(parsed), parsed.type)
        assert head == f"event: {parsed.type}", (head, parsed)
        yield parsed


def said(chat):
    """What a chat completion says: thoughts, text and calls."""
    message = chat["choices"][0]["message"]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
             for call in message.get("tool_calls", [])]
    return message.get("reasoning") or message.get("reasoning_content") or "", message["content"] or "", calls


def said_by_message(message):
    blocks = message.content
    return (
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        "".join(block.text for block in blocks if block.type == "text"),
        [(block.name, block.input, block.id) for block in blocks if block.type == "tool_use"],
    )


def said_by_response(response):
    items = response.output
    return (
        "".join(part.text for item in items if item.type == "reasoning" for part in item.content),
        response.output_text,
        [(item.name, json.loads(item.arguments), item.call_id) for item in items if item.type == "function_call"],
    )


STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def check_message(message, chat):
    choice = chat["choices"][0]
    assert said_by_message(message) == said(chat), (message, chat)
    sequence = choice.get("stop_reason")
    wanted = "stop_sequence" if sequence else STOPS[choice["finish_reason"]]
    assert (message.stop_reason, message.stop_sequence) == (wanted, sequence), message
    usage = message.usage
    counts = (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens)
    assert counts == (4, 16, 7), usage


def check_response(response, chat):
    assert said_by_response(response) == said(chat), (response, chat)
    cut = chat["choices"][0]["finish_reason"] == "length"
    assert response.status == ("incomplete" if cut else "completed"), response
    assert (response.incomplete_details.reason if cut else None) == ("max_output_tokens" if cut else None)
    usage = response.usage
    counts = (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens, usage.total_tokens)
    assert counts == (20, 16, 7, 27), usage
    assert response.metadata == {"a": "b"} and response.tools[0].name == "weather", response


def anthropic_checks(name, chat):
    whole = strictly(pydantic.TypeAdapter(Message), read(f"anthropic_{name}.json"))
    known(whole, Message)
    check_message(whole, chat)
    client = anthropic_client(read(f"anthropic_{name}.json"), "application/json")
    check_message(client.messages.create(model="tiny", max_tokens=64, messages=messages), chat)
    text = read(f"anthropic_{name}.sse")
    kinds = [event.type for event in events(text, message_event)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
    with anthropic_client(text).messages.stream(model="tiny", max_tokens=64, messages=messages) as stream:
        assembled = stream.get_final_message()
    check_message(assembled, chat)
    same = [block.model_dump(exclude={"parsed_output"}, exclude_none=True) for block in assembled.content]
    assert same == [block.model_dump(exclude_none=True) for block in whole.content], (same, whole)
    assert assembled.id == whole.id


def openai_checks(name, chat):
    whole = strictly(pydantic.TypeAdapter(Response), read(f"responses_{name}.json"))
    check_response(whole, chat)
    client = openai_client(read(f"responses_{name}.json"), "application/json")
    check_response(client.responses.create(model="tiny", input="Hi"), chat)
    text = read(f"responses_{name}.sse")
    told = list(events_of_response(text))
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert told[-1].response == whole, (told[-1].response, whole)
    plain = openai_client(text).responses.create(model="tiny", input="Hi", stream=True)
    last = [event for event in plain][-1]
    check_response(last.response, chat)
    with openai_client(text).responses.stream(model="tiny", input="Hi") as stream:
        seen = list(stream)
        if last.type == "response.completed":
            check_response(stream.get_final_response(), chat)
    texts = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert texts == said(chat)[1], texts


def events_of_response(text):
    """As `events`, but a response may have fields that the client does not know (`store`)."""
    for event in text.removesuffix("\n\n").split("\n\n"):
        head, data = event.split("\n")
        parsed = strictly(response_event, data.removeprefix("data: "))
        assert head == f"event: {parsed.type}", (head, parsed)
        assert not parsed.model_extra, parsed.model_extra
        yield parsed


def failures():
    text = read("anthropic_failed.stream")
    try:
        with anthropic_client(text).messages.stream(model="tiny", max_tokens=64, messages=messages) as stream:
            list(stream)
        raise RuntimeError("a broken stream was taken for a whole one")
    except anthropic.APIStatusError as error:
        assert error.body["error"]["message"] == "The engine died.", error.body
    last = list(openai_client(read("responses_failed.stream")).responses.create(model="m", input="Hi", stream=True))[-1]
    assert last.type == "response.failed" and last.response.error.message == "The engine died.", last
    body = read("anthropic_error.json")
    strictly(pydantic.TypeAdapter(ErrorResponse), body)
    try:
        anthropic_client(body, "application/json", 404).messages.create(model="x", max_tokens=1, messages=messages)
        raise RuntimeError("a 404 was taken for a message")
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body


for name in names:
    chat = json.loads(read(f"chat_{name}.json"))
    anthropic_checks(name, chat)
    passed(f"message: {name}")
    openai_checks(name, chat)
    passed(f"response: {name}")
strictly(pydantic.TypeAdapter(MessageTokensCount), read("anthropic_count.json"))
passed("count of tokens")
failures()
passed("failures")

"""The official OpenAI client against a gateway with a database: stored responses and conversations.

Usage: responses_client.py URL MODEL. Prints `ok: …` for each thing that works.
"""

import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def passed(what):
    print(f"ok: {what}", flush=True)


first = client.responses.create(model=model, input="Hello there, who are you?", max_output_tokens=12)
assert first.store is True and first.id.startswith("resp_"), first
passed("a response is stored")

second = client.responses.create(
    model=model, input="And why?", previous_response_id=first.id, max_output_tokens=12, metadata={"a": "b"}
)
whole = client.responses.create(
    model=model,
    input=[
        {"role": "user", "content": "Hello there, who are you?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And why?"},
    ],
    max_output_tokens=12,
    store=False,
)
assert second.previous_response_id == first.id and second.output_text == whole.output_text
assert second.usage.input_tokens == whole.usage.input_tokens and whole.store is False
passed("one goes on from it as if it brought the whole conversation")

with client.responses.stream(
    model=model, input="Once more", previous_response_id=second.id, max_output_tokens=12
) as stream:
    third = list(stream)[-1].response
assert client.responses.retrieve(third.id).output_text == third.output_text
passed("a streamed response is there when its stream has ended")

told = client.responses.retrieve(second.id)
assert told.model_dump() == second.model_dump()
items = client.responses.input_items.list(second.id)
assert [item.content[0].text for item in items] == ["And why?"]
passed("responses and their input are told again")

client.responses.delete(second.id)
for gone in (lambda: client.responses.retrieve(second.id), lambda: client.responses.retrieve(whole.id)):
    try:
        gone()
    except openai.NotFoundError as error:
        assert error.body["message"], error.body
    else:
        raise AssertionError("it is still there")
try:
    client.responses.create(model=model, input="x", previous_response_id=third.id)
except openai.BadRequestError as error:
    assert error.code == "previous_response_not_found" and error.param == "previous_response_id", error.body
else:
    raise AssertionError("a chain without a link was gone on with")
passed("what is deleted is gone, what was not to be stored was never there")

conversation = client.conversations.create(
    metadata={"topic": "t"}, items=[{"type": "message", "role": "user", "content": "Hello there, who are you?"}]
)
client.conversations.items.create(
    conversation.id, items=[{"type": "message", "role": "assistant", "content": first.output_text}]
)
spoken = client.responses.create(model=model, input="And why?", conversation=conversation.id, max_output_tokens=12)
assert spoken.output_text == whole.output_text and spoken.conversation.id == conversation.id
items = list(client.conversations.items.list(conversation.id, order="asc"))
assert [item.content[0].text for item in items] == [
    "Hello there, who are you?", first.output_text, "And why?", spoken.output_text
], items
passed("a conversation grows with its responses")

pages = list(client.conversations.items.list(conversation.id, order="desc", limit=1))
assert [item.id for item in pages] == [item.id for item in reversed(items)]
assert client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id).id == items[0].id
client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
assert len(list(client.conversations.items.list(conversation.id))) == 3
updated = client.conversations.update(conversation.id, metadata={"topic": "other"})
assert client.conversations.retrieve(conversation.id).metadata == updated.metadata == {"topic": "other"}
assert client.conversations.delete(conversation.id).deleted
try:
    client.responses.create(model=model, input="x", conversation=conversation.id)
except openai.NotFoundError:
    passed("conversations are changed and deleted")

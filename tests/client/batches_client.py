"""The official OpenAI client against a gateway with a database: files and batches.

Usage: batches_client.py URL MODEL. Prints `ok: …` for each thing that works.
"""

import json
import sys
import time

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def passed(what):
    print(f"ok: {what}", flush=True)


def refused(call, status, param=None):
    try:
        call()
    except openai.APIStatusError as error:
        assert error.status_code == status and error.body["message"], error.body
        assert param is None or error.body["param"] == param, error.body
    else:
        raise AssertionError("it was not refused")


def line(number, text, **more):
    body = {"model": model, "max_tokens": 6, "messages": [{"role": "user", "content": text}]} | more
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def over(batch):
    for _ in range(600):
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.1)
    raise AssertionError(f"it does not end: {batch}")


texts = [f"Question {number}: what is {number} and {number}?" for number in range(150)]
lines = [line(number, text) for number, text in enumerate(texts)]
lines[7] = line(7, "of another model", model="nobody")
content = ("\n".join(lines[:50]) + "\n\n" + "\n".join(lines[50:])).encode()
file = client.files.create(file=("requests.jsonl", content), purpose="batch")
assert (file.bytes, file.filename, file.purpose) == (len(content), "requests.jsonl", "batch"), file
assert client.files.content(file.id).read() == content
assert [other.id for other in client.files.list(purpose="batch")] == [file.id]
passed("a file is uploaded and told again")

big = bytes(number % 251 for number in range(5_000_001))
upload = client.files.create(file=("big.bin", big), purpose="user_data")
assert client.files.content(upload.id).read() == big and client.files.retrieve(upload.id).bytes == len(big)
assert client.files.delete(upload.id).deleted
refused(lambda: client.files.content(upload.id), 404)
refused(lambda: client.files.create(file=("x", b"x"), purpose="nonsense"), 400, "purpose")
passed("a file of many parts comes back byte for byte, and goes")

batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "nightly"}
)
assert batch.status == "validating" and batch.request_counts.total == 0
batch = over(batch)
assert batch.status == "completed" and batch.metadata == {"job": "nightly"}, batch
assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (150, 149, 1)
answers = [json.loads(answer) for answer in client.files.content(batch.output_file_id).text.splitlines()]
assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(150) if number != 7]
for answer in answers[::30]:
    number = int(answer["custom_id"][1:])
    alone = client.chat.completions.create(
        model=model, max_tokens=6, messages=[{"role": "user", "content": texts[number]}]
    )
    told = answer["response"]["body"]["choices"][0]["message"]["content"]
    assert answer["response"]["status_code"] == 200 and told == alone.choices[0].message.content
[error] = [json.loads(answer) for answer in client.files.content(batch.error_file_id).text.splitlines()]
assert error["custom_id"] == "r7" and error["response"]["status_code"] == 404, error
assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
passed("a batch is answered line by line, what is refused apart")

assert [other.id for other in client.batches.list()] == [batch.id]
refused(lambda: client.batches.create(input_file_id="file-1", endpoint="/v1/chat/completions", completion_window="24h"), 400, "input_file_id")
refused(lambda: client.batches.create(input_file_id=file.id, endpoint="/v1/audio", completion_window="24h"), 400, "endpoint")
mixed = "\n".join([line(1, "a"), "{", line(1, "b"), line(2, "c", stream=True)]).encode()
bad = client.files.create(file=("bad.jsonl", mixed), purpose="batch")
batch = over(client.batches.create(input_file_id=bad.id, endpoint="/v1/chat/completions", completion_window="24h"))
assert batch.status == "failed"
assert [(error.line, error.code) for error in batch.errors.data] == [
    (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "invalid_request")
], batch.errors
passed("mistakes are told with their lines")

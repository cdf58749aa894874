"""Speaks to the KServe service with NVIDIA's official `tritonclient[grpc]`.

    python3 tests/client/kserve_client.py 127.0.0.1:8001 tiny [KEY]

Prints one line for each thing that works; the first that does not ends it with a traceback. The model must answer
the same text again at temperature 0.
"""

import json
import queue
import sys

import numpy
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1], sys.argv[2]
headers = {"authorization": f"Bearer {sys.argv[3]}"} if len(sys.argv) > 3 else None
client = triton.InferenceServerClient(address)
prompt = "Once upon a time there was"
sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
seconds = 60


def passed(what):
    print(f"ok: {what}", flush=True)


def tensor(name, datatype, values):
    kinds = {"BYTES": object, "BOOL": bool, "INT32": numpy.int32, "FP32": numpy.float32}
    values = [value.encode() if isinstance(value, str) else value for value in values]
    made = triton.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(numpy.array(values, dtype=kinds[datatype]))
    return made


def texts(result, name="text_output"):
    array = result.as_numpy(name)
    return [] if array is None else [text.decode() for text in array.flatten()]


def infer(inputs, **options):
    options.setdefault("model_name", model)
    return client.infer(inputs=inputs, headers=headers, client_timeout=seconds, **options)


def refused(code, *inputs, **options):
    try:
        infer(list(inputs), **options)
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{code}", error
        return error.message()
    raise AssertionError(f"not refused with {code}")


def stream(requests):
    """Sends all requests and gives (result, error) pairs until each has had its last response."""
    came = queue.Queue()
    client.start_stream(callback=lambda result, error: came.put((result, error)), headers=headers)
    for identity, inputs, options in requests:
        client.async_stream_infer(model, inputs, request_id=identity, enable_empty_final_response=True, **options)
    ended, responses = 0, []
    while ended < len(requests):
        result, error = came.get(timeout=seconds)
        if error is not None:
            ended += 1
        elif result.get_response().parameters["triton_final_response"].bool_param:
            assert not result.get_response().outputs
            ended += 1
            continue
        responses.append((result, error))
    client.stop_stream()
    return responses


assert client.is_server_live(headers=headers) and client.is_server_ready(headers=headers)
assert client.is_model_ready(model, headers=headers) and client.is_model_ready(model, "1", headers=headers)
assert not client.is_model_ready("no-such-model", headers=headers)
passed("server and model are live and ready")

assert client.get_server_metadata(headers=headers).name
described = client.get_model_metadata(model, headers=headers, as_json=True)
assert [tensor_["name"] for tensor_ in described["inputs"]][0] == "text_input"
assert "text_output" in [tensor_["name"] for tensor_ in described["outputs"]]
configured = client.get_model_config(model, headers=headers).config
assert configured.name == model and configured.model_transaction_policy.decoupled
assert model in [known.name for known in client.get_model_repository_index(headers=headers).models]
passed("metadata, configuration and index")

prompted = tensor("text_input", "BYTES", [prompt])
answered = infer([prompted], parameters=sampling, request_id="first")
whole = texts(answered)[0]
assert whole and answered.get_response().id == "first" and answered.get_response().model_name == model
assert texts(answered, "finish_reason") == ["length"]
passed("an answer, parameters as parameters")

as_json = tensor("sampling_parameters", "BYTES", [json.dumps({name: str(value) for name, value in sampling.items()})])
assert texts(infer([prompted, as_json])) == [whole]
as_tensors = [
    tensor("max_tokens", "INT32", [12]), tensor("temperature", "FP32", [0]), tensor("stop_words", "BYTES", [""]),
]
assert texts(infer([prompted, *as_tensors], parameters={"ignore_eos": True})) == [whole]
passed("parameters as JSON and as tensors")

prefixed = infer([prompted, tensor("exclude_input_in_output", "BOOL", [False])], parameters=sampling)
assert texts(prefixed) == [prompt + whole]
counted = infer([prompted, tensor("return_num_output_tokens", "BOOL", [True])], parameters=sampling)
assert counted.as_numpy("num_output_tokens").tolist() == [12]
only = infer([prompted], parameters=sampling, outputs=[triton.InferRequestedOutput("text_output")])
assert [output.name for output in only.get_response().outputs] == ["text_output"]
passed("the prompt in the output, counts, chosen outputs")

several = texts(infer([tensor("text_input", "BYTES", [prompt, "Another one", prompt])], parameters=sampling))
assert len(several) == 3 and several[0] == several[2] == whole
passed("several prompts in one tensor")

streaming = [prompted, tensor("stream", "BOOL", [True])]
pieces = stream([("one", streaming, {"parameters": sampling})])
assert all(error is None and result.get_response().id == "one" for result, error in pieces)
assert "".join(texts(result)[0] for result, _ in pieces) == whole and len(pieces) > 1
assert texts(pieces[-1][0], "finish_reason") == ["length"]
passed(f"a streamed answer in {len(pieces)} pieces")

said = stream([(str(number), streaming, {"parameters": sampling}) for number in range(40)])
for number in range(40):
    own = [texts(result)[0] for result, _ in said if result.get_response().id == str(number)]
    assert "".join(own) == whole, (number, own)
passed("40 requests at once on one stream")

mixed = stream([
    ("bad", streaming, {"parameters": {"n": 2}}),
    ("good", streaming, {"parameters": sampling}),
])
errors = [error for _, error in mixed if error is not None]
assert len(errors) == 1 and "`n`" in errors[0].message(), errors
assert "".join(texts(result)[0] for result, error in mixed if error is None) == whole
passed("an error inside a stream ends only its request")

refused("NOT_FOUND", prompted, model_name="no-such-model")
assert "`text_input`" in refused("INVALID_ARGUMENT", tensor("text_input", "INT32", [1]))
assert "`temperature`" in refused("INVALID_ARGUMENT", prompted, tensor("temperature", "BYTES", ["warm"]))
assert "`nonsense`" in refused("INVALID_ARGUMENT", prompted, tensor("nonsense", "INT32", [1]))
assert "`stream`" in refused("INVALID_ARGUMENT", *streaming)
assert "`n`" in refused("INVALID_ARGUMENT", prompted, parameters={"n": 2})
refused("NOT_FOUND", prompted, model_version="7")
passed("errors by their codes, with the tensor's name")

long = {"max_tokens": 256, "ignore_eos": True}
refused("DEADLINE_EXCEEDED", prompted, parameters=long, timeout=1)
passed("a timeout of the request")

came = queue.Queue()
call = client.async_infer(model, [prompted], lambda result, error: came.put(error), parameters=long, headers=headers)
call.cancel()
assert came.get(timeout=seconds).status() == "StatusCode.CANCELLED"
assert texts(infer([prompted], parameters=sampling)) == [whole]
passed("a cancelled call, and the next one")

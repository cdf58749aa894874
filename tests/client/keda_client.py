"""Asks `kvasir control` as KEDA does, and carries out what it says as a HorizontalPodAutoscaler does.

    python3 tests/client/keda_client.py PATH_OF_KVASIR

Starts mock engines, a gateway and a control service of its own. Prints one line for each thing that works; the first that
does not ends it with a traceback. The protocol's messages are declared here from KEDA's published file
(`kedacore/keda` `pkg/scalers/externalscaler/externalscaler.proto`).
"""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

kvasir = sys.argv[1]
TOLERANCE = 0.1
children = []


def passed(what):
    print(f"ok: {what}", flush=True)


def messages():
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package="externalscaler", syntax="proto3")

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for number, (label, kind, field_name, of) in enumerate(fields, 1):
            made.field.add(name=field_name, number=number, label=label, type=kind, type_name=of)
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    ref = message("ScaledObjectRef", (one, field.TYPE_STRING, "name", None), (one, field.TYPE_STRING, "namespace", None))
    entry = ref.nested_type.add(name="ScalerMetadataEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=field.TYPE_STRING)
    of = ".externalscaler.ScaledObjectRef.ScalerMetadataEntry"
    ref.field.add(name="scalerMetadata", number=3, label=many, type=field.TYPE_MESSAGE, type_name=of)
    message("IsActiveResponse", (one, field.TYPE_BOOL, "result", None))
    message("MetricSpec", (one, field.TYPE_STRING, "metricName", None), (one, field.TYPE_INT64, "targetSize", None),
            (one, field.TYPE_DOUBLE, "targetSizeFloat", None))
    message("GetMetricSpecResponse", (many, field.TYPE_MESSAGE, "metricSpecs", ".externalscaler.MetricSpec"))
    message("GetMetricsRequest", (one, field.TYPE_MESSAGE, "scaledObjectRef", ".externalscaler.ScaledObjectRef"),
            (one, field.TYPE_STRING, "metricName", None))
    message("MetricValue", (one, field.TYPE_STRING, "metricName", None), (one, field.TYPE_INT64, "metricValue", None),
            (one, field.TYPE_DOUBLE, "metricValueFloat", None))
    message("GetMetricsResponse", (many, field.TYPE_MESSAGE, "metricValues", ".externalscaler.MetricValue"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {made.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{made.name}"))
            for made in file.message_type}


kinds = messages()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments):
    child = subprocess.Popen([kvasir, *arguments], stdout=subprocess.DEVNULL)
    children.append(child)
    return child


def end(child):
    child.send_signal(signal.SIGKILL)
    child.wait()


def get(address, path):
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def post(address, path, body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def wait_for(what, done, seconds=60):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def workers(gateway):
    status, body = get(gateway, "/kvasir/workers")
    told = json.loads(body)["workers"] if status == 200 else []
    return [worker["name"] for worker in told if worker["state"] == "ready"]


class Scaler:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)

    def method(self, name, request, answer, stream=False):
        make = self.channel.unary_stream if stream else self.channel.unary_unary
        return make(f"/externalscaler.ExternalScaler/{name}", request_serializer=kinds[request].SerializeToString,
                    response_deserializer=kinds[answer].FromString)

    def ref(self, **metadata):
        return kinds["ScaledObjectRef"](name="decode", namespace="llm", scalerMetadata=metadata)

    def value(self, **metadata):
        request = kinds["GetMetricsRequest"](scaledObjectRef=self.ref(**metadata), metricName="kvasir-workers")
        answer = self.method("GetMetrics", "GetMetricsRequest", "GetMetricsResponse")(request, timeout=5)
        return answer.metricValues[0].metricValueFloat


def is_told(scaler):
    try:
        scaler.value(pool="both")
        return True
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE, error
        return False


def autoscaler(replicas, value):
    """replica_calculator.go, GetExternalPerPodMetricReplicas, target 1."""
    ratio = value / replicas
    return replicas if 1.0 - TOLERANCE <= ratio <= 1.0 + TOLERANCE else math.ceil(value)


def control(folder, gateway, least):
    keda, listen = free_port(), free_port()
    path = os.path.join(folder, f"control-{least}.toml")
    with open(path, "w") as file:
        file.write(f"""
[planner]
mode = "act"
actuator = "keda"
interval = "200ms"
start_time = "1s"
down_after = "1s"
gpus_max = 1000
decode_min = {least}
decode_max = 1000
[control]
listen = "127.0.0.1:{listen}"
keda_listen = "127.0.0.1:{keda}"
""")
    return start("control", "--gateway", gateway, "--config", path), f"127.0.0.1:{keda}", f"127.0.0.1:{listen}"


def main(folder):
    gateway, engines = f"127.0.0.1:{free_port()}", 34
    # Ports that follow each other, below those that the system gives out itself; some may be in use.
    for _ in range(20):
        first = random.randrange(20_000, 30_000)
        mock = start("mock", "--workers", str(engines), "--listen", f"127.0.0.1:{first}")
        wait_for("the engines", lambda: mock.poll() is not None or get(f"127.0.0.1:{first + engines - 1}", "/health")[0] == 200)
        if mock.poll() is None:
            break
    assert mock.poll() is None, "no ports for the engines"
    start("gateway", "--listen", gateway, "--worker", f"http://127.0.0.1:{first}")
    wait_for("the first worker", lambda: len(workers(gateway)) == 1)

    def scale(count):
        for number in range(len(workers(gateway)), count):
            post(gateway, "/kvasir/workers", {"url": f"http://127.0.0.1:{first + number}"})
        wait_for(f"{count} workers", lambda: len(workers(gateway)) == count)

    for replicas in (3, 10, 30):
        scale(replicas)
        child, address, report = control(folder, gateway, replicas + 1)
        wait_for("a decision", lambda: get(report, "/readyz")[0] == 200)
        scaler = Scaler(address)
        wait_for("the planner to count them", lambda: json.loads(get(report, "/kvasir/plan")[1])["pools"][0]["ready"] == replicas)
        # Workers that are starting are not seen yet: a control service that has just started tells nothing for `start_time`.
        wait_for("it to tell counts", lambda: is_told(scaler))
        value = scaler.value(pool="both")
        asked = autoscaler(replicas, value)
        assert asked >= replicas + 1, f"{replicas} workers stay {asked} with {value}"
        exact = scaler.value(pool="both", tolerance="0")
        assert exact == replicas + 1, exact
        scale(asked)
        wait_for("nothing more to be wanted", lambda: autoscaler(asked, scaler.value(pool="both")) == asked)
        passed(f"{replicas} workers, {replicas + 1} wanted: the autoscaler sets {asked}; {int(exact)} with a tolerance of 0")
        if replicas < 30:
            end(child)
    spec = scaler.method("GetMetricSpec", "ScaledObjectRef", "GetMetricSpecResponse")(scaler.ref(pool="both"), timeout=5)
    assert (spec.metricSpecs[0].metricName, spec.metricSpecs[0].targetSizeFloat) == ("kvasir-workers", 1.0), spec
    is_active = scaler.method("IsActive", "ScaledObjectRef", "IsActiveResponse")
    assert is_active(scaler.ref(pool="both"), timeout=5).result
    passed("the metric's target is one a replica, and the pool is active")
    for metadata, code in (({"pool": "prefill"}, grpc.StatusCode.NOT_FOUND), ({}, grpc.StatusCode.INVALID_ARGUMENT),
                           ({"pool": "both", "tolerance": "many"}, grpc.StatusCode.INVALID_ARGUMENT)):
        try:
            scaler.value(**metadata)
            raise AssertionError(f"{metadata} was answered")
        except grpc.RpcError as error:
            assert error.code() == code, error
    passed("triggers without a pool, of an unknown pool, with a wrong tolerance are refused")
    lags = []
    for _ in range(5):
        subscribe = scaler.method("StreamIsActive", "ScaledObjectRef", "IsActiveResponse", stream=True)
        began = time.monotonic()
        pushed = subscribe(scaler.ref(pool="both"), timeout=5)
        assert next(pushed).result
        lags.append(time.monotonic() - began)
        pushed.cancel()
    lag = sorted(lags)[2]
    assert lag < 0.1, f"{lags} s"
    passed(f"whether the pool is active is pushed {1000 * lag:.1f} ms after it was asked for")


with tempfile.TemporaryDirectory() as folder:
    try:
        main(folder)
    finally:
        for child in children:
            if child.poll() is None:
                end(child)

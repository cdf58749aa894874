"""What the checks against real engines share: asking for a chat, metrics, made-up prompts, starting servers."""

import dataclasses
import http.client
import json
import os
import pathlib
import signal
import subprocess
import time
import urllib.parse
import urllib.request

from judge import TOP

LAB = pathlib.Path(os.environ.get("LAB") or os.path.join(os.environ.get("TMPDIR", "/tmp"), "kvasir-engines"))
SPINNING_SECONDS = 1.5  # vLLM's worker processes spin for a second after each step
WORDS = """import return yield class self value index while break raise except finally lambda assert async await
global with open file read write close path name list dict tuple range print format join split strip lower upper
count sort key item update copy error warning logger handler thread queue lock event timer socket server client
request response header body method status message parser token buffer stream encode decode bytes string number
float integer boolean none true false module package version system process memory cache block page frame""".split()


@dataclasses.dataclass
class Answer:
    """What came back for one chat, whole or streamed."""

    status: int = 0
    headers: dict = dataclasses.field(default_factory=dict)
    text: str = ""
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    tops: list = dataclasses.field(default_factory=list)  # for each token the likeliest in its place
    usage: dict = dataclasses.field(default_factory=dict)
    body: dict = dataclasses.field(default_factory=dict)
    error: str = ""  # what the server said was wrong, in the form that the API has for it
    broken: str = ""  # how the answer ended before its end, if it did
    first: float = 0.0  # seconds to the first text of a stream
    seconds: float = 0.0

    def take(self, choices, part):
        for choice in choices:
            self.text += choice[part].get("content") or ""
            for token in (choice.get("logprobs") or {}).get("content") or []:
                self.tokens.append(token["token"])
                self.logprobs.append(token["logprob"])
                # Tokens that are no whole characters look alike: the likeliest of them stands for all.
                tops = sorted((one["logprob"], one["token"]) for one in token.get("top_logprobs") or [])
                self.tops.append({name: logprob for logprob, name in tops})

    @property
    def cached(self):
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def chat(url, body, timeout=120, headers=None):
    """Posts a chat; never raises for what the other side does."""
    answer, started = Answer(), time.monotonic()
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"} | (headers or {})
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.getheaders()}
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            read_stream(response, answer, started)
        else:
            answer.body = json.loads(response.read())
            answer.take(answer.body.get("choices") or [], "message")
            answer.usage = answer.body.get("usage") or {}
            answer.error = (answer.body.get("error") or {}).get("message") or ""
    except (OSError, http.client.HTTPException, ValueError) as problem:
        answer.broken = repr(problem)
    finally:
        connection.close()
    answer.seconds = time.monotonic() - started
    return answer


def read_stream(response, answer, started):
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return
        event = json.loads(line[6:])
        answer.error = (event.get("error") or {}).get("message") or answer.error
        answer.take(event.get("choices") or [], "delta")
        answer.usage = event.get("usage") or answer.usage
        if answer.text and not answer.first:
            answer.first = time.monotonic() - started
    # An error event may be the last; otherwise the stream should have said that it is done.
    answer.broken = "" if answer.error else "the stream ended without [DONE]"


def get(url, path, timeout=10):
    with urllib.request.urlopen(url + path, timeout=timeout) as response:
        return response.read().decode()


def post(url, path, body, timeout=10):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.loads(response.read() or b"null")


def metric(url, name):
    """The sum of a metric over its labels."""
    lines = get(url, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def words(chance, count):
    return " ".join(chance.choice(WORDS) for _ in range(count))


def start(port, core, part, *options, environment=None):
    """Starts a server as serve.sh does and returns at once; `options` are more of vLLM's, `environment` more variables."""
    script = pathlib.Path(__file__).with_name("serve.sh")
    with open(LAB / f"{port}.log", "ab") as log:
        command = [script, str(port), str(core), part, *options]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                         env=os.environ | (environment or {}))


def kill(port):
    """Ends a server with all its processes, as a machine that fails would, and waits until they are gone."""
    group = int((LAB / f"{port}.pid").read_text())
    os.killpg(group, signal.SIGKILL)
    wait(f"the end of the server on {port}", lambda: not running(group), 30)


def wait_for_idle_workers():
    """Waits until vLLM's worker processes have stopped spinning: on few cores they slow the next request down."""
    time.sleep(SPINNING_SECONDS)


def running(group):
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = file.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def wait(what, ready, seconds):
    """Waits until `ready()` is true, with a line now and then."""
    started = said = time.monotonic()
    while True:
        try:
            if ready():
                return time.monotonic() - started
        except (OSError, http.client.HTTPException, ValueError):
            pass
        now = time.monotonic()
        if now - started > seconds:
            raise SystemExit(f"{what}: not within {seconds} s")
        if now - said > 20:
            print(f"  waiting for {what}, {now - started:.0f} s", flush=True)
            said = now
        time.sleep(0.2)


def warm_up(url):
    """A server compiles a kernel at the first log-probabilities it is asked for, which takes 10 s."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "warm up"}], "max_tokens": 1, "logprobs": True,
            "top_logprobs": TOP}
    answer = chat(url, body)
    if answer.status != 200:
        raise SystemExit(f"{url} does not answer: {answer}")

"""The gateway's own page in a real browser: does it show what the gateway says?

    page_test.py http://127.0.0.1:8000 [--key ADMINISTRATOR_KEY] [--screenshot page.png]
    page_test.py --stub [--page FOLDER] [--screenshot page.png]

Needs selenium 4, Chromium and chromedriver. Against a gateway it sends chat completions and compares what the page
shows with `/kvasir/status` and `/kvasir/decisions`; nobody else may use the gateway meanwhile. With --stub the page's
files come from a folder, and a made-up gateway (page_stub.py) shows what a real one does not: hostile names, missing
fields, hundreds of workers, a gateway that refuses, goes and comes back. The first check that fails ends it.
"""

import argparse
import base64
import contextlib
import json
import pathlib
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

from selenium import webdriver
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
NONE, SPACE = "–", "\u202f"
COUNTERS = "requests failed shed migrations prompt_tokens cached_tokens generated_tokens".split()
CONTRAST = """
const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (colour) => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); return [...paint.getImageData(0, 0, 1, 1).data]; };
const light = (colour) => { const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; } return [255, 255, 255]; };
const bad = [];
for (const e of document.querySelectorAll("body *")) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
  const style = getComputedStyle(e);
  const [a, b] = [light(rgb(e instanceof SVGElement ? style.fill : style.color)), light(ground(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.push(`${e.tagName}.${e.getAttribute("class")} ${ratio.toFixed(2)} ${e.textContent.slice(0, 20)}`);
}
return bad;
"""
WATCH_SHIFTS = """
window.shifts = 0;
new PerformanceObserver((all) => all.getEntries().forEach((e) => { window.shifts += e.value; })).observe({ type: "layout-shift" });
"""


def passed(what):
    print(f"ok: {what}", flush=True)


class Gateway:
    def __init__(self, url, key=None):
        self.url, self.key = url.rstrip("/"), key

    def ask(self, path, body=None):
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, body and json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers, answer.read().decode()

    def status(self):
        return json.loads(self.ask("/kvasir/status")[1])

    def decisions(self):
        return json.loads(self.ask("/kvasir/decisions")[1])

    def chat(self, conversations=4, turns=5):
        """Conversations that grow, so that each turn's prompt begins as the last one did; returns the requests sent."""
        model = json.loads(self.ask("/v1/models")[1])["data"][0]["id"]
        talks = [[{"role": "system", "content": f"Speaker {number}. " + f"Word{number} counts. " * 40}] for number in range(conversations)]
        for turn in range(turns):
            for number, talk in enumerate(talks):
                talk.append({"role": "user", "content": f"Say {turn}, " + f"please{turn} " * 25})
                body = {"model": model, "messages": talk, "max_tokens": 12}
                is_stream = (turn + number) % 2 == 0
                _, text = self.ask("/v1/chat/completions", body | ({"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}))
                assert text.rstrip().endswith("data: [DONE]") if is_stream else json.loads(text)["choices"], text[-200:]
                talk.append({"role": "assistant", "content": "So it is."})
        return conversations * turns


class Page:
    def __init__(self, size=(1280, 900), given=None):
        options = webdriver.ChromeOptions()
        options.binary_location = given.browser
        for flag in [*FLAGS.split(), f"--user-data-dir={tempfile.mkdtemp()}", f"--window-size={size[0]},{size[1]}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(given.driver))
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, url):
        self.origin = "{0.scheme}://{0.netloc}".format(urllib.parse.urlsplit(url))
        # What the browser's own first page loaded is none of ours.
        self.driver.get("about:blank")
        self.driver.get_log("performance")
        self.driver.get(url + "/kvasir/")

    def js(self, script, *given):
        return self.driver.execute_script(script, *given)

    def find(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def text(self, css):
        return self.js("return document.querySelector(arguments[0]).textContent", css)

    def rows(self, table):
        """The cells of a table, each as the list of its lines."""
        script = """return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map((row) => [...row.children].map(
            (cell) => cell.childElementCount ? [...cell.children].filter((e) => !e.matches('.bar')).map((e) => e.textContent) : [cell.textContent]))"""
        return self.js(script, table)

    def until(self, what, condition, within=12):
        """Waits for a condition; the page may be a second behind."""
        end = time.monotonic() + within
        while True:
            try:
                found = condition()
            except AssertionError as error:
                found, last = None, error
            else:
                last = found
            if found:
                return found
            assert time.monotonic() < end, f"{what}: {last}"
            time.sleep(0.2)

    def state(self, *wanted):
        self.until(f"state {wanted}", lambda: (self.text("#state-text") in wanted) or None)

    def media(self, scheme):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def is_clean(self, refusals=False):
        """No error on the console but the refused polls that a case is about, and nothing from elsewhere."""
        logged = [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        if refusals:
            logged = [entry for entry in logged if not (entry["source"] == "network" and "/kvasir/" in entry["message"])]
        assert not logged, logged
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                assert url.startswith((self.origin + "/kvasir/", "data:")), f"loaded {url}"

    def close(self):
        self.driver.quit()


# What the page should say, by its own rules.


def three(value):
    return f"{round(value):,}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def count(value):
    if value is None:
        return NONE
    if value < 100_000:
        return f"{value:,}"
    value, units = value / 1000, ["k", "M", "G", "T"]
    while value >= 999.5:
        value, units = value / 1000, units[1:]
    return three(value) + SPACE + units[0]


def percent(part, whole):
    return f"{part / whole * 100:.1f}{SPACE}%" if whole else NONE


def seconds(shown):
    """A time that is shown, back as a number."""
    found = re.fullmatch(r"([\d.,]+)\u202f(µs|ms|s)", shown)
    assert found, shown
    return float(found[1].replace(",", "")) * {"µs": 1e-6, "ms": 1e-3, "s": 1}[found[2]]


def quantile(histogram, share):
    """Linear within its bucket; `None` above the last bound."""
    rank, below = share * sum(histogram["counts"]), 0
    for index, each in enumerate(histogram["counts"]):
        if each and below + each >= rank:
            if index == len(histogram["le"]):
                return None
            low = histogram["le"][index - 1] if index else 0
            return low + (histogram["le"][index] - low) * (rank - below) / each
        below += each
    raise AssertionError("an empty histogram has no quantile")


def state_of(worker):
    return "○ Not ready" if not worker["ready"] else "▲ Out" if worker.get("is_out") else "● Ready"


# The checks against any gateway.


def keyed(page, gateway):
    """A closed gateway: the form, a wrong key, the right one; where the key is kept."""
    page.state("Key needed")
    page.until("the form is open", lambda: page.js("return document.querySelector('#gate').open && document.activeElement.id === 'key'"))
    page.find("#key").send_keys("sk-wrong-key\n")
    page.until("a wrong key is told", lambda: "does not know" in page.text("#gate-problem"))
    assert page.find("#gate-problem").is_displayed()
    page.find("#key").clear()
    page.find("#key").send_keys(gateway.key + "\n")
    page.state("Live")
    assert not page.js("return document.querySelector('#gate').open")
    kept = page.js("return [Object.values(sessionStorage), localStorage.length, document.cookie, location.href]")
    assert kept == [[gateway.key], 0, "", page.origin + "/kvasir/"], kept
    page.driver.refresh()
    page.state("Live")
    assert not page.js("return document.querySelector('#gate').open")
    passed("a closed gateway asks for a key, says that one is wrong, and keeps the right one for the tab alone")


def counted(page, gateway):
    """Sends requests and waits until the page shows what the gateway then counts; returns status before and after."""
    page.until("a first status", lambda: page.text("#tile-requests .value") != NONE)
    before = gateway.status()
    assert before["active"] == 0, "somebody else uses this gateway"
    begun = time.monotonic()
    sent = gateway.chat()

    def settled():
        status = gateway.status()
        time.sleep(0.3)
        return status if status["active"] == 0 and all(status[name] == gateway.status()[name] for name in COUNTERS) else None

    status = page.until("the gateway is quiet", settled, 30)
    assert status["requests"] == before["requests"] + sent, (before["requests"], sent, status["requests"])
    assert status["cached_tokens"] > before["cached_tokens"], "no prompt was found in a cache: send to engines that report cached tokens"
    expected = {
        "#tile-requests .below": f"{count(status['requests'])} since start",
        "#tile-tokens .below": f"{count(status['generated_tokens'])} since start",
        "#tile-hits .below": f"{percent(status['cached_tokens'], status['prompt_tokens'])} since start",
        "#tile-active .value": "0",
        "#tile-waiting .value": count(status["waiting"]),
        "#tile-failed .value": count(status["failed"]),
        "#tile-shed .value": count(status["shed"]),
        "#tile-migrations .value": count(status["migrations"]),
        "#fact-prompt-tokens": count(status["prompt_tokens"]),
        "#fact-cached-tokens": count(status["cached_tokens"]),
        "#fact-disaggregated": count(status["disaggregated"]),
        "#fact-index-blocks": count(status["index"]["blocks"]),
        "#model": status["model"],
        "#version": status["version"],
        "#strategy": status["strategy"],
    }
    if time.monotonic() - begun < 50:
        gained = [status[name] - before[name] for name in ("cached_tokens", "prompt_tokens")]
        expected["#tile-hits .value"] = percent(*gained)
    same_as(page, expected)
    assert page.text("#uptime") != NONE
    passed(f"{sent} requests sent: tiles and facts are what the status says, hit rate {page.text('#tile-hits .value')} in the last minute")
    return before, status


def same_as(page, expected):
    def same():
        shown = {css: page.text(css) for css in expected}
        differ = {css: (shown[css], value) for css, value in expected.items() if shown[css] != value}
        assert not differ, f"shown and expected differ: {differ}"
        return True

    page.until("the page shows the status", same)


def charted(page):
    script = """return [...document.querySelectorAll('.chart .curve')].map((path) => path.getAttribute('d').split(/[ML]/)
        .filter(Boolean).map((point) => point.trim().split(' ').map(Number)))"""

    def drawn():
        curves = page.js(script)
        assert len(curves) == 3
        for curve in curves[:2]:
            heights = [y for _, y in curve]
            assert len(curve) >= 3 and max(heights) - min(heights) > 10, f"a chart is flat: {curve}"
            assert [x for x, _ in curve] == sorted(x for x, _ in curve)
        assert curves[2], "there is no hit rate"
        return True

    page.until("charts", drawn)
    shown = page.until("a rate", lambda: page.text("#chart-requests .reading"))
    assert shown == page.text("#tile-requests .value"), shown
    page.js("""const svg = document.querySelector('#chart-requests svg'), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 8, clientY: box.top + 30 }))""")
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", when) for when in page.js("return [...document.querySelectorAll('.chart .when')].map((e) => e.textContent)"))
    page.js("document.querySelector('#chart-requests svg').dispatchEvent(new PointerEvent('pointerleave'))")
    passed("charts of requests, tokens and hit rate are drawn, and pointing at one reads all three")


def measured(page, before, status):
    """Both periods of the histograms: counts, bars, quantiles."""
    bars = "return [...document.querySelectorAll(`#histogram-${arguments[0]} .column`)].map((c) => [Number(c.dataset.count), Number(c.getAttribute('height'))])"
    for period in ("start", "minute"):
        page.js("document.querySelector(`input[name=period][value=${arguments[0]}]`).click()", period)
        for name, after in status["histograms"].items():
            earlier = before["histograms"][name]["counts"] if period == "minute" else [0] * len(after["counts"])
            counts = [new - old for new, old in zip(after["counts"], earlier)]
            drawn = page.js(bars, name)
            assert [each for each, _ in drawn] == counts, (period, name, drawn, counts)
            assert sum(counts) > 0 and page.text(f"#histogram-{name} .reading") == count(sum(counts)), (period, name, counts)
            tallest = max(height for _, height in drawn)
            for each, height in drawn:
                wanted = max(2, each / max(counts) * tallest) if each else 0
                assert abs(height - wanted) < 0.1, (name, each, height, wanted)
            assert tallest > 80, f"{name}: bars of {tallest} px"
            for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                wanted, shown = quantile({"le": after["le"], "counts": counts}, share), page.text(f"#histogram-{name} .{label}")
                if wanted is None:
                    assert shown.startswith(">"), shown
                else:
                    assert abs(seconds(shown) - wanted) <= wanted * 0.01, (name, label, shown, wanted)
            marks = page.js("return [...document.querySelectorAll(`#histogram-${arguments[0]} .mark-name`)].map((e) => e.textContent)", name)
            assert marks == ["p50", "p90", "p99"], marks
    first = status["histograms"]["time_to_first_token"]
    passed(f"histograms of {', '.join(status['histograms'])}: bars, counts ({sum(first['counts'])} first tokens) and quantiles, in both periods")


def listed(page, gateway):
    def same():
        status = gateway.status()
        rows = {row[0][0]: row for row in page.rows("workers")}
        assert set(rows) == {worker["name"] for worker in status["workers"]} and len(rows) == len(status["workers"]), rows
        for worker in status["workers"]:
            name, state, role, requests, _, kv, events, _, ejections, predicted = rows[worker["name"]]
            assert state == [state_of(worker)], (state, worker)
            if worker["ready"]:
                usage = worker["kv_usage"]
                compared, exact = worker["predictions"]["requests"], worker["predictions"]["exact"]
                predicted_text = NONE if not compared else f"100{SPACE}%" if compared == exact else percent(min(exact / compared, 0.9994), 1)
                wanted = [worker["engine"], [worker["role"]], count(worker["requests"]), NONE if usage is None else percent(usage, 1), count(worker["ejections"]), predicted_text]
                shown = [name[1].split(" ")[0], role, requests[0], kv[0], ejections[0], predicted[0]]
                assert shown == wanted, (shown, wanted)
                assert events == ["exact" if worker["events"] else "approximate"], events
        pooled = {row[0][0]: row for row in page.rows("pools")}
        tiers = [head.lower() for head in page.js("return [...document.querySelectorAll('#pools th')].map((e) => e.textContent)")][1:]
        for worker in status["workers"]:
            for pool in worker.get("pools", []):
                shown = pooled[worker["name"]][1 + tiers.index(pool["tier"])][0]
                size = f" of {count(pool['blocks'])}" if pool["blocks"] is not None else " · size unknown"
                assert shown == count(pool["indexed"]) + size, (worker["name"], shown, pool)
        return status

    status = page.until("workers and pools are as the status says", same)
    names = [row[0][0] for row in page.rows("workers")]
    word = names[0]
    page.find("#filter").send_keys(word)
    shown = page.until("the filter works", lambda: [row[0][0] for row in page.rows("workers")])
    assert shown and all(word in name for name in shown), shown
    page.find("#filter").clear()
    page.find("#filter").send_keys("no such worker")
    page.until("nothing matches", lambda: page.rows("workers") == [[["No worker matches the filter."]]] or None)
    page.find("#filter").clear()
    page.find("#filter").send_keys(" ")
    page.until("all again", lambda: len(page.rows("workers")) == len(names))
    assert [row[0][0] for row in page.rows("workers")] == names
    passed(f"{len(status['workers'])} workers and their pools are as the status says; the filter works")


def handed_over(page, gateway):
    workers = [worker for worker in gateway.status()["workers"] if worker.get("transfers")]
    hidden = page.js("return document.querySelector('#transfers-section').hidden")
    assert hidden == (not workers), (hidden, len(workers))
    if not workers:
        return passed("no worker hands blocks over: nothing is shown of it")

    def same():
        rows = page.rows("transfers")
        transfers = [worker["transfers"] for worker in workers]
        assert len(rows) == sum(1 + len(each["rails"]) for each in transfers), rows
        shown = {row[0][0]: row for row in rows if len(row[0]) == 2}
        for worker, each in zip(workers, transfers):
            counted = [each[name] for name in ("blocks_received", "completed", "incomplete", "cancelled", "leases_expired", "checksum_failures", "peers_lost")]
            assert [cell[0] for cell in shown[worker["name"]][2:9]] == [count(value) for value in counted], (shown[worker["name"]], each)
        slow = sum(rail["is_slow"] for each in transfers for rail in each["rails"])
        assert sum(row[0][0].startswith("▲") for row in rows) == slow, rows
        names = [name for each in transfers for name in (stage["stage"] for stage in each["stages"])]
        assert {row[0][0] for row in page.rows("stages")} == {name.replace("_", " ") for name in names}, page.rows("stages")
        return len(rows)

    rows = page.until("hand-offs are as the status says", same)
    passed(f"{rows} rows of hand-offs are as the status says, slow transports marked")


def planned(page, gateway):
    plan = gateway.status().get("plan")
    hidden = page.js("return document.querySelector('#scaling-section').hidden")
    if plan is None:
        assert hidden, "a section without a plan"
        passed("no plan, no section about scaling")
        return

    def same():
        rows = page.rows("scaling")
        assert not page.js("return document.querySelector('#scaling-section').hidden")
        assert len(rows) == len(plan["pools"]), rows
        for row, pool in zip(rows, plan["pools"]):
            assert [row[0], row[1], row[5]] == [[pool["pool"]], [str(pool["wanted"])], [pool["text"]]], (row, pool)
            assert row[2][0].startswith(f"{pool['ready']} ready"), row
        changes = page.js("return [...document.querySelectorAll('#scaling-changes li')].map((e) => e.textContent)")
        assert len(changes) == min(5, len(plan["changes"])), changes
        for change, text in zip(reversed(plan["changes"]), changes):
            assert f"{change['from']} → {change['to']}: {change['text']}" in text, (change, text)
        dots = page.js("return document.querySelectorAll('#scaling-trials circle').length")
        assert dots == sum(len(pool["trials"]) for pool in plan["pools"]), dots
        return rows

    page.until("the plan is as the status says", same)
    passed(f"the plan of {len(plan['pools'])} role(s) is shown, with its reasons and changes")


def decided(page, gateway):
    said = gateway.decisions()
    assert said["decisions"], "the gateway tells no decision"
    newest = said["decisions"][::-1][:50]

    def same():
        rows = page.rows("decisions")
        assert [row[0][1] for row in rows] == [f"#{one['sequence']}" for one in newest], [row[0] for row in rows[:3]]
        return rows

    for row, one in zip(page.until("the newest decisions", same), newest):
        time_cell, worker, held, prompt, uncached, predicted, _, reason = row
        assert re.fullmatch(r"\d\d:\d\d:\d\d", time_cell[0]) and worker[0] == one["worker"], row
        assert held[0] == f"{one['overlap_blocks']:,} of {one['blocks']:,} blocks", (held, one)
        assert [prompt[0], uncached[0]] == [count(one["prompt_tokens"]), count(one["uncached_tokens"])], (row, one)
        assert one["reason"] and reason == [one["reason"]], (reason, one)
        assert one["predicted_ms"] is None or abs(seconds(predicted[0]) * 1000 - one["predicted_ms"]) <= one["predicted_ms"] * 0.01 + 0.001, (predicted, one)
    page.find("#pause").click()
    gateway.chat(1, 1)
    page.until("the page hears of a decision while paused", lambda: "paused; 1 since" in page.text("#decisions-note"))
    assert page.rows("decisions")[0][0][1] == f"#{newest[0]['sequence']}"
    page.find("#pause").click()
    page.until("the decision that came meanwhile", lambda: page.rows("decisions")[0][0][1] == f"#{said['last'] + 1}")
    passed(f"{len(newest)} decisions with their reasons, newest first; they wait while paused")


def looked_at(page, screenshot):
    page.js("scrollTo(0, 0)")
    page.js(WATCH_SHIFTS)
    time.sleep(4)
    shifts = page.js("return window.shifts")
    assert shifts < 0.01, f"things move while numbers change: {shifts}"
    unlabelled = page.js("return [...document.querySelectorAll('input')].filter((e) => !e.labels.length || !e.labels[0].textContent.trim()).map((e) => e.id)")
    assert not unlabelled, unlabelled
    for scheme in ("dark", "light"):
        page.media(scheme)
        time.sleep(0.3)
        poor = page.js(CONTRAST)
        assert not poor, f"{scheme}: too little contrast: {poor[:5]}"
    if screenshot:
        height = page.js("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
        taken = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        pathlib.Path(screenshot).write_bytes(base64.b64decode(taken["data"]))
    passed("nothing moves, every field has a label, and text has contrast in light and dark")


def check(gateway, given):
    headers, _ = gateway.ask("/kvasir/")
    policy = headers.get("content-security-policy", "")
    assert "'self'" in policy and "unsafe" not in policy and "*" not in policy, f"Content-Security-Policy: {policy!r}"
    # So that what happened before the page was opened differs from what happens while it is.
    gateway.chat(1, 3)
    with contextlib.closing(Page(given=given)) as page:
        page.open(gateway.url)
        if gateway.key:
            keyed(page, gateway)
        page.state("Live")
        before, status = counted(page, gateway)
        charted(page)
        measured(page, before, status)
        listed(page, gateway)
        planned(page, gateway)
        handed_over(page, gateway)
        decided(page, gateway)
        looked_at(page, given.screenshot)
        page.is_clean(refusals=gateway.key is not None)
        passed("no error on the console, nothing loaded from elsewhere")
    with contextlib.closing(Page((400, 800), given)) as page:
        page.open(gateway.url)
        if gateway.key:
            page.state("Key needed")
            page.find("#key").send_keys(gateway.key + "\n")
        page.state("Live")
        page.until("rows", lambda: page.rows("workers"))
        assert page.js("return document.documentElement.scrollWidth") <= 400, "it is wider than a narrow window"
        shown = page.js("return [...document.querySelectorAll('#workers tbody tr')][0].getBoundingClientRect().width")
        assert 300 < shown <= 400, shown
        passed("a window of 400 px shows it without scrolling sideways")


# The checks against a made-up gateway.


def stubbed(given):
    from page_stub import HOSTILE, Stub

    folder = given.page
    for key in (None, "sk-administrator"):
        stub = Stub(folder, key=key).start()
        check(Gateway(stub.url, key), given)
        stub.stop()
        given.screenshot = None

    stub = Stub(folder, workers=2, load=20, hostile=True).start()
    with contextlib.closing(Page(given=given)) as page:
        page.open(stub.url)
        page.until("the hostile worker", lambda: HOSTILE in [row[0][0] for row in page.rows("workers")])
        page.until("its decisions", lambda: HOSTILE in [row[1][0] for row in page.rows("decisions")])
        page.find("#filter").send_keys("window.hacked")
        page.until("it is found", lambda: len(page.rows("workers")) == 1)
        page.find("#filter").clear()
        page.find("#filter").send_keys(" ")
        names = {row[0][0] for row in page.rows("workers")}
        assert {"__proto__", "constructor", "(unnamed)"} <= names, names
        elements = "return [window.hacked, document.scripts.length, document.querySelectorAll('img, iframe, [onerror]').length]"
        assert page.js(elements) == [None, 1, 0], page.js(elements)
        page.is_clean()
        passed("hostile names are text: no script runs, no element is made")
    stub.stop()

    stub = Stub(folder, workers=3, sparse=True).start()
    with contextlib.closing(Page(given=given)) as page:
        page.open(stub.url)
        page.state("Live")
        page.until("its workers", lambda: len(page.rows("workers")) == 3)
        assert page.text("#tile-failed .value") == NONE and page.text("#tile-hits .value") == NONE and page.text("#model") == NONE
        assert page.js("return document.body.textContent.match(/NaN|undefined|null|Infinity/)") is None
        assert page.rows("decisions") == [[["This gateway does not tell its decisions."]]]
        page.is_clean(refusals=True)
        passed("fields that are missing or broken show as a dash")
    stub.stop()

    stub = Stub(folder, workers=600, load=50).start()
    with contextlib.closing(Page(given=given)) as page:
        page.open(stub.url)
        page.until("600 workers", lambda: len(page.rows("workers")) == 600)
        names = [row[0][0] for row in page.rows("workers")]
        assert names == sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]), "not sorted"
        before = page.text("#tile-requests .below")
        page.js("document.querySelector('#workers-scroll').scrollTop = 1e6")
        page.until("it still counts", lambda: page.text("#tile-requests .below") != before)
        page.find("#filter").send_keys("out")
        page.until("12 are out", lambda: {row[1][0] for row in page.rows("workers")} == {"▲ Out"} and len(page.rows("workers")) == 12, 5)
        page.is_clean()
        passed("600 workers: sorted, filtered by state, and the page stays awake")
    stub.stop()

    stub = Stub(folder, key="sk-administrator").start()
    with contextlib.closing(Page(given=given)) as page:
        page.open(stub.url)
        page.state("Key needed")
        page.until("the form", lambda: page.find("#key").is_displayed())
        page.find("#key").send_keys("user\n")
        page.until("a key of no administrator", lambda: "not an administrator" in page.text("#gate-problem"))
        page.find("#gate-close").click()
        page.until("the notice", lambda: page.find("#notice-act").is_displayed() and page.text("#notice-act") == "Enter the key")
        page.find("#notice-act").click()
        page.find("#key").send_keys("sk-administrator\n")
        page.state("Live")
        page.find("#forget").click()
        page.state("Key needed")
        assert page.js("return sessionStorage.length") == 0
        page.is_clean(refusals=True)
        passed("a key that is no administrator's is told so; a key can be forgotten")
    stub.stop()

    stub = Stub(folder, load=20).start()
    with contextlib.closing(Page(given=given)) as page:
        page.open(stub.url)
        page.until("numbers", lambda: page.text("#tile-tokens .value") not in (NONE, "0"))
        port = stub.server_address[1]
        stub.is_broken = True
        page.state("Error")
        assert "503" in page.text("#notice-text")
        stub.is_broken = False
        page.state("Live")
        stub.delay = 4.5
        page.state("Stale")
        stub.delay = 0.0
        page.state("Live")
        stub.stop()
        page.state("Unreachable", "Stale")
        kept = [page.text("#tile-requests .below"), len(page.rows("workers")), len(page.rows("decisions"))]
        assert kept[0] != "" and kept[1] == 6 and kept[2] > 10, kept
        assert page.find("#notice").is_displayed() and "does not answer" in page.text("#notice-text")
        assert page.driver.title.startswith("(unreachable)") and page.find("#state-sign").text == "✕"
        time.sleep(3)
        assert kept == [page.text("#tile-requests .below"), len(page.rows("workers")), len(page.rows("decisions"))]
        stub = Stub(folder, port=port, workers=2).start()
        page.state("Live")
        page.until("the new run's numbers", lambda: page.text("#tile-requests .below") == "0 since start" and len(page.rows("workers")) == 2)
        page.until("no old decision", lambda: page.rows("decisions") == [[["No request was routed yet."]]])
        Gateway(stub.url).chat(2, 2)
        page.until("rates of the new run", lambda: NONE not in (page.text("#tile-requests .value"), page.text("#tile-hits .value")), 5)
        page.is_clean(refusals=True)
        passed("a gateway that is slow, fails or goes is said to be so, what it said stays, and its next run starts from nothing")
    stub.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--key")
    parser.add_argument("--screenshot")
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--page", default=pathlib.Path(__file__).parent / "page", help="folder of the page's files, for --stub")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--driver", default="/usr/bin/chromedriver")
    arguments = parser.parse_args()
    if arguments.stub == (arguments.url is not None):
        parser.error("give either the URL of a gateway or --stub")
    if arguments.stub:
        stubbed(arguments)
    else:
        check(Gateway(arguments.url, arguments.key), arguments)

"""Lints, packs, installs and upgrades a chart with Helm's own library.

    HELM_DRIVER=memory python3 tests/client/helm_client.py KUBECONFIG CHART NAMESPACE

Between the two releases it waits for a line of its standard input.
"""

import asyncio
import json
import os
import sys
import tempfile

from helm_sdkpy import Configuration, Install, Lint, Package, Upgrade

kubeconfig, chart, namespace = sys.argv[1:4]


def run(action, *arguments, **options):
    return asyncio.run(action.run(*arguments, **options))


def passed(what):
    print(f"ok: {what}", flush=True)


configuration = Configuration(namespace=namespace, kubeconfig=kubeconfig)
linted = run(Lint(configuration), chart)
# 1 is an icon that is recommended.
assert linted["Errors"] is None and all(message["Severity"] <= 1 for message in linted["Messages"]), linted
passed("helm lint")
with tempfile.TemporaryDirectory() as folder:
    packed = run(Package(configuration), chart, folder)
    size = os.path.getsize(packed)
assert size < 100_000, size
passed(f"packed in {size} bytes")
options = {"wait": False, "server_side_apply": True}
for values, expected in (({"imge": "x"}, "imge"), ({"workers": {"prefill": "two"}}, "prefill"), ({"gateway": {"image": ""}}, "image")):
    try:
        run(Install(configuration), "wrong", chart, values=values, **options)
        raise AssertionError(f"{values} was taken")
    except Exception as error:
        assert "schema" in str(error) and expected in str(error), error
passed("values that are unknown, of another kind or empty are refused by name")
release = run(Install(configuration), "release", chart, **options)
assert release["info"]["status"] == "deployed", release["info"]
size = len(json.dumps(release))
assert size < 100_000, size
passed(f"installed; the release is {size} bytes")
sys.stdin.readline()
release = run(Upgrade(configuration), "release", chart, values={"image": "registry.example/engine:2"}, **options)
assert release["info"]["status"] == "deployed" and release["version"] == 2, release["info"]
passed("upgraded to another image")

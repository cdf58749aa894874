"""Runs each peer over each transport as a process of its own, with the settings that were fastest, and prints a table.

Settings, found by trying on a machine with two cores:
- NIXL: no progress thread; both sides call the library in their loop. With the thread, the two sides' four spinning threads
  share two cores, and TCP is ten times as slow.
- NIXL over TCP: UCX_NET_DEVICES=lo (UCX else takes the first network card) and 256 KiB segments: without them reads of 1 MiB
  reach 1.5 GB/s, with them 6.5.
- NIXL local: UCX's own choice, which is process_vm_writev/readv (cma) for memory that it did not allocate itself; with cma
  left out it falls to 0.6-2.8 GB/s.
- Mooncake: the connection pool on (off: 0.086 instead of 0.15 GB/s at 4 KiB), its default four lanes and 64 KiB slices
  (1, 2, 8, 16 lanes and 256 KiB or 1 MiB slices were no better).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SIDES = [
    ("nixl", "local", {}),
    ("nixl", "tcp", {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "UCX_TCP_TX_SEG_SIZE": "256k",
        "UCX_TCP_RX_SEG_SIZE": "256k",
    }),
    ("mooncake", "tcp", {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}),
    ("mooncake", "local", {}),
]  # fmt: skip
QUIET = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
SIZES = ["4096x64", "65536x64", "1048576x64", "16777216x8"]
SIZES_SMOKE = ["4096x64", "65536x8"]
SKIPPED = 77


def run(peer, transport, settings, options):
    """The results of one side, its exit code and what it said."""
    command = [
        sys.executable, os.path.join(HERE, "side.py"), "initiator", "--peer", peer, "--transport", transport,
        "--rounds", str(3 if options.smoke else options.rounds),
        "--latency-rounds", str(200 if options.smoke else options.latency_rounds),
        "--register-bytes", str((64 << 20) if options.smoke else (1 << 30)),
        "--sizes", *(SIZES_SMOKE if options.smoke else SIZES),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env={**os.environ, **QUIET, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, errors = process.communicate(timeout=options.timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        # Its far side dies with it: it asked the kernel for that.
        process.kill()
        out, errors = process.communicate()
        code, errors = 124, errors + f"\n{peer} over {transport} did not end within {options.timeout} s"
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return results, code, errors


def run_kvasir(binary, transport, options):
    """Ours over the same sizes and batches, one batch in flight and one thread for each end, as the same kind of results."""
    runs = [
        ["--test", "bw", "--check", "--op", operation, "--sizes", size_bytes, "--batch", count]
        for operation in ["write", "read"]
        for size_bytes, count in (one.split("x") for one in (SIZES_SMOKE if options.smoke else SIZES))
    ]
    # Writes that are answered, as the peers' are.
    runs.append(["--test", "lat", "--op", "write", "--sizes", "64,4096"])
    results, errors = [], ""
    for run in runs:
        with tempfile.NamedTemporaryFile() as file:
            command = [
                binary, "bench", "transfer", "--transport", transport, "--depth", "1", "--memory-bytes", "512M",
                "--rounds", str(3 if options.smoke else options.rounds), "--json", file.name, *run,
            ]  # fmt: skip
            if (code := limited(command, options.timeout)) != 0:
                errors += f"{' '.join(run)}: exit {code}. "
            # The first line is about the machine.
            results += [ours(json.loads(line)["details"], transport) for line in list(open(file.name))[1:]]
    return results, 1 if errors else 0, errors


def limited(command, timeout_s):
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        return 124


def ours(record, transport):
    """A record of `kvasir bench transfer` in the words of this table."""
    common = {"peer": "kvasir", "transport": "local" if transport == "shm" else transport, "op": record["op"],
              "bytes": record["bytes"], "batch": record["batch"], "test": record["test"], "settings": {"depth": 1}}  # fmt: skip
    if record["test"] == "lat":
        return common | {name: record[name] for name in ["p50_us", "p99_us", "p99_9_us"]}
    rate = record["bytes_per_s"] / 1e9
    return common | {
        "gbytes_per_s": rate, "best_gbytes_per_s": record["best_bytes_per_s"] / 1e9,
        "memcpy_gbytes_per_s": record["peer_figure"] / 1e9, "ratio_to_memcpy": record["ratio"],
        "us_per_descriptor": record["bytes"] / rate / 1e3, "wrong_bytes": record["wrong_bytes"],
    }  # fmt: skip


def human(size_bytes):
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB" if size_bytes >= 1024 else f"{size_bytes} B"


def table(results):
    lines = []
    # Like beside like.
    results = sorted(results, key=lambda one: (one["transport"], one.get("op", ""), one["bytes"], one["peer"]))
    rates = [result for result in results if result["test"] == "bw"]
    if rates:
        lines += ["", "Throughput; memcpy of the same pieces in turn, ratio round by round; medians, and the best round",
                  f"{'peer':<9}{'transport':<10}{'op':<6}{'piece':>8}{'batch':>6}{'GB/s':>9}{'best':>9}{'memcpy':>9}{'ratio':>8}{'us/piece':>10}  bytes"]  # fmt: skip
    for one in rates:
        lines.append(
            f"{one['peer']:<9}{one['transport']:<10}{one['op']:<6}{human(one['bytes']):>8}{one['batch']:>6}"
            f"{one['gbytes_per_s']:>9.3f}{one['best_gbytes_per_s']:>9.3f}{one['memcpy_gbytes_per_s']:>9.2f}{one['ratio_to_memcpy']:>8.3f}"
            f"{one['us_per_descriptor']:>10.2f}  {'right' if one['wrong_bytes'] == 0 else 'WRONG'}"
        )
    trips = [result for result in results if result["test"] == "lat"]
    if trips:
        lines += ["", "One way, half a round trip of writes; the calls come from Python", f"{'peer':<9}{'transport':<10}{'piece':>8}{'p50':>9}{'p99':>10}{'p99.9 us':>11}"]  # fmt: skip
    for one in trips:
        lines.append(f"{one['peer']:<9}{one['transport']:<10}{human(one['bytes']):>8}{one['p50_us']:>9.2f}{one['p99_us']:>10.2f}{one['p99_9_us']:>11.2f}")  # fmt: skip
    for one in (result for result in results if result["test"] == "register"):
        lines.append(f"{one['peer']} over {one['transport']}: {human(one['bytes'])} of host memory, pages present: register {one['register_ms']} ms, unregister {one['unregister_ms']} ms")  # fmt: skip
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results there, one JSON object a line")
    parser.add_argument("--smoke", action="store_true", help="small, to see that it runs")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--latency-rounds", type=int, default=10000)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one peer over one transport")
    parser.add_argument("--only", help="one peer")
    parser.add_argument("--kvasir", help="the binary, to measure ours between the peers")
    parser.add_argument("--repeats", type=int, default=1, help="all of them so often, in turn")
    options = parser.parse_args()
    sides = [side for side in SIDES if options.only in (None, side[0])]
    if options.kvasir:
        sides = [("kvasir", "shm", {}), *sides, ("kvasir", "tcp", {})]
    results, failed = [], 0
    for peer, transport, settings in sides * options.repeats:
        if peer == "kvasir":
            some, code, errors = run_kvasir(options.kvasir, transport, options)
        else:
            some, code, errors = run(peer, transport, settings, options)
        results += some
        if code == SKIPPED:
            print(next((line for line in errors.splitlines() if line.startswith("SKIPPED")), f"SKIPPED: {peer}"))
        elif code != 0:
            failed += 1
            print(f"FAILED: {peer} over {transport}, exit {code}: {errors.strip().splitlines()[-1:]}")
        else:
            print(f"{peer} over {transport}: {json.dumps(some[0]['settings'])}")
    if options.json:
        with open(options.json, "w") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    print(table(results))
    return 1 if failed else SKIPPED if not results else 0


if __name__ == "__main__":
    sys.exit(main())

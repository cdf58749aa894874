"""Speaks to the server with redis-py, blocking and asyncio, in both versions of the protocol.

    python3 tests/client/resp_client.py 127.0.0.1:6379 [SOCKET]

Prints one line for each thing that works; the first that does not ends it with a traceback. The commands of LMCache's
Redis connector are given as it gives them: a value and its metadata under two keys, written in this order.
"""

import asyncio
import os
import sys

import redis
import redis.asyncio

host, port = sys.argv[1].rsplit(":", 1)
sockets = sys.argv[2:]
large = os.urandom(5 << 20)


def passed(what):
    print(f"ok: {what}", flush=True)


def plain(client, protocol):
    assert client.ping()
    assert client.set(b"k\r\n\0\xff", b"v\0") is True
    assert client.get(b"k\r\n\0\xff") == b"v\0"
    assert client.get("absent") is None
    assert client.set("k", "w", nx=True) is True and client.set("k", "x", nx=True) is None
    assert client.set("k", "x", xx=True, get=True) == b"w"
    assert client.mset({"a": 1, "b": 2}) is True
    assert client.mget("a", "absent", "b") == [b"1", None, b"2"]
    assert client.exists("a", "b", "absent") == 2
    assert client.delete("a") == 1 and client.unlink("b") == 1
    assert client.setex("t", 100, "v") is True and client.ttl("t") == 100
    assert client.set("t", "v", px=50_000) is True and 49_000 < client.pttl("t") <= 50_000
    assert client.expire("t", 1000) and client.persist("t") and client.ttl("t") == -1
    assert client.strlen("t") == 1 and client.type("t") == b"string"
    assert client.dbsize() == 3 and sorted(client.scan_iter(match="[kt]")) == [b"k", b"t"]
    assert client.memory_usage("t") == 2
    assert client.info()["role"] == "master" and client.info("memory")["maxmemory"] > 0
    assert client.config_get("save") == {"save": ""}
    assert client.client_setname("me") and client.client_getname() in ("me", b"me")
    assert client.execute_command("HELLO", protocol)
    try:
        client.execute_command("LPUSH", "l", 1)
    except redis.ResponseError as error:
        assert "unknown command" in str(error), error
    else:
        raise AssertionError("LPUSH was not refused")
    passed(f"commands, protocol {protocol}")
    assert client.set("large", large) and client.get("large") == large
    assert client.getrange("large", 100, 199) == large[100:200]
    passed(f"5 MiB there and back, protocol {protocol}")
    with client.pipeline(transaction=False) as pipeline:
        for at in range(1000):
            pipeline.set(f"p{at}", at).get(f"p{at}")
        answers = pipeline.execute()
    assert answers == [answer for at in range(1000) for answer in (True, str(at).encode())]
    passed(f"a pipeline of 2000, protocol {protocol}")
    client.flushall()


async def as_lmcache_does(url):
    pool = redis.asyncio.ConnectionPool.from_url(url, max_connections=150)
    client = redis.asyncio.Redis.from_pool(pool)
    keys = [f"vllm@model/x@1@0@{at:032x}@bfloat16" for at in range(40)]

    async def put(key):
        assert await client.set(key + "kv_bytes", memoryview(large)[: 1 << 20])
        assert await client.set(key + "metadata", bytes(28))

    async def get(key):
        if await client.get(key + "metadata") is None:
            return None
        return await client.get(key + "kv_bytes")

    await asyncio.gather(*(put(key) for key in keys[:30]))
    there = [bool(await client.exists(key + "metadata")) for key in keys]
    assert there == [True] * 30 + [False] * 10, there
    values = await asyncio.gather(*(get(key) for key in keys))
    assert [value is not None for value in values] == there
    assert all(value == large[: 1 << 20] for value in values[:30])
    assert await client.delete(keys[0] + "kv_bytes") == 1 and await get(keys[0]) is None
    await client.flushall()
    await client.aclose()
    await pool.aclose()


for protocol in (2, 3):
    plain(redis.Redis(host=host, port=int(port), protocol=protocol), protocol)
for path in sockets:
    plain(redis.Redis(unix_socket_path=path), 3)
    passed("the unix socket")
asyncio.run(as_lmcache_does(f"redis://{host}:{port}/0"))
passed("what LMCache's Redis connector does")

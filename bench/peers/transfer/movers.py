"""The peers behind one interface: `register`, `introduction`, `meet`, `prepare` (once for a list of descriptors, as good
users of these libraries do) and `move` (as often as wanted).

Each is given the settings that were fastest here; `settings` names them and they are printed with the results."""

import base64
import os
import time


class Stuck(Exception):
    """A transfer that neither ended nor failed in time."""


class Nixl:
    """NIXL with its UCX backend. Memory, descriptor lists and the request are prepared once and posted again."""

    def __init__(self, name, transport, role):
        from nixl._api import nixl_agent, nixl_agent_config

        # Without its progress thread both sides call the library in a loop of their own, which was two to ten times as
        # fast here: on two cores that thread spins beside the one that posts.
        thread = os.environ.get("MOVERS_NIXL_PROGRESS") == "1"
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=thread, backends=["UCX"]))
        self.needs_help = not thread
        self.settings = {
            "backend": "UCX",
            "progress_thread": thread,
            **{key: value for key, value in os.environ.items() if key.startswith("UCX_") and "LOG" not in key},
        }
        self.registrations = []
        self.far = None

    def register(self, memory):
        descriptors = self.agent.get_reg_descs([(memory.base, memory.size_bytes, 0, "")], "DRAM")
        started = time.perf_counter()
        registered = self.agent.register_memory(descriptors, backends=["UCX"])
        spent = time.perf_counter() - started
        self.registrations.append(registered)
        return spent

    def unregister(self):
        started = time.perf_counter()
        self.agent.deregister_memory(self.registrations.pop())
        return time.perf_counter() - started

    def introduction(self):
        return {"metadata": base64.b64encode(self.agent.get_agent_metadata()).decode()}

    def meet(self, introduction):
        name = self.agent.add_remote_agent(base64.b64decode(introduction["metadata"]))
        self.far = name.decode() if isinstance(name, bytes) else name

    def prepare(self, operation, near, far_base, pieces, size_bytes):
        def side(agent, base, which):
            rows = [(base + piece[which], size_bytes, 0) for piece in pieces]
            return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(rows, "DRAM"), backends=["UCX"])

        # Both lists stay alive with the request.
        lists = side("NIXL_INIT_AGENT", near.base, 0), side(self.far, far_base, 1)
        every = list(range(len(pieces)))
        request = self.agent.make_prepped_xfer(operation.upper(), lists[0], every, lists[1], every, backends=["UCX"])
        return request, lists

    def move(self, prepared, timeout_s=20.0):
        # The bound calls below the Python class are the same ones that it makes, without its translation of the state.
        agent, handle = self.agent, prepared[0]
        state = agent.transfer(handle)
        if state == "DONE":
            return
        ends = time.perf_counter() + timeout_s
        while True:
            for _ in range(64):
                state = agent.check_xfer_state(handle)
                if state == "DONE":
                    return
                if state != "PROC":
                    raise RuntimeError(f"NIXL: transfer ended as {state}")
            if time.perf_counter() > ends:
                raise Stuck(f"NIXL: no completion within {timeout_s} s")

    def release(self, prepared):
        request, lists = prepared
        request.release()
        for one in lists:
            one.release()

    def progress(self):
        self.agent.get_new_notifs()


class Mooncake:
    """Mooncake's transfer engine over TCP, with its point-to-point handshake for metadata."""

    needs_help = False

    def __init__(self, name, transport, role):
        from mooncake.engine import TransferEngine

        if transport != "tcp":
            raise ImportError(f"its wheel has no {transport} transport for host memory")
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake: initialize failed")
        self.name = f"127.0.0.1:{self.engine.get_rpc_port()}"
        self.settings = {key: value for key, value in os.environ.items() if key.startswith("MC_") and "LOG" not in key}
        self.settings["protocol"] = "tcp"
        self.registered = []
        self.far = None

    def register(self, memory):
        started = time.perf_counter()
        result = self.engine.register_memory(memory.base, memory.size_bytes)
        spent = time.perf_counter() - started
        if result != 0:
            raise RuntimeError(f"Mooncake: register_memory gave {result}")
        self.registered.append(memory.base)
        return spent

    def unregister(self):
        started = time.perf_counter()
        self.engine.unregister_memory(self.registered.pop())
        return time.perf_counter() - started

    def introduction(self):
        return {"name": self.name}

    def meet(self, introduction):
        self.far = introduction["name"]

    def prepare(self, operation, near, far_base, pieces, size_bytes):
        call = self.engine.batch_transfer_sync_write if operation == "write" else self.engine.batch_transfer_sync_read
        here = [near.base + piece[0] for piece in pieces]
        there = [far_base + piece[1] for piece in pieces]
        return call, (self.far, here, there, [size_bytes] * len(pieces))

    def move(self, prepared):
        call, arguments = prepared
        result = call(*arguments)
        if result != 0:
            raise RuntimeError(f"Mooncake: transfer gave {result}")

    def release(self, prepared):
        del prepared

    def progress(self):
        """Its own thread does that."""


MOVERS = {"nixl": Nixl, "mooncake": Mooncake}

"""A client of libkineto's protocol for tests, honest or not: does what it is told on stdin, a JSON object a line, and
answers on stdout. Started in a network namespace of its own, with nothing but the standard library."""

import array
import json
import os
import socket
import struct
import sys
import time

DAEMON = b"\0dynolog\0"
sockets = {}


def named(name, directory):
    key = (name, directory)
    if key not in sockets:
        own = sockets[key] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.bind(f"{directory}/{name}" if directory else b"\0" + name.encode() + b"\0")
        own.setblocking(False)
    return sockets[key]


def poll_datagram(mask=3, pids=None, count=None):
    pids = [os.getpid(), os.getppid()] if pids is None else pids
    payload = struct.pack("<iiq", mask, len(pids) if count is None else count, 0) + struct.pack(f"<{len(pids)}i", *pids)
    return struct.pack("<Q32s", len(payload), b"req") + payload


def ancillary(order):
    items = []
    if "spoofed_pid" in order:
        credentials = struct.pack("=iII", order["spoofed_pid"], os.getuid(), os.getgid())
        items.append((socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials))
    if order.get("with_descriptors"):
        items.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2])))
    return items


def heard(seconds, at_most=1):
    """What comes in on any socket: who heard it, from whom, what."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(found) < at_most:
        for (name, _), own in sockets.items():
            try:
                datagram, sender = own.recvfrom(65536)
            except BlockingIOError:
                continue
            sender = sender.decode() if isinstance(sender, bytes) else sender
            size, kind = struct.unpack_from("<Q32s", datagram)
            text = datagram[40:].decode("latin-1")
            found.append([name, sender, kind.rstrip(b"\0").decode(), size == len(text), text])
        time.sleep(0.002)
    return found


def send(own, datagram, directory, more=()):
    """As libkineto does: never waiting, and again when the daemon's queue is full."""
    for _ in range(2000):
        try:
            return own.sendmsg([datagram], list(more), 0, f"{directory}/dynolog" if directory else DAEMON)
        except BlockingIOError:
            time.sleep(0.001)
    raise TimeoutError("the daemon's queue stays full")


def flood(order):
    for number in range(order["clients"]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.setblocking(False)
            own.bind(b"\0dynoconfigclient-flood%d\0" % number)
            send(own, poll_datagram(), None)
        if order.get("also_noise"):
            send(named("dynoconfigclient-noise", None), os.urandom(64), None)
    return "flooded"


def obey(order):
    if order["do"] == "flood":
        return flood(order)
    if order["do"] == "squat":
        named("dynolog", None)
        return "squatted"
    if order["do"] == "hear":
        return heard(order["seconds"], order.get("at_most", 1))
    directory = order.get("directory")
    own = named(order.get("name", "dynoconfigclient-0"), directory)
    datagram = bytes.fromhex(order["hex"]) if "hex" in order else poll_datagram(**order.get("poll", {}))
    if order.get("in_child"):
        if os.fork() == 0:
            send(own, datagram, directory)
            os._exit(0)
        os.wait()
    else:
        send(own, datagram, order.get("to", directory), ancillary(order))
    return heard(order.get("seconds", 5.0))


print(os.getpid(), flush=True)
for line in sys.stdin:
    print(json.dumps(obey(json.loads(line))), flush=True)

"""Asks an engine's control socket as a peer does; a process of its own for ``bench_peek.py``.

Reads one JSON line: ``address``, ``session``, ``hashes`` (hexadecimal). Then, for each line with
a number of questions and a pause in seconds, asks peek and verify so often and answers with one
line: the seconds of each.
"""

from __future__ import annotations

import json
import sys
import time

from turncache_server.control.client import ControlClient
from turncache_server.control.messages import Peek, PeekReply, Verify, VerifyReply


def main() -> None:
    """Serve until the input ends."""
    job = json.loads(sys.stdin.readline())
    hashes = [bytes.fromhex(each) for each in job["hashes"]]
    question = Peek(session=job["session"], hashes=hashes)
    client = ControlClient()
    for line in sys.stdin:
        order = json.loads(line)
        peeks, verifies = [], []
        for _ in range(order["count"]):
            time.sleep(order["pause_s"])
            began_s = time.perf_counter()
            reply = client.ask(job["address"], question, PeekReply, timeout_s=5)
            peeks.append(time.perf_counter() - began_s)
            assert len(reply.block_ids) == len(hashes), f"{len(reply.block_ids)} are held"
            time.sleep(order["pause_s"])
            began_s = time.perf_counter()
            verify = Verify(
                start_id=reply.start_id,
                generation=reply.generation,
                block_ids=reply.block_ids,
                epochs=reply.epochs,
                hashes=hashes,
            )
            found = client.ask(job["address"], verify, VerifyReply, timeout_s=5)
            verifies.append(time.perf_counter() - began_s)
            assert found.valid == len(hashes), f"{found.valid} are valid"
        print(json.dumps({"peek": peeks, "verify": verifies}), flush=True)
    client.close()


if __name__ == "__main__":
    main()

"""Decoding messages in several threads."""

import subprocess
import sys

#: Threads that decode messages of a type for the first time, all at once.
TOGETHER = """
import sys, threading

from weightsync.protocol import codec, control, expected, http, rank_replies

def decode(kind):
    barrier.wait()
    try:
        codec.from_json(b'{"ranks": [{"rank": 0}], "manifest": [["a", "bfloat16", [1]]], "body": {}}', kind)
    except codec.msgspec.MsgspecError:
        pass

sys.setswitchinterval(1e-6)
for kind in (http.OpenReply, http.UpdateRequest, expected.ExpectedReply, http.StatusReply, rank_replies.RankReply):
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=decode, args=[kind]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_messages_of_a_type_may_be_decoded_by_several_threads_at_once():
    for _ in range(4):  # without the lock, a process crashes about every second time
        assert subprocess.run([sys.executable, "-c", TOGETHER], check=False).returncode == 0

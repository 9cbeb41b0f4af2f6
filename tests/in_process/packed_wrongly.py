"""Push to an LLM of vLLM that packs a layer wrongly now and then; run as `ways`, with `packing_extension`.

Of the options, ``layer`` is its name.
"""

import json
import sys

from tests.in_process.ways import Door
from weightsync import Sender


def main(started, a, b, options):
    layer = options.pop("layer")
    door = Door(started, options)
    found = [door.seen("start")]

    def push(sender, asked, folder):
        found.append(door.seen(asked, lambda: sender.push(folder, version=asked)))

    def push_wrongly(sender, asked, folder):
        door.engine.collective_rpc("pack_wrongly", args=(options["tensor_parallel_size"] - 1, layer))
        push(sender, asked, folder)
        assert not any(door.engine.collective_rpc("not_packed"))

    # The first push of each sender makes the standby, if that has not been made by then.
    with Sender([door.engine], verify="deep") as sender:
        push(sender, "b", b)
        push_wrongly(sender, "wrong", a)
        push(sender, "a", a)
    with Sender([door.engine]) as sender:
        push(sender, "b again", b)
        push_wrongly(sender, "unseen", a)
        push(sender, "a again", a)
    door.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))

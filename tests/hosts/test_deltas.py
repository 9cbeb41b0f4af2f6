"""What has changed, pushed to engines on other hosts."""

from tests.hosts.programs import served
from tests.hosts.test_hosts import LIMIT_S


def deltas(said):
    """The bytes of what has changed that each engine was sent; None where it was everything."""
    assert not said["error"], said
    return [engine["delta"] for engine in said["engines"].values()]


def test_the_link_carries_what_has_changed(trainer, network, far, model_folder, digest, transport):
    folder, carried = model_folder("llama", 1), []
    for changes in range(4):
        before = network.hosts["trainer"].sent()
        said = trainer.push(far, folder, changes=changes, transport=transport)
        carried.append(network.hosts["trainer"].sent() - before)
        assert [served(engine) for engine in far] == [digest(1, changes)] * 2
        assert [nbytes is not None for nbytes in deltas(said)] == [changes > 0] * 2
    assert max(carried[1:]) < carried[0] / 3


def test_a_restarted_engine_gets_everything(trainer, far, model_folder, digest, transport):
    folder = model_folder("llama", 1)
    trainer.push(far, folder, changes=0, transport=transport)
    assert None not in deltas(trainer.push(far, folder, changes=1, transport=transport))
    far[0].kill()
    far[0].start()
    far[0].wait()
    assert deltas(trainer.push(far, folder, changes=2, transport=transport)) == [None] * 2
    assert [served(engine) for engine in far] == [digest(1, 2)] * 2
    assert None not in deltas(trainer.push(far, folder, changes=3, transport=transport))
    assert [served(engine) for engine in far] == [digest(1, 3)] * 2


def test_after_a_cut_network_everything_is_sent(trainer, network, far, model_folder, digest, transport):
    folder, options = model_folder("llama", 1), {"timeout_s": LIMIT_S, "transport": transport}
    trainer.push(far, folder, changes=0, **options)
    assert None not in deltas(trainer.push(far, folder, changes=1, **options))
    trainer.begin(far, folder, changes=2, halts=True, **options)
    assert "halted" in trainer.outcome()
    with network.cut("a"):
        trainer.go_on()
        said = trainer.outcome()
        assert [served(engine) for engine in far] == [digest(1, 1)] * 2
    assert said["error"] in ("PushTimeout", "TransferFailed", "EngineUnreachable"), said
    assert said["engines"][far[1].url] == "unchanged"
    assert deltas(trainer.push(far, folder, changes=2, **options)) == [None] * 2
    assert None not in deltas(trainer.push(far, folder, changes=3, **options))
    assert [served(engine) for engine in far] == [digest(1, 3)] * 2

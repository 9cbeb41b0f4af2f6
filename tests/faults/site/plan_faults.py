"""Faults while a load plan copies, for `sitecustomize`."""

import itertools
import sys


def patches(at, around, here):
    """By module, the patch that injects faults there; ``here`` says which rank this process is."""

    class Counted:
        """Tensors count as loaded in proportion to the copied runs of bytes, the last once all are copied."""

        def __init__(self, plan, stage):
            self.native_copy = sys.modules["weightsync.tensors.native_copy"]  # which makes the copies of plans
            self.tensors, self.runs, self.done = len(plan.layout.entries), len(plan.runs_from(stage)) + 1, 0
            self.numbers, self.run = iter(range(self.tensors)), self.native_copy._run

        def count(self, calls):
            for call in calls:
                yield call
                self.done += 1
                new = self.done * self.tensors // self.runs - (self.done - 1) * self.tensors // self.runs
                for number in itertools.islice(self.numbers, new):
                    at("rank loads", tensor=number, **here)

        def __enter__(self):
            self.native_copy._run = lambda calls: self.run(self.count(calls))

        def __exit__(self, *_):
            self.native_copy._run = self.run

        def end(self):
            for number in self.numbers:
                at("rank loads", tensor=number, **here)
            at("rank loaded", **here)

    def load_plan(module):
        @around(module.LoadPlan, "replay")
        def replay(original, self, stage):
            counted = Counted(self, stage)
            with counted:
                original(self, stage)
            counted.end()

        @around(module.LoadPlan, "steps")
        def steps(original, self, stage):
            counted, left = Counted(self, stage), original(self, stage)
            while True:
                with counted:
                    if next(left, left) is left:
                        break
                yield
            counted.end()

    def planned(module):
        def counted(arriving, stage):
            if not hasattr(arriving, "fault_count"):
                arriving.fault_count = Counted(arriving.plan, stage)
            return arriving.fault_count

        class CountedWork:
            def __init__(self, work, count):
                self.work, self.count = work, count

            def make(self):
                with self.count:
                    return self.work.make()

        @around(module.Arriving, "passing")
        def passing(original, self, stage, bucket, hashed):
            work = original(self, stage, bucket, hashed)
            return None if work is None else CountedWork(work, counted(self, stage))

        @around(module.Arriving, "take")
        def take(original, self, stage, bucket):
            with counted(self, stage):
                original(self, stage, bucket)

        @around(module.Arriving, "steps")
        def steps(original, self, stage):
            yield from original(self, stage)
            self.fault_count.end()

    return {"weightsync.engine.loading.load_plan": load_plan, "weightsync.engine.loading.planned": planned}

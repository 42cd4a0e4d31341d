"""Where a compile job and the disk cache meet: a segment's files, written after a compile and read instead of one."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from transmuter_async.compiler.disk import DiskCache, Entry, Rejected
from transmuter_async.compiler.facts import DiskEvicted, DiskFailed, DiskRejected, Observe
from transmuter_async.compiler.placement import launcher, unwrapped
from transmuter_async.compiler.records import decode_value, encode_value, needs_from, needs_record, read_alarms
from transmuter_async.compiler.segment import Layout, Making, Segment, entry_key
from transmuter_async.compiler.tuning import Tuning
from transmuter_async.compiler.values import sequence_length, shapes_of

if TYPE_CHECKING:
    from transmuter_async.compiler.job import Built, CompileJob
    from transmuter_async.compiler.prepare import PreparedGraph

__all__ = ["Stored"]


class Stored:
    """A job's files in the disk cache.

    What of the values that may enter a segment it really reads is only known after a trace. So a file is named by what a
    trace read, and where that was not everything, a file for the place lists the sets of names that traces read there.

    The file under the digest of what is known before the trace holds the segment, or the names of the arguments that
    it needs by value: then the digest with these values leads on, round by round as the plan found them.
    """

    def __init__(self, job: CompileJob, disk: DiskCache) -> None:
        self.job = job
        self.disk = disk
        self.rejected = False

    def load(self, observe: Observe) -> Segment | None:
        """The segment from its file, or None where it must be compiled."""
        everything = frozenset(self.job.values)
        try:
            found = self._follow(everything)
            if found is None:
                for names in self._read_sets():
                    if names < everything and (found := self._follow(names)) is not None:
                        break
        except Rejected as error:
            self.rejected = True
            observe(DiskRejected(str(error)))
            return None
        return found

    def _follow(self, reads: frozenset[str]) -> Segment | None:
        """The segment of a trace that reads these names, from file to file as its static names were found."""
        statics = self.job.statics_given
        while True:
            entry = self.disk.load(self._name(reads, statics), self.job.prepared.device)
            if entry is None:
                return None
            more = entry.record.get("statics")
            if more is None:
                return self._segment(entry, statics)
            statics = statics | frozenset(more)

    def _read_sets(self) -> list[frozenset[str]]:
        """What traces from this place read, where it was not all that there was."""
        entry = self.disk.load(self._place_name(), self.job.prepared.device)
        return [] if entry is None else [frozenset(names) for names in entry.record["reads"]]

    def _note(self, reads: frozenset[str]) -> None:
        """Add to the place's list. Another process may do the same at once: then one of them compiles once more."""
        if reads == frozenset(self.job.values):
            return
        try:
            known = self._read_sets()
        except Rejected:
            known = []
        if reads not in known:
            self.disk.store(self._place_name(), {"reads": [sorted(names) for names in (*known, reads)]}, [])

    def save(self, built: Built, observe: Observe) -> None:
        """Write the segment's files. What goes wrong is told, never raised."""
        arrays: list[np.ndarray] = []
        job, segment, weights = self.job, built.segment, built.weights
        try:
            record = {
                "stop": segment.stop,
                "needs": needs_record(segment.needs),
                "arguments": segment.layout.arguments,
                "values": segment.layout.values,
                "program_arguments": segment.arguments,
                "argument_trees": [
                    sequence_length(job.values[name]) for name in segment.arguments if name not in segment.donated
                ],
                "donated": segment.donated,
                "outputs": segment.outputs,
                "output_trees": list(built.output_trees),
                "alarms": [astuple(alarm) for alarm in segment.alarms],
                "uses_seed": segment.uses_seed,
                "node_count": segment.node_count,
                "lowerings": segment.lowerings,
                "operations": 0 if segment.making is None else segment.making.operations,
                "weight_count": len(weights),
                "weights": [self._weight_record(array, arrays) for array in weights],
                "host_outputs": {name: encode_value(v, arrays) for name, v in segment.host_outputs.items()},
            }
            if segment.tuning is not None:
                record["tuning"] = segment.tuning.record()
            reads = built.all_reads
            self._note(reads)
            for before, after in itertools.pairwise(built.rounds):
                self.disk.store(self._name(reads, before), {"statics": sorted(after - before)}, [])
            name = self._name(reads, built.rounds[-1])
            for size in self.disk.store(name, record, arrays, unwrapped(segment.program)):
                observe(DiskEvicted(size, "the cache folder is above its limit"))
        except (OSError, Rejected, TypeError) as error:
            observe(DiskFailed(f"{type(error).__name__}: {error}"))

    def _weight_record(self, array: np.ndarray, arrays: list[np.ndarray]) -> dict[str, Any]:
        root = self.job.prepared.root
        number = root.weight_number(array)
        if number is not None:
            return {"weight": number}
        origin = root.origin(array)
        if origin is not None:
            return {"weights": origin[0], "recipe": origin[1], "arguments": origin[2]}
        arrays.append(array)
        return {"array": len(arrays) - 1}

    def _segment(self, entry: Entry, statics: frozenset[str]) -> Segment:
        job, record = self.job, entry.record
        root = job.prepared.root
        try:
            weights = [
                entry.arrays[item["array"]] if "array" in item else _weight(root, item) for item in record["weights"]
            ]
            layout = Layout(tuple(record["arguments"]), tuple(record["values"]))
            values = {name: job.values[name] for name in (*layout.arguments, *layout.values)}
            return Segment(
                place=job.place,
                index=job.index,
                position=job.position,
                stop=record["stop"],
                needs=needs_from(record["needs"]),
                layout=layout,
                key=entry_key(layout, values),
                shapes=tuple(shapes_of(name, values[name]) for name in layout.arguments),
                program=launcher(
                    entry.program, arguments=record["program_arguments"], donated=record["donated"], mesh=None
                ),
                eager=False,
                weights=root.on_device(weights),
                arguments=tuple(record["program_arguments"]),
                outputs=tuple(record["outputs"]),
                host_outputs={k: decode_value(v, entry.arrays) for k, v in record["host_outputs"].items()},
                alarms=read_alarms(record["alarms"]),
                uses_seed=record["uses_seed"],
                host_values=tuple(sorted(statics - job.statics_known)),
                node_count=record["node_count"],
                donated=tuple(record["donated"]),
                lowerings=tuple(tuple(each) for each in record["lowerings"]),
                making=Making(0, 0, 0, record["operations"]),
                tuning=Tuning.read(record["tuning"]) if "tuning" in record else None,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Rejected(f"its record does not fit the graph: {type(error).__name__} {error}") from error

    def _name(self, reads: frozenset[str], statics: frozenset[str]) -> str:
        job = self.job
        by_value = job.known | statics
        layout = Layout(
            tuple(sorted(name for name in reads if name not in by_value)),
            tuple(sorted(name for name in reads if name in by_value)),
        )
        facts = (
            job.prepared.root.digest(),
            job.place,
            job.first,
            layout,
            sorted(statics),
            entry_key(layout, job.values),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _place_name(self) -> str:
        facts = (self.job.prepared.root.digest(), self.job.place, "reads")
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _weight(root: PreparedGraph, item: dict[str, Any]) -> np.ndarray:
    """A weight of the graph, or what a recipe makes of some."""
    if "weight" in item:
        return root.weight(item["weight"])
    arrays = tuple(None if number is None else root.weight(number) for number in item["weights"])
    found = root.rearranged(arrays, item["recipe"], tuple(item["arguments"]))
    if found is None:
        raise Rejected(f"its record asks for weights made by {item['recipe']!r}, which the budget does not allow")
    return found

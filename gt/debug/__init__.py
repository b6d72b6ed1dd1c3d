"""Tools to look inside a session: instructions, communication, memory, statistics, timelines, traces and layouts."""

from gt.debug.communication import CollectiveEvent, Comm, comm
from gt.debug.instruction_tape import print_tape, tape
from gt.debug.layout_pictures import visualize_sharding
from gt.debug.memory_use import LineMemory, Memory, MemoryBytes, MemoryOfWorker, memory
from gt.debug.timelines import Timeline, timeline
from gt.debug.traces import Trace, trace
from gt.debug.worker_stats import HotPaths, StatsOfWorkers, get_worker_stats

__all__ = [
    "CollectiveEvent",
    "Comm",
    "HotPaths",
    "LineMemory",
    "Memory",
    "MemoryBytes",
    "MemoryOfWorker",
    "StatsOfWorkers",
    "Timeline",
    "Trace",
    "comm",
    "get_worker_stats",
    "memory",
    "print_tape",
    "tape",
    "timeline",
    "trace",
    "visualize_sharding",
]

"""Tools to look inside a session: instructions, communication, memory, statistics, timelines, traces and layouts.

>>> x = gt.ones(2)
>>> gt.debug.print_tape()
%1 = aten.ones.default()...
"""

from gt.debug.communication import CollectiveEvent, Comm, comm
from gt.debug.explanations import Explanation, explain
from gt.debug.instruction_tape import print_tape, tape
from gt.debug.layout_pictures import visualize_sharding
from gt.debug.memory_use import LineMemory, Memory, MemoryBytes, MemoryOfWorker, memory
from gt.debug.non_finite import FindNan, NonFiniteOp, find_nan
from gt.debug.stories import Story, TensorEvent, story
from gt.debug.timelines import Timeline, timeline
from gt.debug.traces import Trace, trace
from gt.debug.worker_stats import CacheHits, HotPaths, StatsOfWorkers, get_worker_stats

__all__ = [
    "CacheHits",
    "CollectiveEvent",
    "Comm",
    "Explanation",
    "FindNan",
    "HotPaths",
    "LineMemory",
    "Memory",
    "MemoryBytes",
    "MemoryOfWorker",
    "NonFiniteOp",
    "StatsOfWorkers",
    "Story",
    "TensorEvent",
    "Timeline",
    "Trace",
    "comm",
    "explain",
    "find_nan",
    "get_worker_stats",
    "memory",
    "print_tape",
    "story",
    "tape",
    "timeline",
    "trace",
    "visualize_sharding",
]

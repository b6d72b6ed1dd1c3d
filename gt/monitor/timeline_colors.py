"""The colours of a timeline, and what they mean."""

from __future__ import annotations

from gt.monitor.timeline_lanes import EXCHANGE, IDLE, WAIT
from gt.monitor.timeline_model import TRANSFER
from gt.sharding.op_kinds import CONTRACTION, CREATION_OP, MOVEMENT, OPTIMIZER, OTHER, POINTWISE_OP, REDUCTION_OP

COLORS = {
    CONTRACTION: "#3b6fb6",
    POINTWISE_OP: "#5aa469",
    REDUCTION_OP: "#3fb8af",
    MOVEMENT: "#a58a6f",
    CREATION_OP: "#e3c34a",
    OPTIMIZER: "#8e6bbf",
    OTHER: "#9aa3ad",
    TRANSFER: "#2f4858",
    EXCHANGE: "#f0642d",
    WAIT: "#fbd5c6",
    IDLE: "#eef1f4",
}
MEANINGS = {
    CONTRACTION: "products, convolutions",
    POINTWISE_OP: "pointwise",
    REDUCTION_OP: "reductions, norms",
    MOVEMENT: "local moves, views",
    CREATION_OP: "creation, random",
    OPTIMIZER: "optimizer lists",
    OTHER: "other",
    TRANSFER: "to and from the program",
    EXCHANGE: "exchange with workers",
    WAIT: "waits for a worker",
    IDLE: "idle",
}
STRIPES = "#e0805c"
READS = "#c9d1d9"

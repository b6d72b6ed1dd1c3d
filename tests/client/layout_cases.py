"""Grids of virtual workers, and layouts of a tensor on each of them."""

import torch

import gt

GRIDS = {"1": (1,), "2": (2,), "3": (3,), "8": (8,), "2x4": (2, 4), "2x2x2": (2, 2, 2)}
AXES = ("dp", "tp", "pp")
LAYOUTS = {
    "1": ["dp, -", "-, -", "-, - + dp"],
    "2": ["dp, -", "-, dp", "-, -", "-, - + dp"],
    "3": ["dp, -", "-, dp", "-, -", "-, - + dp"],
    "8": ["dp, -", "-, dp", "-, -", "-, - + dp", "dp[0:0 0:1 1:1 1:4 4:5 5:5 5:6 6:7], -"],
    "2x4": ["dp, tp", "tp, dp", "dp tp, -", "-, tp dp", "dp, - + tp", "-, tp", "-, - + dp tp", "-, -"],
    "2x2x2": ["dp pp, tp", "-, pp + dp", "pp tp dp, -"],
}
EVERYWHERE = [(grid, layout) for grid, layouts in LAYOUTS.items() for layout in layouts]
VALUE = torch.arange(35.0).reshape(7, 5)  # uneven over everything; some workers hold nothing


def mesh_of(grid):
    return gt.mesh(GRIDS[grid], AXES[: len(GRIDS[grid])])

"""Statistics of a table with Dask: its rows are in two chunks, on two worker processes.

pip install "dask[array]" distributed
python examples/peers/dask_program.py
"""

import dask.array as da
import numpy as np
from distributed import Client

if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None):
        rows = da.arange(8000, dtype=np.float64, chunks=4000).reshape(2000, 4)
        x = da.sin(rows)
        print(x.chunks)
        scaled = (x - x.mean(axis=0)) / x.std(axis=0)
        covariance = scaled.T @ scaled / len(x)
        print(covariance.compute().round(4))  # nothing has run before this line

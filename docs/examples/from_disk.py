import tempfile
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet

from gpclml import Regressor

folder = Path(tempfile.mkdtemp())
draws = np.random.default_rng(0)
table = pandas.DataFrame(draws.random((400, 3)), columns=["a", "b", "c"])
table["y"] = np.sin(6 * table["a"]) * table["b"] + 0.05 * draws.standard_normal(400)
table.to_parquet(folder / "rows.parquet")  # stands for your file

# Parquet, some rows at a time, into an array on the disk.
file, start = pyarrow.parquet.ParquetFile(folder / "rows.parquet"), 0
shape = file.metadata.num_rows, len(file.schema_arrow)
rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float32, shape)
for batch in file.iter_batches(100):
    rows[start : start + len(batch)] = batch.to_pandas()
    start += len(batch)

rows.flush()
rows = np.load(folder / "rows.npy", mmap_mode="r")
model = Regressor(["rbf"], random_state=0).fit(rows[:300, :-1], rows[:300, -1])
# New rows too, some at a time.
means = np.concatenate([model.predict(rows[i : i + 50, :-1]) for i in range(300, 400, 50)])
print(f"error {np.sqrt(np.mean((means - rows[300:, -1]) ** 2)):.2f} of a noise of 0.05")

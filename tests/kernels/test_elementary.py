import numpy as np

from octavo.kernels.cpu.elementary import tanh
from octavo.kernels.cpu.jit import kernel
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load, store


@kernel(cache=False)
def tanh_of_each(x: np.ndarray, out: np.ndarray) -> None:
    for index in range(0, len(x), LANES):
        store(out, index, tanh(load(x, index)))


def test_tanh_is_as_close_as_it_says() -> None:
    positive = np.arange(0, 0x7F80_0000, 2_039, dtype=np.uint32)[: 2**20].view(np.float32)
    x = np.concatenate([positive, -positive])
    out = np.empty_like(x)
    tanh_of_each(x, out)
    exact = np.tanh(x.astype(np.float64))
    units = np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert units.max() < 1.5
    special = np.array([np.inf, -np.inf, np.nan, 0.0] * 4, np.float32)
    out = np.empty_like(special)
    tanh_of_each(special, out)
    np.testing.assert_array_equal(out[:4], [1.0, -1.0, np.nan, 0.0])

"""How long the codecs take on one core: ``python benchmarks/codec.py [--mib 64]``.

For each codec the median time to encode and to decode a float32 buffer, and the bytes on the wire
over the buffer's. A codec pays where it takes less time than the network needs for what it saves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from hvd_pipe.torch.compression import BF16, Codec, Int8


def median_ms(work: Callable[[], None], repeats: int) -> float:
    """Return the median time of ``work`` in milliseconds, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def measure(codec: Codec, values: torch.Tensor, repeats: int) -> str:
    """Return one line of the table."""
    data = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    out = torch.empty_like(values)
    encode = median_ms(lambda: codec.encode(values, data), repeats)
    decode = median_ms(lambda: codec.decode(data, out), repeats)
    name = f"int8 {codec.chunk}" if isinstance(codec, Int8) else "bf16"
    ratio = data.nbytes / values.nbytes
    return f"{name:10} {encode:9.1f} {decode:9.1f} {encode + decode:9.1f} {ratio:11.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=64, help="size of the buffer in MiB")
    parser.add_argument("--repeats", type=int, default=9, help="times that each is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(options.mib * 2**20 // 4)
    print(f"{options.mib} MiB of float32, one thread, median of {options.repeats}")
    print(f"{'codec':10} {'encode ms':>9} {'decode ms':>9} {'both ms':>9} {'wire / size':>11}")
    for codec in (BF16(), Int8(), Int8(chunk=64)):
        print(measure(codec, values, options.repeats))


if __name__ == "__main__":
    main()
